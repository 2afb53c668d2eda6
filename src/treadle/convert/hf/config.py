"""Translates config.json of a Hugging Face model to GGUF's hyper-parameters.

In the functions below ``whole`` reads the whole config.json, and ``keys`` the text model's part of
it: the same file, unless the model is multimodal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.families.experts import expert_keys, expert_words
from treadle.convert.hf.families.multimodal import OUTER, SIZES
from treadle.convert.hf.families.registry import FAMILIES
from treadle.convert.hf.families.t5 import ENCODERS_OF
from treadle.convert.hf.family import GELU_TANH, Family
from treadle.convert.hf.rope import f32, read_rope
from treadle.convert.hf.windows import every_layer, every_layer_if_used
from treadle.convert.quantized.checkpoint import METHODS, quantization_section
from treadle.convert.quantized.mlx import KEYS, Quantization, find_quantization
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.convert.sources.llama_names import widths
from treadle.errors import FileError, UnsupportedError
from treadle.files.hf_config import without_thinker
from treadle.files.hf_drafters import with_drafter_type
from treadle.files.metadata import POSITION_MAX, SIZE_MAX, MetadataReader
from treadle.models.archs import ARCHS, PATTERN, WINDOW
from treadle.models.graphs.limits import ACTIVATION, takes_activation
from treadle.models.graphs.positions import by_period
from treadle.models.ignored_tensors import IS_SPEECH, LEFT_OUT, SPEECH
from treadle.models.keys import N_LAYER_MAX


@dataclass(frozen=True)
class HfConfig:
    """config.json translated to GGUF keys, with facts needed to map the tensors.

    ``factors``: the contents of RoPE factor tensors, f32 ``[rope dims / 2]``, by GGUF name.
    """

    family: Family
    metadata: dict[str, Any]  # general.architecture, and keys prefixed with "{arch}."
    sizes: dict[str, int]  # the words of models.structure.TensorRow.shape
    n_layer: int
    n_head: int
    n_head_kv: int
    tied: bool  # the output matrix is that of the embeddings
    factors: dict[str, npt.NDArray[np.float32]]
    packing: Quantization | None  # MLX's
    nested: bool = False  # the text part of a multimodal model
    scores: bool = False  # has a head that scores pairs of texts
    n_skipped: int = 0  # unused rows before the first learned position
    rules: Sequence[DerivationRule] = ()  # for tensors that GGUF stores differently
    n_extra: int = 0  # MTP layers after the last layer
    lacks_output_head: bool = False  # the model's class has no output head
    config_names: Mapping[str, str] = field(default_factory=dict)  # GGUF key -> config.json's key
    path: Path = Path("config.json")
    in_layers: Callable[[str], str] | None = None  # see ``Family``


def read_config(config: Mapping[str, Any], path: Path) -> HfConfig:
    """Return config.json, parsed as ``config``, in GGUF's terms; ``path`` is the file, for errors.

    Raises FileError for keys missing or out of range, UnsupportedError for an unsupported model,
    RoPE scaling or quantisation.
    """
    config = with_drafter_type(without_thinker(config))
    family, keys = _find_family(config, path)
    whole = MetadataReader(config, path)
    arch = ARCHS[family.arch]
    word = family.word
    packing = find_quantization(whole)
    _refuse_others(whole, keys, family, packing)
    n_layer = keys.integer(word("num_hidden_layers"), hi=N_LAYER_MAX)
    n_embd = keys.integer(word("hidden_size"))
    (n_head, heads), (n_head_kv, heads_kv) = _heads(keys, family, n_layer)
    head_dim = keys.integer(word("head_dim"), max(1, n_embd // n_head))
    usual = family.n_ff_default * n_embd or None
    n_ff, widths_ff = _size(keys, word("intermediate_size"), n_layer, usual)
    n_vocab = keys.integer(word("vocab_size"))
    norm = "layer_norm" if arch.norm in ("layer", "bare") else "layer_norm_rms"
    made: dict[str, Any] = {
        "vocab_size": n_vocab,
        "context_length": keys.integer(word("max_position_embeddings"), hi=POSITION_MAX),
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": widths_ff or n_ff,
        "attention.head_count": heads or n_head,
        "attention.head_count_kv": heads_kv or n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        f"attention.{norm}_epsilon": f32(keys.number(word("rms_norm_eps"), lo=0.0, hi=1.0)),
    }
    made.update(_activation(keys, family))
    made.update(_softcaps(keys, family))
    made.update(_attention_scale(keys, family, n_layer, n_embd, n_head, head_dim))
    for key, name in family.copied.items():
        value = keys.get(key)
        made[name] = value if isinstance(value, bool) else f32(keys.number(key, lo=0.0))
    factors: dict[str, npt.NDArray[np.float32]] = {}
    if arch.rope != "none":
        rope, factors = read_rope(keys, family, head_dim)
        made.update(rope)
    made.update(_window(keys, family, n_layer))
    if family.experts:
        made.update(expert_keys(keys, family, n_layer))
    made.update(family.more(keys, n_layer))
    made.update(family.beside(whole))
    if arch.graph == "encoder":
        made["attention.causal"] = False
    n_skipped = 0
    if family.positions_behind_pad:
        n_skipped = keys.integer("pad_token_id", lo=0) + 1
        made["context_length"] -= n_skipped
        if made["context_length"] < 1:
            keys.fail(
                word("max_position_embeddings"),
                f"leaves no positions after the {n_skipped} reserved rows",
            )
    sizes = widths(
        {
            "n_vocab": n_vocab,
            "n_embd": n_embd,
            "n_ff": n_ff,
            "n_head": n_head,
            "n_head_kv": n_head_kv,
            "head_dim": head_dim,
        }
    )
    for key, size in _BY_LAYER.items():
        if isinstance(made[key], list) and len(set(made[key]) - {0}) > 1:
            del sizes[size]
    metadata = {"general.architecture": family.arch, **_with_prefix(made, family.arch)}
    return HfConfig(
        family,
        metadata,
        sizes,
        n_layer,
        n_head,
        n_head_kv,
        _is_tied(whole, keys) and not family.drafts,
        factors,
        packing,
        whole.get("model_type") in OUTER,
        _kinds(whole, _SCORING),
        n_skipped,
        family.derived(keys),
        keys.integer(family.extra_layers, 0, lo=0) if family.extra_layers else 0,
        _has_no_head(whole),
        _config_names(keys, family),
        path,
        partial(family.in_layers, keys) if family.in_layers else None,
    )


def _config_names(keys: MetadataReader, family: Family) -> dict[str, str]:
    made = {name: family.word(word) for name, word in _BASIC.items()}
    made |= {name: key for key, name in family.copied.items()}
    if family.experts:
        made |= expert_words(keys)
    return {name: keys.prefix + word for name, word in made.items()}


_BASIC = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}


# Sizes that depend on the layer if their key is a list.
_BY_LAYER = {"feed_forward_length": "n_ff", "attention.head_count": "n_attn"}


def adapt_to_mlx(hyper: HfConfig, folder: Path) -> HfConfig:
    """Return ``hyper`` for a folder that mlx-lm wrote: its norm weights are already 1 larger, as in
    GGUF, so ``norm_shift`` is 0.

    Raises UnsupportedError for a family whose weights mlx-lm multiplies by factors of config.json.
    """
    if hyper.family.folded_by_mlx:
        what = (
            "mlx-lm multiplied the model's factors into these weights: use the original checkpoint"
        )
        raise UnsupportedError(f"{folder}: {what}")
    return replace(hyper, family=replace(hyper.family, norm_shift=0.0))


def _is_tied(whole: MetadataReader, keys: MetadataReader) -> bool:
    """Return whether the output matrix is tied to the embeddings.

    In a multimodal model, ``tie_word_embeddings`` of ``whole`` (config.json) takes precedence over
    that of ``keys`` (its text part), unless only the latter is true. An output tensor that exists
    is used in any case.
    """
    part = OUTER.get(str(whole.get("model_type")))
    given = whole.get("tie_word_embeddings")
    if part and isinstance(given, bool):
        return given or keys.values.get("tie_word_embeddings") is True
    return keys.flag("tie_word_embeddings", part is not None and part.tied)


# Classes of models whose published config.json has no model_type.
_WITHOUT_TYPE = {"MapleForCausalLM": "maple"}
Size = tuple[int, list[int]]  # the largest, and one per layer if they differ


def _heads(keys: MetadataReader, family: Family, n_layer: int) -> tuple[Size, Size]:
    """Return the number of query heads and the number of key/value heads, each as (the largest of
    all layers, a list with one per layer); the list is [] if all layers have the same number. A
    ``num_key_value_heads`` of null means as many as query heads; without that key every layer has
    the largest number of query heads.
    """
    heads = _size(keys, family.word("num_attention_heads"), n_layer)
    word = family.word("num_key_value_heads")
    if keys.values.get(word, 0) is None:  # null: as many as queries
        return heads, heads
    return heads, _size(keys, word, n_layer, heads[0])


def _size(keys: MetadataReader, word: str, n_layer: int, default: int | None = None) -> Size:
    """Return the size in config.json's key ``word``, one integer (``default`` if it is missing) or
    a list with one for each layer, as (the largest, the list). The list is [] if all layers have
    the same size.
    """
    each = keys.get(word)
    if not isinstance(each, list):
        return keys.integer(word, default), []
    sound = all(type(n) is int and 1 <= n <= SIZE_MAX for n in each)
    if len(each) != n_layer or not sound:
        keys.fail(word, f"is {each!r:.60}", f"an integer, or {n_layer} of them")
    return max(each), each if len(set(each)) > 1 else []


def _with_prefix(keys: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return keys as in a GGUF file: prefixed with "{arch}.", except ``treadle.*`` and
    ``tokenizer.*``. Keys of None are dropped.
    """
    found = {key: value for key, value in keys.items() if value is not None}
    whole = ("treadle.", "tokenizer.")
    return {key if key.startswith(whole) else f"{arch}.{key}": v for key, v in found.items()}


