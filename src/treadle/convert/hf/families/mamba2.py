"""Family rows and keys of models with Mamba-2 layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treadle.convert.hf.families.mixtures import (
    GRANITE,
    GRANITE_DEFAULTS,
    GRANITE_EXPERTS,
    GRANITE_SCALES,
    gate_and_up,
    scores,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import Names
from treadle.convert.hf.windows import has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, decay, flat, taps
from treadle.files.keys import MetadataReader

# Unlimited bounds of time steps, as transformers 4 and 5 write them.
UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])

# Files have this time_step_min: see docs/design-decisions.md. It is the lower end of initial steps
# in training. transformers uses it as a lower bound for Nemotron-H; llama.cpp has no bound.
TIME_STEP_MIN = 0.001

# -- common -----------------------------------------------------------------------------------


def state_keys(keys: MetadataReader, n_inner: int, *words: str) -> dict[str, Any]:
    """Return the states' sizes; ``words``: names of the taps, the state size, its groups
    and heads.
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
    """Return rules for the layer's recurrent part, named ``at``."""
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
    """Return the names of that part's tensors after the rules."""
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


# -- Mamba-2 alone ----------------------------------------------------------------------------


def _mamba_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
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


def _mamba_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return state_rules("mixer", keys.integer("n_groups"))


