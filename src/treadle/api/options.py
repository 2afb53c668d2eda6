"""Checks of API arguments: the path of a model, settings by name, sessions, adapters, control
vectors, and the defaults of a model's answers: chat template, its variables, reasoning, sampling
and seed.

``load``, the commands and the server share one ``Defaults`` object. Settings of a single call
override them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.base.fast_classes import dataclass
from treadle.base.validate import (
    as_integer,
    check_keywords,
    file_name,
    flag,
    integer,
    listed,
    positive,
    ranged,
)
from treadle.errors import (
    ContextFullError,
    FileError,
    SamplingError,
    TreadleError,
    UnsupportedError,
    of_setting,
)
from treadle.files.gguf import GGUF, open_gguf
from treadle.models.config import USUAL_CONTEXT
from treadle.sampling import Sampling

if TYPE_CHECKING:
    from treadle.api.control_vector import ControlVectors
    from treadle.api.model import Model
    from treadle.api.session import Session
    from treadle.chat.template.template import ChatTemplate, ChosenTemplate
    from treadle.convert.lora.lora import Adapters
    from treadle.engine.engine import Engine
    from treadle.files.tensor import Progress
    from treadle.hub.fetch import ProgressCallback
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.config import Config
    from treadle.tokenizer.tokenizer import Tokenizer


HUB = "hf:"  # names on the Hugging Face hub begin so
T = TypeVar("T")
Given = TypeVar("Given")
Scales = Mapping[Any, float] | None  # of adapters or control vectors, by name or number
WHOLE_TEXT = 8192  # largest default context of encoders, which run a text at once
SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
RULES = ("grammar", "json_schema", "regex", "constraint")  # at most one per request


def packaged_model() -> Path:
    """Return the path of the small model that ships inside the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.gguf"


def find_path(
    given: str | os.PathLike[str] | None,
    of: str = "path",
    progress: ProgressCallback | None = None,
    *,
    projector: bool | None = False,
) -> Path:
    """Return the path of the model that ``given`` means; None means the one in the package. A text
    that is no path on this machine may be a name on the hub, ``hf:OWNER/REPO`` and longer forms,
    which is downloaded once, or the short name of a downloaded model, as ``treadle list`` shows it.
    ``of``: the argument's name, for errors; ``progress``: called during a download, None for no
    reports; ``projector``: whether a download includes the projector, as of ``hub.download``.

    Raises FileError for an invalid name and a short name that fits several models, and the errors
    of ``hub.download``. A path that does not exist is returned.
    """
    if given is None:
        return packaged_model()
    path = file_name(given, of)
    if not isinstance(given, str) or os.path.lexists(path):
        return path
    if given.startswith(HUB):
        from logging import getLogger

        from treadle.hub import download

        say = getLogger("treadle").info
        return download(given, progress=progress, say=say, projector=projector)
    from treadle.catalog.names import find_named, similar_models

    if (named := find_named(given)) is not None:
        return named.model.path
    from treadle.hub.name import check_no_address

    check_no_address(given)
    if similar := similar_models(given):
        raise FileError(f"no such file; {similar}", path=given)
    return path


