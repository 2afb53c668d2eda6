"""Checks of API arguments: settings by name, sessions, adapters, control vectors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.base.validate import (
    as_integer,
    check_keywords,
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
)
from treadle.models.config import USUAL_CONTEXT
from treadle.models.sentence import max_seq_length
from treadle.sampling import Sampling

if TYPE_CHECKING:
    from treadle.api.control_vector import ControlVectors
    from treadle.api.model import Model
    from treadle.api.session import Session
    from treadle.convert.lora.lora import Adapters
    from treadle.engine.engine import Engine
    from treadle.files.gguf import GGUF
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.config import Config
    from treadle.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
Given = TypeVar("Given")
Scales = Mapping[Any, float] | None  # of adapters or control vectors, by name or number
WHOLE_TEXT = 8192  # largest default context of encoders, which run a text at once
SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
RULES = ("grammar", "json_schema", "regex", "constraint")  # at most one per request


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
    own = max_seq_length(gguf) or config.n_ctx_train
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