_ONE_NORM: Names = {"norm": "attn_norm", "norm_f": "output_norm", "lm_head": "output"}
_MAMBA: Names = {**_ONE_NORM, "embeddings": "token_embd", **state_names("mixer")}
_MAMBA_DEFAULTS: Mapping[str, Any] = {
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


# -- Nemotron-H: a mixer or an FFN a layer ----------------------------------------------------

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _nemotron_kinds(keys: MetadataReader) -> list[str]:
    """Return each layer's kind; older files use one letter per layer."""
    key = next((key for key in ("layers_block_type", "layer_types") if keys.get(key)), "")
    if key:
        kinds = keys.get(key)
        whole = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        found = [_OLDER.get(kind, kind) for kind in kinds] if whole else [""]
    else:
        key = "hybrid_override_pattern"
        found = [_KINDS.get(letter, "") for letter in keys.text(key)]
    if others := set(found) - set(_KINDS.values()):
        keys.refuse(
            key,
            f"has {min(others) or 'another kind'!r:.40}: treadle supports "
            f"{', '.join(_KINDS.values())}",
        )
    return found


def _nemotron(keys: MetadataReader) -> Family:
    """Return the family with or without experts; files of transformers 5 do not give the number of
    layers.
    """
    kinds = _nemotron_kinds(keys)
    if "mlp" in kinds and "moe" in kinds:
        keys.refuse(
            "layers_block_type",
            "has both mlp and moe: treadle supports only one of them in this family",
        )
    family = _NEMOTRON_EXPERTS if "moe" in kinds else _NEMOTRON
    return replace(family, defaults={**family.defaults, "num_hidden_layers": len(kinds)})


def _nemotron_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    kinds = _nemotron_kinds(keys)
    n_head_kv = keys.integer("num_key_value_heads")
    if len(kinds) != n_layer:
        keys.fail(
            "num_hidden_layers", f"is {n_layer}", f"{len(kinds)}, the number of listed layer kinds"
        )
    experts = "moe" in kinds
    n_ff = keys.integer("moe_intermediate_size" if experts else "intermediate_size")
    if keys.get("mamba_dt_limit") not in (None, *UNLIMITED):  # an older time_step_limit
        keys.refuse("mamba_dt_limit", "bounds on time steps are not supported")
    for key in ("time_step_min", "mamba_dt_min"):
        if keys.number(key, TIME_STEP_MIN, lo=0.0) > TIME_STEP_MIN:
            keys.refuse(
                key, f"is {keys.get(key)!r:.60}: a lower bound on time steps is not supported"
            )
    n_inner = keys.integer("mamba_num_heads") * keys.integer("mamba_head_dim")
    words = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")
    result: dict[str, Any] = {
        **state_keys(keys, n_inner, *words),
        "feed_forward_length": [n_ff if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count_kv": [n_head_kv * (kind == "full_attention") for kind in kinds],
        "rope.dimension_count": keys.integer("hidden_size") // keys.integer("num_attention_heads"),
        "rope.scaling.finetuned": False,  # llama.cpp's key for no RoPE
    }
    if experts and keys.get("moe_latent_size") is not None:
        result["moe_latent_size"] = keys.integer("moe_latent_size")
    return result


def _nemotron_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    bias = scores("mixer.gate.e_score_correction_bias", "mixer.score")
    return (*_mamba_rules(keys), bias)


_NEMOTRON = Family(
    "nemotron_h",
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "tie_word_embeddings": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    {
        **_MAMBA,
        "embed_tokens": "token_embd",
        **{f"mixer.{one}_proj": f"attn_{one}" for one in "qkv"},
        "mixer.o_proj": "attn_output",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
        "mixer.gate": "ffn_gate_inp",
        "mixer.score": "exp_probs_b",
        **{f"mixer.experts.{one}_proj": f"ffn_{one}_exps" for one in ("up", "down")},
        **{f"mixer.shared_experts.{one}_proj": f"ffn_{one}_shexp" for one in ("up", "down")},
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
    activation="relu2",
    older_words={"head_dim": "attention_head_dim"},
    only={"mamba_hidden_act": "silu", "sliding_window": None},
    derived=_mamba_rules,
    extra_layers="num_nextn_predict_layers",
    more=_nemotron_keys,
    variant=_nemotron,
)
_NEMOTRON_EXPERTS = replace(
    _NEMOTRON,
    arch="nemotron_h_moe",
    defaults={
        **_NEMOTRON.defaults,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    experts=True,
    derived=_nemotron_rules,
)


# -- Granite 4 --------------------------------------------------------------------------------


def _granite(keys: MetadataReader) -> Family:
    """Return the family with experts or with one FFN; an older Granite if all layers have
    attention.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        keys.refuse("layer_types", "is missing: this family needs attention layers")
    given = keys.get("num_local_experts")
    family = _GRANITE_DENSE if given == 0 else _GRANITE_EXPERTS
    if isinstance(kinds, list) and all(has_attention(keys, len(kinds))):
        return replace(
            family,
            arch="granite" if given == 0 else "granitemoe",
            more=_no_keys,
        )
    return family


def _no_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    has_attention(keys, n_layer)  # checks the list's length
    return {}


def _granite_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    flags = has_attention(keys, n_layer)
    n_head_kv = keys.integer("num_key_value_heads", 0, lo=0)
    n_head_kv = n_head_kv or keys.integer("num_attention_heads")
    n_inner = keys.integer("mamba_expand") * keys.integer("hidden_size")
    return {
        "attention.head_count_kv": [n_head_kv if flag else 0 for flag in flags],
        **state_keys(keys, n_inner, *STATE),
    }


def _granite_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (
        GRANITE_EXPERTS,
        gate_and_up("shared_mlp.input_linear", "shared_mlp.gate", "shared_mlp.up"),
        *state_rules("mamba", keys.integer("mamba_n_groups")),
    )


def _granite_names(suffix: str) -> Names:
    """Return the names; ``suffix``: of the shared FFN's tensors."""
    return {
        **GRANITE,
        "shared_mlp.gate": f"ffn_gate{suffix}",
        "shared_mlp.up": f"ffn_up{suffix}",
        "shared_mlp.output_linear": f"ffn_down{suffix}",
        **state_names("mamba"),
    }


_GRANITE_EXPERTS = Family(
    "granitehybrid",
    {**GRANITE_DEFAULTS, **STATE_DEFAULTS, "shared_intermediate_size": 1024},
    _granite_names("_shexp"),
    copied=GRANITE_SCALES,
    experts=True,
    derived=_granite_rules,
    turns=lambda keys: keys.get("position_embedding_type") == "rope",
    more=_granite_keys,
    variant=_granite,
)
_GRANITE_DENSE = replace(
    _GRANITE_EXPERTS,
    names=_granite_names(""),
    words={"intermediate_size": "shared_intermediate_size"},
    experts=False,
)


# Rows that ``variant`` chooses.
MAMBA_VARIANTS = (
    _NEMOTRON_EXPERTS,
    _GRANITE_DENSE,
    replace(_GRANITE_DENSE, arch="granite"),
    replace(_GRANITE_EXPERTS, arch="granitemoe"),
)

# -- the rows ---------------------------------------------------------------------------------

MAMBAS: dict[str, Family] = {
    "mamba2": Family(
        "mamba2",
        _MAMBA_DEFAULTS,
        _MAMBA,
        {"rms_norm_eps": "layer_norm_epsilon"},
        derived=_mamba_rules,
        more=_mamba_keys,
    ),
    "nemotron_h": _NEMOTRON,
    "granitemoehybrid": _GRANITE_EXPERTS,
}
