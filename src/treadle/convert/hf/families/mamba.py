"""Family rows of models with Mamba layers: Mamba, Falcon Mamba, Jamba, Mamba-2, Bamba."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, decay, flat, same, taps
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.recurrence import PARTS_EPS, PARTS_NORM

# -- Mamba, Falcon Mamba, Jamba -------------------------------------------------------------------


def _mamba1_rules(at: str) -> tuple[DerivationRule, ...]:
    """Return rules for the tensors of a Mamba mixer that GGUF stores in another form; their names
    begin with ``at``.
    """
    return (
        DerivationRule((f"{at}.conv1d.weight",), {f"{at}.conv1d.weight": taps}),
        DerivationRule((f"{at}.A_log",), {f"{at}.decay.weight": decay}, floats=True),
        DerivationRule((f"{at}.D",), {f"{at}.through.weight": same}, floats=True),
    )


def _mamba1_names(at: str) -> Names:
    """Return the GGUF names of a Mamba mixer's tensors after ``_mamba1_rules``, by checkpoint name;
    ``at``: the prefix of the checkpoint names.
    """
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


def _mamba1_state_keys(keys: MetadataReader, n_inner: int, *words: str) -> dict[str, Any]:
    """Return the keys of a Mamba state's sizes. ``n_inner``: channels; ``words``: config.json's
    keys of the convolution's taps, the state size, and the rank of time steps.
    """
    *sizes, rank = words
    names = ("conv_kernel", "state_size")
    made = {f"ssm.{name}": keys.integer(word) for name, word in zip(names, sizes, strict=True)}
    if keys.get(rank) in (None, "auto"):
        made["ssm.time_step_rank"] = -(-keys.integer("hidden_size") // 16)
    else:
        made["ssm.time_step_rank"] = keys.integer(rank)
    return {**made, "ssm.inner_size": n_inner}


def _mamba1_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    n_embd = keys.integer("hidden_size")
    given = keys.values.get("intermediate_size")
    n_inner = keys.integer("intermediate_size") if given else keys.integer("expand") * n_embd
    none = dict.fromkeys(
        f"attention.{of}" for of in ("head_count_kv", "key_length", "value_length")
    )
    return {
        **none,
        **_mamba1_state_keys(keys, n_inner, "conv_kernel", "state_size", "time_step_rank"),
        "feed_forward_length": 0,
        "attention.head_count": 0,
        PARTS_NORM: False,
    }


def _falcon_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    eps = f32(keys.number("mixer_rms_eps", lo=0.0, hi=1.0))
    other = eps != f32(keys.number("layer_norm_epsilon", lo=0.0, hi=1.0))
    made = {**_mamba1_keys(keys, n_layer), PARTS_NORM: True}
    return {**made, PARTS_EPS: eps} if other else made


_MAMBA1 = Family(
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
        **_mamba1_names("mixer"),
    },
    {"rms_norm_eps": "layer_norm_epsilon"},
    derived=lambda keys: _mamba1_rules("mixer"),
    more=_mamba1_keys,
)

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
        **_mamba1_state_keys(keys, n_inner, "mamba_d_conv", "mamba_d_state", "mamba_dt_rank"),
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
        **_mamba1_names("mamba"),
    }


def _jamba_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return _mamba1_rules("mamba")


# -- Mamba-2 --------------------------------------------------------------------------------------

# Unlimited bounds of time steps, as transformers 4 and 5 write them.
UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def state_keys(keys: MetadataReader, n_inner: int, *words: str) -> dict[str, Any]:
    """Return the keys of the sizes of Mamba-2's states. ``n_inner``: channels; ``words``:
    config.json's keys of the convolution's taps, the state size, the number of groups and of heads.
    Raises UnsupportedError for bounds on time steps.
    """
    limits = keys.get("time_step_limit")
    if limits is not None and limits not in UNLIMITED:
        keys.refuse("time_step_limit", f"is {limits!r:.60}: bounds on time steps are not supported")
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank")
    made = {f"ssm.{name}": keys.integer(word) for name, word in zip(names, words, strict=True)}
    return {**made, "ssm.inner_size": n_inner}


def _each_head(rows: Rows) -> Rows:
    return rows[:, None]


def _decay_of_heads(rows: Rows) -> Rows:
    return decay(rows)[:, None]


def _in_groups(rows: Rows, n: int) -> Rows:
    return rows.reshape(n, -1)


def state_rules(at: str, n_group: int) -> tuple[DerivationRule, ...]:
    """Return rules for the tensors of a Mamba-2 mixer that GGUF stores in another form; their names
    begin with ``at``. ``n_group``: groups of its norm.
    """
    return (
        DerivationRule((f"{at}.conv1d.weight",), {f"{at}.conv1d.weight": taps}),
        DerivationRule((f"{at}.dt_bias",), {f"{at}.dt.bias": flat}),
        DerivationRule(
            (f"{at}.norm.weight",), {f"{at}.norm.weight": partial(_in_groups, n=n_group)}
        ),
        DerivationRule((f"{at}.A_log",), {f"{at}.decay.weight": _decay_of_heads}, floats=True),
        DerivationRule((f"{at}.D",), {f"{at}.through.weight": _each_head}, floats=True),
    )


def state_names(at: str) -> Names:
    """Return the GGUF names of a Mamba-2 mixer's tensors after ``state_rules``, by checkpoint name;
    ``at``: the prefix of the checkpoint names.
    """
    return {
        f"{at}.in_proj": "ssm_in",
        f"{at}.conv1d": "ssm_conv1d",
        f"{at}.dt": "ssm_dt",
        f"{at}.norm": "ssm_norm",
        f"{at}.decay": "ssm_a",
        f"{at}.through": "ssm_d",
        f"{at}.out_proj": "ssm_out",
    }


STATE = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")
STATE_DEFAULTS = {
    "mamba_d_conv": 4,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_expand": 2,
}


def _mamba2_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    words = ("conv_kernel", "state_size", "n_groups", "num_heads")
    n_inner = keys.integer("expand") * keys.integer("hidden_size")
    none = dict.fromkeys(
        f"attention.{of}" for of in ("head_count_kv", "key_length", "value_length")
    )
    return {
        **none,
        **state_keys(keys, n_inner, *words),
        "feed_forward_length": 0,
        "attention.head_count": 0,
    }


def mamba2_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for models all of whose layers are Mamba-2 mixers."""
    return state_rules("mixer", keys.integer("n_groups"))


