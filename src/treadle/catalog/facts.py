"""Facts of a model from its header: kind, parameters, context, and the memory that it takes.

No weights are read. Facts are stored in treadle's cache folder, so that a later listing opens no
model file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import __version__
from treadle.base.fast_classes import dataclass
from treadle.catalog.records import read_facts, write_facts
from treadle.catalog.stored import StoredModel
from treadle.errors import TreadleError
from treadle.models.config import USUAL_CONTEXT
from treadle.models.ignored_tensors import SPEECH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treadle.files.gguf import GGUF
    from treadle.models.config import Config

VERSION = f"{__version__}/2"  # of the stored facts: a new field needs a new number
PROGRAM_BYTES = 200 << 20  # memory of the program besides weights, keys and values
KV = "f16"  # the default type of keys and values
TEXT = "text"
VECTORS = "vectors"
SCORES = "scores"
SPEECH_TEXT = "speech"  # the text of sound


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model.

    title: the name that the file gives itself. kind: of its output: "text", "vectors", "scores", or
        "speech" (text of sound).
    format: the one that most bytes of its weights have. n_context: tokens that it was trained for.
    kv_bytes: bytes of keys, values and states of one text of USUAL_CONTEXT tokens, or of
        ``n_context`` if that is less; full_kv_bytes: of ``n_context``.
    reads_media: whether its architecture reads pictures or sounds through a projector. modalities:
        what it reads with the projector that is there: "image", "audio".
    has_template: whether it has a chat template. license: as the file states it.
    problem: why treadle does not run it, "" if it does.
    """

    architecture: str = ""
    title: str = ""
    kind: str = TEXT
    format: str = ""
    n_parameters: int = 0
    n_context: int = 0
    kv_bytes: int = 0
    full_kv_bytes: int = 0
    reads_media: bool = False
    modalities: tuple[str, ...] = ()
    has_template: bool = False
    license: str = ""
    problem: str = ""

    def memory_bytes(self, model: StoredModel) -> int:
        """Return the bytes of memory that one text of the default context takes: weights,
        projector, keys and values, program.
        """
        return self.stored_bytes(model) + self.kv_bytes + PROGRAM_BYTES

    def stored_bytes(self, model: StoredModel) -> int:
        """Return the bytes of the model's files and, if it reads media, of its projector."""
        return model.n_bytes + (model.projector_bytes if self.reads_media else 0)


@dataclass(frozen=True)
class MemoryFit:
    """Whether a model fits into this machine's memory (``machine``), and into its free memory
    (``now``); None if the system does not tell.
    """

    machine: bool | None
    now: bool | None


def facts_of(model: StoredModel) -> ModelFacts:
    """Return a model's facts: stored ones, else those of its header, which are stored. ``problem``
    is set for a model that cannot be read, or whose download is not finished.
    """
    if not model.is_whole:
        return ModelFacts(problem="its download is not finished")
    version = f"{VERSION}/{model.projector.name if model.projector else ''}"
    stored = read_facts(model.path, version)
    if stored is not None:
        try:
            return ModelFacts(**{**stored, "modalities": tuple(stored["modalities"])})
        except (TypeError, KeyError):
            pass  # damaged: read anew
    facts = read_header(model.path, model.projector)
    if not facts.problem:
        write_facts(model.path, version, asdict(facts))
    return facts


def read_header(path: Path, projector: Path | None = None) -> ModelFacts:
    """Return the facts of a model's file or folder. ``projector``: the projector file beside it, if
    any. Unreadable contents give a ``problem``, no error.
    """
    from treadle.convert.open import open_model

    try:
        with open_model(path) as gguf:
            return describe(gguf, projector)
    except (TreadleError, OSError) as error:
        return ModelFacts(problem=str(error))