def _find_family(config: Mapping[str, Any], path: Path) -> tuple[Family, MetadataReader]:
    name = config.get("model_type")
    keys = MetadataReader(config, path)
    if name is None:
        name = next((kind for of, kind in _WITHOUT_TYPE.items() if _kinds(keys, of)), None)
    part = None
    if isinstance(name, str) and name in OUTER:
        part = OUTER[name]
        name = part.kind
        if (inner := keys.within(part.at)) is not None:  # older folders have its keys outside
            keys = inner
            name = inner.text("model_type", name)
            name = part.kind if name == part.alone else name
    if isinstance(name, str) and _kinds(MetadataReader(config, path), "EncoderModel"):
        name = ENCODERS_OF.get(name, name)
    if not isinstance(name, str):
        found = "is missing" if name is None else f"is {name!r:.60}"
        raise FileError(found, path=path, where="model_type", expected="a name")
    if name in SPEECH:
        raise UnsupportedError(f"{path}: {IS_SPEECH}")
    if name in LEFT_OUT:
        what = f"{keys.prefix}model_type {name!r}: not supported: {LEFT_OUT[name]}"
        raise UnsupportedError(f"{path}: {what}")
    if name not in FAMILIES:
        raise UnsupportedError(
            f"{path}: {keys.prefix}model_type {name!r:.60}: treadle supports "
            f"{', '.join((*FAMILIES, *OUTER))}"
        )
    family = FAMILIES[name]
    family = family.variant(keys) or family
    if set(family.older_words.values()) & keys.values.keys():
        family = replace(family, words={**family.words, **family.older_words})
    defaults = dict(family.defaults)
    if part is not None:
        defaults = {**SIZES.get(name, {}), **defaults, **part.defaults}
    keys = MetadataReader(keys.values, path, defaults, keys.prefix)
    return family, MetadataReader(family.normalize_keys(keys), path, defaults, keys.prefix)