_ONE_NORM: Names = {"norm": "attn_norm", "norm_f": "output_norm", "lm_head": "output"}
MAMBA2_NAMES: Names = {**_ONE_NORM, "embeddings": "token_embd", **state_names("mixer")}
_MAMBA2_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-5,
    "state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "n_groups": 8,
    "num_heads": 128,
    # It has none of these; in llama.cpp a context of 2^20 tokens means any length.
    "max_position_embeddings": 1 << 20,
    "num_attention_heads": 1,
    "intermediate_size": 1,
}

# -- Bamba ----------------------------------------------------------------------------------------


def _bamba_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Bamba's keys: key heads of each layer, 0 for recurrent ones (all but those in
    ``attn_layer_indices``), and the sizes of states. Raises UnsupportedError for several groups.
    """
    listed = keys.get("attn_layer_indices") or []
    kinds = keys.get("layers_block_type")
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        keys.fail("attn_layer_indices", f"is {listed!r:.60}", "a list of layers")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == n_layer):
        keys.fail("layers_block_type", f"is {kinds!r:.60}", f"a list of {n_layer}")
    if keys.integer("mamba_n_groups") != 1:
        what = "transformers normalises all groups together, treadle each group separately"
        keys.refuse("mamba_n_groups", f"is {keys.get('mamba_n_groups')}: {what}")
    n_head_kv = keys.integer("num_key_value_heads", 0, lo=0) or keys.integer("num_attention_heads")
    n_inner = keys.integer("mamba_expand") * keys.integer("hidden_size")
    return {
        "attention.head_count_kv": [n_head_kv if i in listed else 0 for i in range(n_layer)],
        **state_keys(keys, n_inner, *STATE),
    }


def _bamba_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return state_rules("mamba", keys.integer("mamba_n_groups"))


_BAMBA: Names = {
    **LLAMA,
    "final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **state_names("mamba"),
}

# -- the rows -------------------------------------------------------------------------------------

MAMBA_FAMILIES: dict[str, Family] = {
    "mamba": _MAMBA1,
    "falcon_mamba": replace(
        _MAMBA1, defaults={**_MAMBA1.defaults, "mixer_rms_eps": 1e-6}, more=_falcon_keys
    ),
    "jamba": Family(
        "jamba",
        _JAMBA_DEFAULTS,
        _jamba_names(),
        experts=True,
        derived=_jamba_rules,
        more=_jamba_keys,
    ),
    "mamba2": Family(
        "mamba2",
        _MAMBA2_DEFAULTS,
        MAMBA2_NAMES,
        {"rms_norm_eps": "layer_norm_epsilon"},
        derived=mamba2_rules,
        more=_mamba2_keys,
    ),
    "bamba": Family(
        "granitehybrid",
        {
            **COMMON_EPS_5,
            **STATE_DEFAULTS,
            "vocab_size": 128000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
        },
        _BAMBA,
        derived=_bamba_rules,
        more=_bamba_keys,
    ),
}