def open_found(path: Path, progress: Progress | None = None, *, drafter: bool = False) -> GGUF:
    """Open the model at ``path`` as ``convert.open.open_model`` does, with its errors. A GGUF file
    needs no reader of other files.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        with suppress(FileError, UnsupportedError):
            return open_gguf(path, stored=True)
    from treadle.convert.open import open_model

    return open_model(path, progress, drafter=drafter)


def read_sizes(
    threads: int | None,
    context: int | None,
    kv_bytes: int | None,
    kv_tokens: int | None,
    n_sequences: int,
    cache_bytes: int,
) -> tuple[int | None, int | None, int | None, int | None, int, int]:
    """Return the given size settings of ``load``, in this order, as Python ints, because address
    arithmetic with numpy's would overflow; None (the default) stays. Raises TreadleError for a
    value that is not a whole number above 0, and for more than 1024 threads.
    """
    return (
        threads if threads is None else positive("threads", threads, 1024),
        context if context is None else positive("context", context),
        kv_bytes if kv_bytes is None else positive("kv_bytes", kv_bytes),
        kv_tokens if kv_tokens is None else positive("kv_tokens", kv_tokens),
        positive("n_sequences", n_sequences),
        positive("cache_bytes", cache_bytes),
    )


def check_choices(
    deterministic: bool, speculate: bool | None, draft: Any, kv: str, isa: str | None
) -> None:
    """Raise TreadleError if ``deterministic`` or ``speculate`` is no flag, ``kv`` or ``isa`` no
    str, or ``draft`` is given with ``speculate=False``. ``speculate``, ``draft`` and ``isa`` may be
    None.
    """
    flag("deterministic", deterministic)
    if speculate is not None and not flag("speculate", speculate) and draft is not None:
        raise TreadleError("draft= cannot be combined with speculate=False")
    for name, value in (("kv", kv), ("isa", "" if isa is None else isa)):
        if not isinstance(value, str):
            raise TreadleError(f"{name}={value!r:.40}: expected a name")


def read_each(
    texts: Sequence[Given], read: Callable[[Given], T], name: Callable[[int], str]
) -> list[T]:
    """Return ``read(text)`` for each text. If there are several, an error begins with
    ``name(index)``.
    """
    result = []
    for i, text in enumerate(texts):
        try:
            result.append(read(text))
        except TreadleError as error:
            if len(texts) == 1 or isinstance(error, FileError):
                raise
            kind = ContextFullError if isinstance(error, ContextFullError) else TreadleError
            raise kind(f"{name(i)}: {error}") from error
    return result


def token_limit(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` as an int, or None (no limit) for None and -1. Raises TreadleError
    below -1.
    """
    if max_tokens is None:
        return None
    limit = integer("max_tokens", max_tokens)
    if limit < -1:
        raise TreadleError(f"max_tokens={limit}: expected 0 or more, or -1 for no limit")
    return None if limit == -1 else limit


def alternatives(logprobs: int | None, n_vocab: int) -> int | None:
    """Return ``logprobs`` as a checked int, 0 to ``n_vocab``: the number of alternatives per token.
    None means no log-probabilities.
    """
    if logprobs is None:
        return None
    return ranged("logprobs", logprobs, 0, n_vocab)


def default_context(config: Config, gguf: GGUF, usual: int = USUAL_CONTEXT) -> int:
    """Return the default context in tokens: the model's trained one or, if shorter, the longest
    text that the file says it embeds, at most ``usual`` (WHOLE_TEXT for encoders). Beyond
    USUAL_CONTEXT, lengths at which RoPE scaling changes the results of short texts are not chosen.
    """
    own = config.n_ctx_train
    # Only models from folders of sentence-transformers have such keys.
    if any(key.startswith("treadle.embedding.") for key in gguf.metadata):
        from treadle.models.sentence import max_seq_length

        own = max_seq_length(gguf) or own
    own = min(own, config.n_ctx_most or own, config.n_ctx_train)
    if not config.causal:
        return min(own, WHOLE_TEXT)
    if config.encoder is not None:  # biases by distance have no end; GGUF's number is a convention
        own = max(own, USUAL_CONTEXT)
    for rope in config.ropes:
        if rope.dynamic or rope.has_long(own):
            usual = min(usual, max(rope.n_ctx_orig, USUAL_CONTEXT))
    return min(own, usual)


def refuse_drafter(config: Config, path: str | os.PathLike[str]) -> None:
    """Raise UnsupportedError if the model of ``config``, from the file ``path``, only drafts for
    another model.
    """
    if config.n_target:
        what = "only drafts for another model: load that one, and pass this file with --draft"
        raise UnsupportedError(f"{path}: {config.arch.name} {what} (draft=...)")


def choose_context(
    asked: int | None, config: Config, gguf: GGUF, kv_tokens: int | None = None
) -> int:
    """Return the context in tokens: ``asked`` or, if None, the default, which ``kv_tokens`` bounds
    (None: USUAL_CONTEXT does). Warns if this length changes the results of short texts; both
    results are valid. Raises TreadleError for a length that the model's RoPE or attention scaling
    does not support.
    """
    usual = USUAL_CONTEXT if kv_tokens is None else kv_tokens
    n_ctx = asked or default_context(config, gguf, usual)
    name = gguf.path.name
    if 0 < config.n_ctx_most < n_ctx:
        raise TreadleError(
            f"context={n_ctx}: {name} scales attention after token {config.n_ctx_most} "
            "(attention.temperature_length), which treadle does not support: "
            f"expected at most {config.n_ctx_most}"
        )
    for rope in config.ropes:
        if rope.dynamic and n_ctx > rope.n_ctx_orig:
            raise TreadleError(
                f"context={n_ctx}: {name} uses dynamic rope scaling beyond {rope.n_ctx_orig} "
                "tokens (rope_type 'dynamic'), which treadle does not support: "
                f"expected at most {rope.n_ctx_orig}"
            )
        if rope.has_long(n_ctx):
            warnings.warn(
                f"with a context over {rope.n_ctx_orig}, {name} uses its long rope factors for all "
                "lengths, as llama.cpp does; transformers uses them only beyond "
                f"{rope.n_ctx_orig} tokens. For its results on shorter texts, set "
                f"context={rope.n_ctx_orig}",
                stacklevel=5,  # the caller of load, which is wrapped
            )
            break
    return n_ctx