def _refuse_others(
    whole: MetadataReader, keys: MetadataReader, family: Family, packing: Quantization | None
) -> None:
    """Raise UnsupportedError for models that would load but give wrong results: another class of
    output head, unsupported packed weights, another attention mask, a value excluded by
    ``Family.only``. ``whole``: config.json; ``keys``: its text part; ``packing``: MLX's
    quantisation, if it has one.
    """
    heads = (*_READING, *((_SCORING,) if family.score_names else ()))
    encodes = ARCHS[family.arch].graph == "encoder"
    heads = (*heads, *(_MASKED if encodes else _WRITING))
    drafts = family.drafts
    if whole.get("architectures") and not drafts and not any(_kinds(whole, head) for head in heads):
        does = "embeds text" if encodes else "generates text"
        whole.refuse(
            "architectures", f"{', '.join(whole.get('architectures'))} is not a model that {does}"
        )
    packed = None if packing else whole.within(KEYS[0]) or quantization_section(whole)
    if packed is not None and packed.get("quant_method") not in (family.packed or None, *METHODS):
        name = packed.get("quant_method") or f"{packed.get('bits')} bits"
        packed.refuse("quant_method", f"quantisation method {name} is not supported")
    if keys.get("is_causal") is False and not (encodes or drafts):  # no causal mask in transformers
        keys.refuse("is_causal", f"is false: treadle supports {family.arch} only as a decoder")
    both_ways = keys.get("use_bidirectional_attention")
    # "vision": only between the tokens of an image.
    if both_ways not in (None, False, "vision") and not encodes:
        keys.refuse(
            "use_bidirectional_attention", f"treadle supports {family.arch} only as a decoder"
        )
    for key, value in family.only.items():
        if (given := keys.get(key)) is not None and given != value:
            keys.refuse(
                key, f"is {given!r:.60}: treadle supports only {value!r} in this architecture"
            )


