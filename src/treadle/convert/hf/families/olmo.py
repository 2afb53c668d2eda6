"""Family rows of OLMo: dense models, mixtures, and the hybrid, which llama.cpp lacks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, POST_NORMS, Names
from treadle.convert.hf.windows import all_but_every, has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, decay, flat, taps
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.olmo_hybrid import SIGNED
from treadle.models.graphs.recurrence import FLAGS


def _olmo_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return clamp_keys(keys.number("clip_qkv", 0.0, lo=0.0))


def clamp_keys(limit: float) -> dict[str, Any]:
    """Return the key of the clamp of queries, keys and values; {} for a limit of 0."""
    return {"attention.clamp_kqv": f32(limit)} if limit else {}


# -- the hybrid -----------------------------------------------------------------------------------

_AT = "linear_attn."
_HYBRID: Names = {
    **POST_NORMS,
    # Published recurrent layers have the first two names, those that transformers writes all.
    "attention_layer_norm": "attn_norm",
    "feedforward_layer_norm": "post_attention_norm",
    **{f"{_AT}{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"{_AT}{name}_taps": f"ssm_conv1d_{name}" for name in "qkv"},
    f"{_AT}g_proj": "attn_gate",
    f"{_AT}b_proj": "ssm_beta",
    f"{_AT}a_proj": "ssm_alpha",
    f"{_AT}dt": "ssm_dt",
    f"{_AT}decay": "ssm_a",
    f"{_AT}o_norm": "ssm_norm",
    f"{_AT}o_proj": "ssm_out",
}


def _sizes(keys: MetadataReader) -> tuple[int, int, int, int]:
    """Return the numbers of key and of value heads in linear attention, then their sizes."""
    n_head = keys.integer("num_attention_heads")
    n_k, n_v = (keys.integer(f"linear_num_{of}_heads", n_head) for of in ("key", "value"))
    d_k = keys.integer("linear_key_head_dim", int(0.75 * keys.integer("hidden_size") / n_k))
    return n_k, n_v, d_k, keys.integer("linear_value_head_dim", 2 * d_k)


def _hybrid_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    n_k, n_v, d_k, d_v = _sizes(keys)
    if n_v % n_k:
        keys.fail("linear_num_value_heads", f"is {n_v}", f"a multiple of {n_k}")
    flags = has_attention(keys, n_layer)
    if not any(flags) and keys.get("layer_types") is None:
        flags[-1] = True
    return {
        "ssm.conv_kernel": keys.integer("linear_conv_kernel_dim"),
        "ssm.state_size": d_k,
        "ssm.group_count": n_k,
        "ssm.time_step_rank": n_v,
        "ssm.inner_size": n_v * d_v,
        FLAGS: [not flag for flag in flags],
        SIGNED: keys.flag("linear_allow_neg_eigval", True),
    }


def _has_rope(keys: MetadataReader) -> bool:
    """Return whether the model has RoPE: a ``rope_theta`` of null means none, a missing one the
    default.
    """
    rope = keys.within("rope_parameters")
    said = rope.values if rope and "rope_theta" in rope.values else keys.values
    return said.get("rope_theta", 0) is not None


def _part(*rows: Rows, first: int, n: int) -> Rows:
    """Return ``n`` channels, from ``first`` on, of a convolution's taps: one tensor, or q, k and v
    apart as transformers writes them.
    """
    return taps(np.concatenate(rows)[first : first + n])


def _hybrid_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_k, n_v, d_k, d_v = _sizes(keys)
    widths = {"q": n_k * d_k, "k": n_k * d_k, "v": n_v * d_v}
    gives = {}
    first = 0
    for name, n in widths.items():
        gives[f"{_AT}{name}_taps.weight"] = partial(_part, first=first, n=n)
        first += n
    return (
        DerivationRule(tuple(f"{_AT}{name}_conv1d.weight" for name in "qkv"), gives, whole=True),
        DerivationRule((f"{_AT}conv1d.weight",), gives, whole=True),
        DerivationRule((f"{_AT}dt_bias",), {f"{_AT}dt.bias": flat}),
        DerivationRule((f"{_AT}A_log",), {f"{_AT}decay.weight": decay}, floats=True),
    )


# -- FlexOLMo -------------------------------------------------------------------------------------

_FLEX: Names = {
    **LLAMA_EXPERTS,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# -- the rows -------------------------------------------------------------------------------------

OLMO_FAMILIES: dict[str, Family] = {
    "olmo2": Family(
        "olmo2",
        {**COMMON_EPS_5, "vocab_size": 50304, "max_position_embeddings": 2048},
        POST_NORMS,
    ),
    "olmo3": Family(
        "olmo2",
        {
            **COMMON_EPS_5,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
        },
        POST_NORMS,
        windowed=all_but_every(4),
        own_local_rope=True,
    ),
    "olmoe": Family(
        "olmoe",
        {
            **COMMON_EPS_5,
            "vocab_size": 50304,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        LLAMA_EXPERTS,
        only={"clip_qkv": None},
        experts=True,
    ),
    "olmo": Family(
        "olmo",
        {
            "rms_norm_eps": 1e-5,  # no key gives it
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
        more=_olmo_keys,
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4,
        },
        _HYBRID,
        derived=_hybrid_rules,
        turns=_has_rope,
        more=_hybrid_keys,
    ),
    "flex_olmo": Family(
        "flex_olmo",
        {
            **COMMON_EPS_5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 5,
            "num_experts": 7,
            "norm_topk_prob": False,
        },
        _FLEX,
        experts=True,
    ),
}
