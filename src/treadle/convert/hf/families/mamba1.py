"""Family rows and keys of models with Mamba-1 layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, decay, same, taps
from treadle.files.keys import MetadataReader
from treadle.models.graphs.recurrence import PARTS_EPS, PARTS_NORM

# -- common -----------------------------------------------------------------------------------


def _rules(at: str) -> tuple[DerivationRule, ...]:
    """Return rules for the layer's recurrent part, named ``at``."""
    return (
        DerivationRule((f"{at}.conv1d.weight",), {f"{at}.conv1d.weight": taps}),
        DerivationRule((f"{at}.A_log",), {f"{at}.decay.weight": decay}, floats=True),
        DerivationRule((f"{at}.D",), {f"{at}.through.weight": same}, floats=True),
    )


def _names(at: str) -> Names:
    """Return the names of that part's tensors after the rules."""
    return {
        f"{at}.in_proj": "ssm_in",
        f"{at}.conv1d": "ssm_conv1d",
        f"{at}.x_proj": "ssm_x",
        f"{at}.dt_proj": "ssm_dt",
        f"{at}.decay": "ssm_a",
        f"{at}.through": "ssm_d",
        f"{at}.out_proj": "ssm_out",
        **{f"{at}.{one}_layernorm": f"ssm_{one}_norm" for one in ("dt", "b", "c")},
    }


def _state_keys(keys: MetadataReader, n_inner: int, *words: str) -> dict[str, Any]:
    """Return the keys; ``words``: names of the convolution's taps, the state size, and the time
    step rank.
    """
    *sizes, rank = words
    names = ("conv_kernel", "state_size")
    made = {f"ssm.{name}": keys.integer(word) for name, word in zip(names, sizes, strict=True)}
    if keys.get(rank) in (None, "auto"):
        made["ssm.time_step_rank"] = -(-keys.integer("hidden_size") // 16)
    else:
        made["ssm.time_step_rank"] = keys.integer(rank)
    return {**made, "ssm.inner_size": n_inner}


# -- Mamba, Falcon Mamba ----------------------------------------------------------------------


def _mamba_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    n_embd = keys.integer("hidden_size")
    given = keys.values.get("intermediate_size")
    n_inner = keys.integer("intermediate_size") if given else keys.integer("expand") * n_embd
    none = dict.fromkeys(
        f"attention.{of}" for of in ("head_count_kv", "key_length", "value_length")
    )
    return {
        **none,
        **_state_keys(keys, n_inner, "conv_kernel", "state_size", "time_step_rank"),
        "feed_forward_length": 0,
        "attention.head_count": 0,
        PARTS_NORM: False,
    }


def _falcon_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    eps = f32(keys.number("mixer_rms_eps", lo=0.0, hi=1.0))
    other = eps != f32(keys.number("layer_norm_epsilon", lo=0.0, hi=1.0))
    result = {**_mamba_keys(keys, n_layer), PARTS_NORM: True}
    return {**result, PARTS_EPS: eps} if other else result


_MAMBA = Family(
    "mamba",
    {
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        # It has none of these; in llama.cpp a context of 2^20 tokens means any length.
        "max_position_embeddings": 1 << 20,
        "num_attention_heads": 1,
        "intermediate_size": 1,
    },
    {
        "embeddings": "token_embd",
        "norm": "attn_norm",
        "norm_f": "output_norm",
        "lm_head": "output",
        **_names("mixer"),
    },
    {"rms_norm_eps": "layer_norm_epsilon"},
    derived=lambda keys: _rules("mixer"),
    more=_mamba_keys,
)


# -- Jamba: attention in some layers, experts in some -----------------------------------------

_JAMBA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "num_experts_per_tok": 2,
    "num_experts": 16,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def _jamba_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    period = keys.integer("attn_layer_period")
    offset = keys.integer("attn_layer_offset", lo=0, hi=period - 1)
    n_head_kv = keys.integer("num_attention_heads")
    if keys.values.get("num_key_value_heads", 0) is not None:
        n_head_kv = keys.integer("num_key_value_heads")
    n_inner = keys.integer("mamba_expand") * keys.integer("hidden_size")
    return {
        **dict.fromkeys(f"attention.{of}" for of in ("key_length", "value_length")),
        **_state_keys(keys, n_inner, "mamba_d_conv", "mamba_d_state", "mamba_dt_rank"),
        "attention.head_count_kv": [n_head_kv * (i % period == offset) for i in range(n_layer)],
    }


def _jamba_names() -> Names:
    ffn = "feed_forward"
    attn = "self_attn"
    return {
        "embed_tokens": "token_embd",
        "input_layernorm": "attn_norm",
        "pre_ff_layernorm": "ffn_norm",
        "final_layernorm": "output_norm",
        "lm_head": "output",
        **{f"{attn}.{one}_proj": f"attn_{one}" for one in "qkv"},
        f"{attn}.o_proj": "attn_output",
        f"{ffn}.router": "ffn_gate_inp",
        **{f"{ffn}.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
        **{f"{ffn}.experts.{one}_proj": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
        **_names("mamba"),
    }


def _jamba_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return _rules("mamba")


# -- the rows ---------------------------------------------------------------------------------

MAMBA1S: dict[str, Family] = {
    "mamba": _MAMBA,
    "falcon_mamba": replace(
        _MAMBA, defaults={**_MAMBA.defaults, "mixer_rms_eps": 1e-6}, more=_falcon_keys
    ),
    "jamba": Family(
        "jamba",
        _JAMBA_DEFAULTS,
        _jamba_names(),
        experts=True,
        derived=_jamba_rules,
        more=_jamba_keys,
    ),
}