def add_adapters(given: Adapters, engine: Engine) -> None:
    """Load adapters (LoRA) into an engine before its first run; do nothing if ``given`` is empty.
    Raises the errors of ``convert.lora.load_adapters``.
    """
    if isinstance(given, str | bytes | os.PathLike):
        given = [given]
    if each := [*given.items()] if isinstance(given, Mapping) else listed("lora", given):
        from treadle.convert.lora.lora import load_adapters

        load_adapters(each, engine)


def add_control_vectors(
    given: ControlVectors, layers: tuple[int, int] | None, engine: Engine
) -> None:
    """Load the control vectors ``given`` to ``load`` into an engine before its first run, after its
    adapters. ``layers``: the first and the last layer that they change, None for all. Raises the
    errors of ``load_control_vectors``, and TreadleError for ``layers`` without vectors.
    """
    alone = isinstance(given, str | bytes | os.PathLike) or hasattr(given, "directions")
    each: list[Any]
    if isinstance(given, Mapping):
        each = [*given.items()]
    else:
        each = [given] if alone else listed("control_vectors", given)
    if not each:
        if layers is not None:
            raise TreadleError(
                "control_vector_layers (--control-vector-layer-range) needs control_vectors"
            )
        return
    from treadle.api.control_vector import load_control_vectors

    load_control_vectors(each, layers, engine)