def describe(gguf: GGUF, projector: Path | None) -> ModelFacts:
    """Return the facts of an open model file. ``projector``: the file beside it, if any."""
    from treadle.models.load import load_config

    known: dict[str, Any] = {
        "architecture": text_of(gguf, "general.architecture"),
        "title": text_of(gguf, "general.name"),
        "license": text_of(gguf, "general.license"),
        "format": main_format(gguf),
        "n_parameters": sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        "has_template": "tokenizer.chat_template" in gguf.metadata,
    }
    if known["architecture"] in SPEECH:
        return describe_speech(gguf, known)
    try:
        config = load_config(gguf, warn=False)
    except TreadleError as error:
        return ModelFacts(**known, problem=str(error))
    usual = min(USUAL_CONTEXT, config.n_ctx_train)
    return ModelFacts(
        **known,
        kind=kind_of(config),
        n_context=config.n_ctx_train,
        kv_bytes=cache_bytes(config, usual),
        full_kv_bytes=cache_bytes(config, config.n_ctx_train),
        reads_media=config.arch.pictures,
        modalities=modalities_of(gguf, config, projector),
    )


def describe_speech(gguf: GGUF, known: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a speech model. ``known``: facts that do not depend on its kind."""
    from treadle.speech.read import read_parts

    try:
        config = read_parts(gguf).config
    except TreadleError as error:
        return ModelFacts(**known, kind=SPEECH_TEXT, problem=str(error))
    # Keys and values of a text are f16, those of its window f32.
    of_row = 2 * config.n_embd * config.n_text_layer
    n_bytes = of_row * (2 * config.n_text_ctx + 4 * config.n_audio_ctx)
    return ModelFacts(
        **known,
        kind=SPEECH_TEXT,
        n_context=config.n_text_ctx,
        kv_bytes=n_bytes,
        full_kv_bytes=n_bytes,
        modalities=("audio",),
    )


def text_of(gguf: GGUF, key: str) -> str:
    """Return the metadata value of ``key`` if it is a text, else ""."""
    value = gguf.metadata.get(key)
    return value if isinstance(value, str) else ""


def main_format(gguf: GGUF) -> str:
    """Return the name of the format that most bytes of the weights have, "" without weights."""
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        sizes[tensor.type_name] += tensor.n_bytes
    return next((name for name, _ in sizes.most_common(1)), "")


def kind_of(config: Config) -> str:
    """Return the kind of a model's output: "text", "vectors", or "scores" of pairs."""

    if config.scores:
        return SCORES
    return TEXT if config.main_output == "logits" else VECTORS


def cache_bytes(config: Config, n_ctx: int) -> int:
    """Return the bytes that ``KVCache`` reserves for one text of ``n_ctx`` tokens, with f16 keys
    and values.
    """
    from treadle.kvcache.cache import sequence_bytes
    from treadle.models.graphs import GRAPHS

    return sequence_bytes(GRAPHS[config.arch.graph].pools(config), n_ctx, KV)


def modalities_of(gguf: GGUF, config: Config, projector: Path | None) -> tuple[str, ...]:
    """Return the kinds of media, "image" and "audio", that a model reads with the ``projector`` or
    with the parts in its own folder; () if the projector cannot be read.
    """
    from treadle.files.gguf import open_gguf
    from treadle.files.splits import is_hf

    if is_hf(gguf.path):
        from treadle.media.hf_projector import folder_modalities

        return folder_modalities(gguf.path)
    if projector is None:
        return ()
    try:
        with open_gguf(projector) as file:
            return tuple(
                kind
                for kind, part in {"image": "vision", "audio": "audio"}.items()
                if _reads(file.metadata, part, config)
            )
    except (TreadleError, OSError):
        return ()


def _reads(metadata: Mapping[str, Any], part: str, config: Config) -> bool:
    """Return whether treadle reads the ``part`` ("vision", "audio") of a projector, whose keys are
    ``metadata``, for a model. If the model's own file does not say that it reads media, the
    projector's rows must be as wide as the model's states.
    """
    from treadle.media.families import FAMILIES

    if metadata.get(f"clip.has_{part}_encoder") is not True:
        return False
    kind = metadata.get(f"clip.{part}.projector_type", metadata.get("clip.projector_type", "mlp"))
    if kind not in FAMILIES.names():
        return False
    return config.arch.pictures or metadata.get(f"clip.{part}.projection_dim") == config.n_embd


def memory_fit(needed: int) -> MemoryFit:
    """Return whether ``needed`` bytes fit into this machine's memory, and into its free memory."""
    from treadle.machine.memory import memory_bounds

    bounds = memory_bounds()
    if not bounds:
        return MemoryFit(None, None)
    return MemoryFit(
        all(needed <= bound.limit_bytes for bound in bounds),
        all(needed <= bound.free_bytes for bound in bounds),
    )