def _activation(keys: MetadataReader, family: Family) -> dict[str, str]:
    """Return the key of the FFN's activation if it differs from the architecture's (GPT-NeoX-20B,
    Cerebras-GPT), else {}. Raises UnsupportedError for unsupported functions.
    """
    usual = _SAME.get(family.activation, family.activation)
    said = {}
    for key in (family.word("hidden_act"), ACTIVATION):
        given = keys.text(key, family.activation)
        given = family.activation if given == family.older_activation else given
        if (found := _SAME.get(given, given)) == usual:
            continue
        if not (takes_activation(ARCHS[family.arch]) and {found, usual} == {"gelu", GELU_TANH}):
            keys.refuse(
                key,
                f"{given!r:.60}: treadle supports only {family.activation} in this architecture",
            )
        said[ACTIVATION] = found
    return said


# Several names of one function.
_SAME = {"gelu_new": GELU_TANH, "gelu_fast": GELU_TANH, "gelu_python": "gelu", "swiglu": "silu"}
_READING = ("Model", "BERT")
_WRITING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_MASKED = ("ForMaskedLM", "ForPreTraining", "BERTLMHead")
_SCORING = "ForSequenceClassification"


def _kinds(whole: MetadataReader, head: str) -> bool:
    """Return whether config.json (``whole``) lists a model class in ``architectures`` whose name
    ends with ``head``.
    """
    kinds = whole.get("architectures") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        whole.fail("architectures", f"is {kinds!r:.60}", "a list of names")
    return any(kind.endswith(head) for kind in kinds)


def _has_no_head(whole: MetadataReader) -> bool:
    """Return whether the model class in config.json (``whole``) has no output head, as Qwen3Model,
    but not GPT2LMHeadModel.
    """
    heads = (*_WRITING, *_MASKED, _SCORING)
    return any(_kinds(whole, end) for end in _READING) and not any(_kinds(whole, h) for h in heads)


def _softcaps(keys: MetadataReader, family: Family) -> dict[str, float]:
    """Return GGUF's keys of the caps of attention scores and of logits, for families that have
    caps: transformers ignores config.json's keys elsewhere. A cap is 0 if config.json has none but
    GGUF's architecture has a default.
    """
    found = {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        given = keys.values.get(key, keys.defaults.get(key)) if key in keys.defaults else None
        cap = 0.0 if given is None else keys.number(key, 0.0, lo=0.0, hi=1e12)
        if cap or key in dict(ARCHS[family.arch].keys):
            found[key] = f32(cap)
    return found


def _attention_scale(
    keys: MetadataReader, family: Family, n_layer: int, n_embd: int, n_head: int, head_dim: int
) -> dict[str, float]:
    """Return GGUF's key of the attention scale, ``query_pre_attn_scalar ** -0.5`` (Gemma), if it
    differs from the architecture's default; else {}.
    """
    wide = n_layer in ARCHS[family.arch].width_scaled
    usual = n_embd / n_head if wide else float(head_dim)
    key = "query_pre_attn_scalar"  # Gemma's
    asked = keys.number(key, usual, lo=1e-6, hi=1e12) if key in keys.defaults else usual
    return {} if math.isclose(asked, usual) else {"attention.scale": f32(asked**-0.5)}


def _window(keys: MetadataReader, family: Family, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of the sliding window: its size in tokens, and the layers that have it. If
    no layer has a window: {}, or a size of 0 where the architecture has a default size.
    """
    own = dict(ARCHS[family.arch].keys)
    without = {} if own.get(WINDOW) == 0 or PATTERN not in own else {WINDOW: 0}
    flags = family.windowed(keys, n_layer)
    if flags is None:
        return without
    size = family.word("sliding_window")
    kinds = keys.get("layer_types")
    whole = keys.values.get(size, keys.defaults.get(size)) is None  # full attention in all layers
    if kinds is not None:
        names = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != n_layer:
            keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
        others = [kind for kind in kinds if kind not in names]
        if others:
            keys.refuse("layer_types", f"{others[0]!r:.60}: treadle supports {' and '.join(names)}")
        listed = [names.index(kind) == 1 for kind in kinds]
        unread = family.windowed in (every_layer, every_layer_if_used)
        if unread and listed != flags and not whole:
            what = "transformers ignores it in this family and uses the window in all layers"
            keys.refuse("layer_types", what)
        flags = listed
    if whole:
        if family.own_local_rope and any(flags):
            keys.refuse(size, "is null, but some layers have a RoPE base of their own")
        return without
    # In these architectures the window also selects the layers with RoPE.
    tells = ARCHS[family.arch].nope in ("global", "sparse")
    if not any(flags) and not tells:
        return without
    found: dict[str, Any] = {WINDOW: keys.integer(size, hi=POSITION_MAX)}
    if PATTERN not in own or flags != by_period(int(own[PATTERN]), n_layer):
        found[PATTERN] = flags
    return found