def shared(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of ``generate`` that many requests can use: iterators become lists. Raises
    TreadleError for ``session`` and ``constraint``, which only one request can use.
    """
    for name in ("session", "constraint"):
        if settings.get(name) is not None:
            raise TreadleError(f"generate_many: {name} may be used for one prompt only")
    return {n: list(v) if isinstance(v, Iterator) else v for n, v in settings.items()}


def check_session(session: Session | None, engine: Engine) -> None:
    """Raise TreadleError if ``session`` (None: no session) belongs to another engine."""
    if session is not None and getattr(session, "engine", None) is not engine:
        raise TreadleError("the session belongs to another model")


def adapter_scales(
    lora: Scales, control_vectors: Scales, engine: Engine, session: Session | None = None
) -> Lora:
    """Return pairs (number, value) for a request: scales of the engine's adapters, then strengths
    of its control vectors, numbered after the adapters; zeros are left out. ``lora``,
    ``control_vectors``: values by name or number; None: those of ``session``, else the defaults.

    Raises TreadleError for one that is not loaded, an invalid number, and values that differ from
    those of ``session``.
    """
    usual = engine.cache.lora if session is None else session.seq.lora
    if lora is None and control_vectors is None:
        return usual
    n_adapters = len(engine.adapters)
    made = tuple(each for each in usual if each[0] < n_adapters)
    if lora is not None:
        from treadle.models.lora import lora_scale  # imported late: rarely needed

        names = [adapter.name for adapter in engine.adapters]
        scales = _by_number("lora", "adapter", names, lora)
        checked = ((at, lora_scale(f"adapter {key!r:.60}", own)) for at, key, own in scales)
        made = tuple(each for each in checked if each[1])
    if control_vectors is None:
        made += tuple(each for each in usual if each[0] >= n_adapters)
    else:
        from treadle.models.control_vector import checked_strength

        names = [vector.name for vector in engine.control_vectors]
        scales = _by_number("control_vectors", "control vector", names, control_vectors)
        strengths = ((n_adapters + at, checked_strength(key, own)) for at, key, own in scales)
        made += tuple(each for each in strengths if each[1])
    if session is not None and made != session.seq.lora:
        raise TreadleError(
            "the session uses other adapters or control vectors: set them with "
            "model.session(lora=, control_vectors=)"
        )
    return made


def _by_number(
    setting: str, kind: str, names: Sequence[str], given: Any
) -> list[tuple[int, Any, Any]]:
    """Return (number, key, value) of each entry of ``given``, a mapping from names or numbers to
    values, sorted by number; ``names`` has the name of each number. If several keys mean one
    number, the last counts. ``setting``, ``kind``: the argument and its things ("adapter"), for
    errors. Raises TreadleError for an unknown key.
    """
    if not isinstance(given, Mapping):
        what = "scales" if setting == "lora" else "strengths"
        raise TreadleError(f"{setting}={given!r:.60}: expected a dict of {kind}s and their {what}")
    found: dict[int, tuple[Any, Any]] = {}
    for key, value in given.items():
        index = as_integer(names.index(key) if isinstance(key, str) and key in names else key)
        if index is None or not 0 <= index < len(names):
            have = f"loaded are {', '.join(names)}" if names else f"none is loaded (use {setting}=)"
            raise TreadleError(f"no {kind} {key!r:.60}: {have}")
        found[index] = key, value
    return [(at, *found[at]) for at in sorted(found)]


def build_sampling(
    sampling: Sampling | None, usual: Sampling, given: Mapping[str, Any], known: Iterable[str]
) -> Sampling:
    """Return ``sampling`` or, if None, ``usual``, with the fields in ``given`` replaced.

    Raises TypeError for a name that is no field, with a suggestion from the fields and the other
    ``known`` names; SamplingError for values out of range.
    """
    if not isinstance(sampling, Sampling | None):
        found = type(sampling).__name__
        raise SamplingError(f"sampling is {found}: expected a treadle.Sampling")
    if not given.keys() <= set(SAMPLING_FIELDS):
        named = (name for name in given if name not in SAMPLING_FIELDS)
        check_keywords("generate", [*named], {*SAMPLING_FIELDS, *known}, keywords_elsewhere)
    return replace(sampling or usual, **given)


def check_fields(names: Iterable[str], where: str) -> None:
    """Raise TypeError for a name that is no field of ``Sampling``, with the one to use. ``where``:
    the argument that has the names, for errors.
    """
    for name in names:
        if name not in SAMPLING_FIELDS:
            from treadle.base.foreign_keywords import hint  # needed for errors only

            near = hint(str(name), SAMPLING_FIELDS, keywords_elsewhere())
            raise TypeError(f"{where}: {name!r:.40} is not a field of treadle.Sampling{near}")


def keywords_elsewhere() -> dict[str, str]:
    """Return where each keyword of ``load``, ``generate`` and ``chat`` belongs, in words, for
    errors of a function that does not take it.
    """
    from treadle.base.foreign_keywords import CHAT_SETTINGS, GENERATE_SETTINGS, LOAD_SETTINGS

    both = "a setting of generate() and chat()"
    return {
        **dict.fromkeys(CHAT_SETTINGS, "a setting of chat()"),
        **dict.fromkeys(GENERATE_SETTINGS, both),
        **dict.fromkeys(SAMPLING_FIELDS, f"{both}; its default: load(sampling={{...}})"),
        **LOAD_SETTINGS,
    }


def output_tokenizer(model: Model, stop: list[str]) -> Tokenizer:
    """Return the tokenizer that decodes a request's output. For a file without a vocabulary it is a
    stand-in that decodes ids to no text, unless there are ``stop`` strings.
    """
    from treadle.tokenizer.vocab import has_vocabulary

    if stop or has_vocabulary(model.gguf):
        return model.tokenizer
    from treadle.tokenizer.ids_only import NoVocabulary

    return NoVocabulary(model.config.n_vocab)


# -- defaults of answers -------------------------------------------------------------------------

GivenSampling = Sampling | Mapping[str, Any] | None


@dataclass(frozen=True)
class Defaults:
    """Checked defaults, made by ``read_defaults``.

    ``template``: replaces the file's chat template, None keeps it; ``variables``: of the template;
    ``reasoning``: "auto", "on" or "off"; ``reasoning_budget``: tokens of reasoning, None for no
    limit, with ``reasoning_budget_message`` before its end; ``reasoning_preserve``: whether the
    template keeps the reasoning of earlier answers, None for its own default; ``sampling``: fields
    by name, over the file's recommended ones; ``whole``: a full ``Sampling``, if the caller gave
    one; ``max_tokens``: per answer, None for no limit; ``strict``: whether parts of messages that
    the model cannot read are refused.
    """

    template: ChosenTemplate | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: str = "auto"
    reasoning_budget: int | None = None
    reasoning_budget_message: str = ""
    reasoning_preserve: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole: Sampling | None = None
    max_tokens: int | None = None
    strict: bool = False

    def sampling_over(self, recommended: Sampling) -> Sampling:
        """Return the default sampling: the caller's whole ``Sampling``, else ``recommended``, with
        the fields that were given by name replaced.
        """
        return replace(self.whole or recommended, **self.sampling)

    def load_template(self, gguf: GGUF, arch: str) -> ChatTemplate:
        """Load the chat template of the model file ``gguf`` of architecture ``arch``, with these
        defaults.
        """
        from treadle.chat.template.template import load_template

        return load_template(
            gguf,
            arch,
            self.template,
            defaults=self.variables,
            reasoning=self.reasoning,
            preserve=self.reasoning_preserve,
        )


def read_defaults(
    *,
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning: str = "auto",
    reasoning_budget: int | None = None,
    reasoning_budget_message: str = "",
    reasoning_preserve: bool | None = None,
    sampling: GivenSampling = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    strict: bool = False,
) -> Defaults:
    """Check the defaults of answers, arguments of ``load`` with the same names, before a model file
    is opened.

    Raises TemplateError for a missing or invalid template, SamplingError for values out of range,
    TypeError for a name that is no field of ``Sampling``, TreadleError for others.
    """
    if max_tokens is not None:
        positive("max_tokens", max_tokens)
    made: dict[str, Any] = {
        **_sampling(sampling, seed),
        "max_tokens": max_tokens,
        "strict": flag("strict", strict),
    }
    if reasoning_preserve is not None:
        made["reasoning_preserve"] = flag("reasoning_preserve", reasoning_preserve)
    if reasoning_budget is not None or reasoning_budget_message:
        budget = _budget(reasoning, reasoning_budget, reasoning_budget_message)
        made["reasoning_budget"] = budget or None  # 0 is kept as "off", which a call may override
        made["reasoning_budget_message"] = reasoning_budget_message
        reasoning = "off" if budget == 0 else reasoning
    if chat_template is None and not chat_template_kwargs and reasoning == "auto":
        return Defaults(**made)  # fast path: no further imports
    from treadle.chat.messages import plain
    from treadle.chat.template.override import choose_template
    from treadle.chat.template.variables import check_own, check_reasoning

    with of_setting("reasoning"):
        reasoning = check_reasoning(reasoning)
    with of_setting("chat_template_kwargs"):
        variables = plain(check_own(chat_template_kwargs, "chat_template_kwargs"))
    with of_setting("chat_template"):
        template = None if chat_template is None else choose_template(chat_template)
    return Defaults(template, variables, reasoning, **made)


def _budget(reasoning: str, budget: int | None, message: str) -> int | None:
    """Check ``reasoning_budget`` (``budget``) and its ``message`` for the setting ``reasoning``;
    return the budget in tokens, None for no limit, which -1 means too. Raises TreadleError.
    """
    if not isinstance(message, str):
        found = type(message).__name__
        raise TreadleError(f"reasoning_budget_message is {found}: expected a text")
    if budget is None:
        return None
    limit = integer("reasoning_budget", budget)
    if limit < -1:
        raise TreadleError(
            f"reasoning_budget={limit}: expected tokens, 0 for no reasoning, or -1 for no limit"
        )
    if limit == 0 and reasoning == "on":
        raise TreadleError("reasoning_budget=0 and reasoning='on' exclude each other")
    return None if limit == -1 else limit


def _sampling(given: GivenSampling, seed: int | None) -> dict[str, Any]:
    """Return the fields ``sampling`` and ``whole`` of ``Defaults``, by name. ``given``: a
    ``Sampling``, fields by name, or None; ``seed``: of every request, None for a random one. Raises
    SamplingError, TypeError, TreadleError.
    """
    if not isinstance(given, Sampling | Mapping | None):
        found = type(given).__name__
        raise SamplingError(f"sampling is {found}: expected a treadle.Sampling or a dict of fields")
    whole = given if isinstance(given, Sampling) else None
    named: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    check_fields(named, "sampling")
    if seed is not None:
        if named.get("seed", seed) != seed:
            raise TreadleError(f"seed={seed}, but sampling has seed {named['seed']}: set one")
        named["seed"] = seed
    Sampling(**named)  # raises for values out of range
    return {"sampling": named, "whole": whole}
