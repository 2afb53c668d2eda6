"""config.json of a Hugging Face model to GGUF's hyper-parameters.

A row of FAMILIES is one ``model_type``: the architecture it is in GGUF, what transformers takes
for keys that the file leaves out, and where its graph needs a word more than GGUF's names say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.convert.hf_rope import f32, read_rope
from treadle.convert.llama import widths
from treadle.convert.mlx import KEYS, Quantization, find_quantization
from treadle.errors import FileError, UnsupportedError
from treadle.files.keys import POSITION_MAX, Keys
from treadle.models.archs import ARCHS, PATTERN
from treadle.models.keys import N_LAYER_MAX
from treadle.record import dataclass

Windowed = list[bool] | None


@dataclass(frozen=True)
class Family:
    """One ``model_type`` of transformers.

    defaults: transformers' own, for keys that config.json may leave out.
    activation: what ``hidden_act`` (or ``hidden_activation``) must be: the one that GGUF's
        architecture of this name has.
    norm_shift: what GGUF's norm weights are larger by (Gemma multiplies by 1 + weight).
    windowed: which layers see ``sliding_window`` tokens only, where ``layer_types`` is not given;
        None where the window is not in use.
    own_local_rope: layers with a window have a rope base of their own, never scaled.
    nested: the key under which a model of text and images keeps the part for text.
    """

    arch: str
    defaults: Mapping[str, Any]
    activation: str = "silu"
    norm_shift: float = 0.0
    windowed: Callable[[Keys, int], Windowed] = lambda keys, n_layer: None
    own_local_rope: bool = False
    nested: str = ""


# -- which layers have the window -------------------------------------------------------------


def _every_layer(keys: Keys, n_layer: int) -> Windowed:
    return [True] * n_layer


def _upper_layers(keys: Keys, n_layer: int) -> Windowed:
    if not keys.flag("use_sliding_window", False):
        return None
    first = keys.integer("max_window_layers", lo=0)
    return [i >= first for i in range(n_layer)]


def _all_but_every_nth(keys: Keys, n_layer: int) -> Windowed:
    period = keys.integer("sliding_window_pattern", 6)
    return [(i + 1) % period != 0 for i in range(n_layer)]


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_QWEN = {
    **_COMMON,
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA = Family(
    "gemma3",
    _GEMMA3,
    activation="gelu_pytorch_tanh",
    norm_shift=1.0,
    windowed=_all_but_every_nth,
    own_local_rope=True,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {**_COMMON, "vocab_size": 32000, "max_position_embeddings": 2048}),
    "mistral": Family(
        "llama",
        {
            **_COMMON,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        windowed=_every_layer,
    ),
    "qwen2": Family("qwen2", _QWEN, windowed=_upper_layers),
    "qwen3": Family("qwen3", {**_QWEN, "head_dim": 128}, windowed=_upper_layers),
    "gemma3_text": _GEMMA,
    "gemma3": Family(**{**vars(_GEMMA), "nested": "text_config"}),
}


@dataclass(frozen=True)
class Hyper:
    """What config.json says: GGUF keys, and what tensors need to know.

    ``rope_factors`` float32 [head_dim / 2], or None: the contents of ``rope_freqs.weight``.
    """

    family: Family
    metadata: dict[str, Any]  # general.architecture, and keys behind "{arch}."
    sizes: dict[str, int]  # the words of models.structure.TensorRow.shape
    n_layer: int
    n_head: int
    n_head_kv: int
    tied: bool
    rope_factors: npt.NDArray[np.float32] | None
    packing: Quantization | None  # of MLX


def read_config(config: Mapping[str, Any], path: Path) -> Hyper:
    """Check ``config`` (of file ``path``) and translate it.

    Raises FileError for keys missing or out of range, UnsupportedError for a model, a scaling or
    a quantisation that treadle does not have.
    """
    family, keys = _find_family(config, path)
    whole = Keys(config, path)
    packing = find_quantization(whole)
    _refuse_others(whole, keys, family, packing)
    n_layer = keys.integer("num_hidden_layers", hi=N_LAYER_MAX)
    n_embd, n_head = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    n_head_kv = n_head  # what null stands for; a key that is not there, for the model's default
    if keys.values.get("num_key_value_heads", 0) is not None:
        n_head_kv = keys.integer("num_key_value_heads", n_head)
    head_dim = keys.integer("head_dim", max(1, n_embd // n_head))
    n_ff, n_vocab = keys.integer("intermediate_size"), keys.integer("vocab_size")
    made: dict[str, Any] = {
        "vocab_size": n_vocab,
        "context_length": keys.integer("max_position_embeddings", hi=POSITION_MAX),
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0)),
        "rope.dimension_count": head_dim,
    }
    made.update(_softcaps(keys))
    made.update(_attention_scale(keys, family, n_layer, n_embd, n_head, head_dim))
    rope, factors = read_rope(keys, family.own_local_rope, head_dim)
    window = _window(keys, family, n_layer)
    if window and not family.own_local_rope:
        if factors is not None or "rope.scaling.type" in rope:
            keys.refuse("sliding_window", "treadle has no scaled rope in layers with a window")
        window["rope.freq_base_swa"] = rope["rope.freq_base"]
    made.update({**rope, **window})
    sizes = widths(
        {"n_vocab": n_vocab, "n_embd": n_embd, "n_ff": n_ff, "n_head": n_head,
         "n_head_kv": n_head_kv, "head_dim": head_dim}
    )  # fmt: skip
    tied = keys.flag("tie_word_embeddings", False)
    if family.nested and isinstance(config.get("tie_word_embeddings"), bool):
        tied = config["tie_word_embeddings"]
    metadata = {"general.architecture": family.arch}
    metadata |= {f"{family.arch}.{key}": value for key, value in made.items()}
    return Hyper(family, metadata, sizes, n_layer, n_head, n_head_kv, tied, factors, packing)


def _find_family(config: Mapping[str, Any], path: Path) -> tuple[Family, Keys]:
    name = config.get("model_type")
    if not isinstance(name, str):
        found = "is missing" if name is None else f"is {name!r:.60}"
        raise FileError(found, path=path, where="model_type", expected="a name")
    if name not in FAMILIES:
        raise UnsupportedError(
            f"{path}: model_type {name!r:.60}: treadle has {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    if family.nested and config.get(family.nested) is not None:
        inner = Keys(config, path).within(family.nested)
        assert inner is not None
        return family, Keys(inner.values, path, family.defaults, inner.prefix)
    return family, Keys(config, path, family.defaults)


def _refuse_others(whole: Keys, keys: Keys, family: Family, packing: Quantization | None) -> None:
    """What would load and be wrong: other heads, other activations, packed weights."""
    kinds = whole.get("architectures") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        whole.fail("architectures", f"is {kinds!r:.60}", "a list of names")
    heads = ("ForCausalLM", "ForConditionalGeneration", "Model")
    if kinds and not any(kind.endswith(heads) for kind in kinds):
        whole.refuse("architectures", f"{', '.join(kinds)} is no model that writes text")
    for key in () if packing else KEYS:
        if (packed := whole.within(key)) is not None:
            name = packed.get("quant_method") or f"{packed.get('bits')} bits"
            whole.refuse(key, f"treadle does not read weights quantised so ({name})")
    for key in ("hidden_act", "hidden_activation"):
        found = keys.text(key, family.activation)
        if found != family.activation:
            keys.refuse(key, f"{found!r:.60}: treadle has {family.activation} in this architecture")
    if keys.flag("use_bidirectional_attention", False):
        keys.refuse("use_bidirectional_attention", "treadle has decoders only")
    if keys.number("partial_rotary_factor", 1.0, lo=0.0, hi=1.0) != 1.0:
        keys.refuse("partial_rotary_factor", "treadle turns whole heads in this architecture")


def _softcaps(keys: Keys) -> dict[str, float]:
    found = {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = keys.number(key, 0.0, lo=0.0, hi=1e12)
        if cap:
            found[key] = f32(cap)
    return found


def _attention_scale(
    keys: Keys, family: Family, n_layer: int, n_embd: int, n_head: int, head_dim: int
) -> dict[str, float]:
    """The scale, where it is not the one that the architecture has anyway."""
    wide = n_layer in ARCHS[family.arch].width_scaled
    usual = n_embd / n_head if wide else float(head_dim)
    asked = keys.number("query_pre_attn_scalar", usual, lo=1e-6, hi=1e12)
    return {} if math.isclose(asked, usual) else {"attention.scale": f32(asked**-0.5)}


def _window(keys: Keys, family: Family, n_layer: int) -> dict[str, Any]:
    """The sliding window and the layers that have it; nothing where none has."""
    flags = family.windowed(keys, n_layer)
    if flags is None:
        return {}
    kinds = keys.get("layer_types")
    if kinds is not None:
        names = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != n_layer:
            keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
        others = [kind for kind in kinds if kind not in names]
        if others:
            keys.refuse("layer_types", f"{others[0]!r:.60}: treadle has {' and '.join(names)}")
        flags = [names.index(kind) == 1 for kind in kinds]
    if keys.values.get("sliding_window", keys.defaults.get("sliding_window")) is None:
        if family.own_local_rope and any(flags):
            keys.refuse("sliding_window", "is null, where some layers have a rope of their own")
        return {}
    if not any(flags):
        return {}
    found: dict[str, Any] = {
        "attention.sliding_window": keys.integer("sliding_window", hi=POSITION_MAX)
    }
    period = dict(ARCHS[family.arch].keys).get(PATTERN)
    if not period or flags != [(i + 1) % period != 0 for i in range(n_layer)]:
        found["attention.sliding_window_pattern"] = flags
    return found
