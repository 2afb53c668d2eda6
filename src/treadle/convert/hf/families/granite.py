"""Family rows of Granite: dense models, mixtures, hybrids with Mamba-2, windows with sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import always, gate_and_up
from treadle.convert.hf.families.mamba import (
    STATE,
    STATE_DEFAULTS,
    state_keys,
    state_names,
    state_rules,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.hf.windows import all_but_first_of_four, has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.metadata import MetadataReader
from treadle.models.archs import ROPE_PATTERN

# -- mixtures -------------------------------------------------------------------------------------

_EXPERT_RULE = gate_and_up(
    "block_sparse_moe.input_linear", "block_sparse_moe.gate", "block_sparse_moe.up"
)

_EXPERT_NAMES: Names = {
    **LLAMA,
    **dict.fromkeys(("block_sparse_moe.router.layer", "block_sparse_moe.router"), "ffn_gate_inp"),
    "block_sparse_moe.gate": "ffn_gate_exps",
    "block_sparse_moe.up": "ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}

_EXPERT_DEFAULTS = {
    **COMMON,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

# -- hybrids with Mamba-2 -------------------------------------------------------------------------


def _hybrid(keys: MetadataReader) -> Family:
    """Return the hybrid family with experts or with a dense FFN. If all layers have attention, it
    is the architecture ``granite`` or ``granitemoe``. Raises UnsupportedError without
    ``layer_types``.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        keys.refuse("layer_types", "is missing: this family needs attention layers")
    given = keys.get("num_local_experts")
    family = _HYBRID_DENSE if given == 0 else _HYBRID_EXPERTS
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


def _hybrid_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    flags = has_attention(keys, n_layer)
    n_head_kv = keys.integer("num_key_value_heads", 0, lo=0)
    n_head_kv = n_head_kv or keys.integer("num_attention_heads")
    n_inner = keys.integer("mamba_expand") * keys.integer("hidden_size")
    return {
        "attention.head_count_kv": [n_head_kv if flag else 0 for flag in flags],
        **state_keys(keys, n_inner, *STATE),
    }


def _hybrid_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (
        _EXPERT_RULE,
        gate_and_up("shared_mlp.input_linear", "shared_mlp.gate", "shared_mlp.up"),
        *state_rules("mamba", keys.integer("mamba_n_groups")),
    )


def _hybrid_names(suffix: str) -> Names:
    """Return the name table of hybrids, checkpoint name to GGUF name; ``suffix`` is appended to the
    shared FFN's GGUF names.
    """
    return {
        **_EXPERT_NAMES,
        "shared_mlp.gate": f"ffn_gate{suffix}",
        "shared_mlp.up": f"ffn_up{suffix}",
        "shared_mlp.output_linear": f"ffn_down{suffix}",
        **state_names("mamba"),
    }


_HYBRID_EXPERTS = Family(
    "granitehybrid",
    {**_EXPERT_DEFAULTS, **STATE_DEFAULTS, "shared_intermediate_size": 1024},
    _hybrid_names("_shexp"),
    copied=GRANITE_SCALES,
    experts=True,
    derived=_hybrid_rules,
    turns=lambda keys: keys.get("position_embedding_type") == "rope",
    more=_hybrid_keys,
    variant=_hybrid,
)
_HYBRID_DENSE = replace(
    _HYBRID_EXPERTS,
    names=_hybrid_names(""),
    words={"intermediate_size": "shared_intermediate_size"},
    experts=False,
)

# -- windows with sinks ---------------------------------------------------------------------------

_SINKS = DerivationRule(("self_attn.sinks",), {"self_attn.sinks.weight": same})


def _window_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the GGUF keys of RoPE: the pattern, a flag per layer whether it has RoPE, and the base
    of those that do. ``layer_rope_theta`` lists a base per layer, 0 for no RoPE. Raises
    UnsupportedError if the bases differ, or if an older ``no_rope_layers`` contradicts the list.
    """
    key = "layer_rope_theta"
    older = keys.get("no_rope_layers")
    bases = keys.get(key)
    if bases is None:
        flags = [True] * n_layer
        made = {}
    else:
        numbers = isinstance(bases, list) and all(type(base) in (int, float) for base in bases)
        if not numbers or len(bases) != n_layer or any(base and base <= 1 for base in bases):
            keys.fail(key, f"is {bases!r:.60}", f"{n_layer} RoPE bases, 0 for a layer without RoPE")
        flags = [bool(base) for base in bases]
        own = {base for base in bases if base}
        if len(own) > 1:
            keys.refuse(key, f"has {len(own)} bases: treadle supports one for all layers with RoPE")
        made = {"rope.freq_base": f32(own.pop())} if own else {}
    if older is not None and [bool(flag) for flag in older] != flags:
        keys.refuse("no_rope_layers", f"transformers ignores it, and {key} differs")
    return {**made, ROPE_PATTERN: flags}


def _window_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for attention sinks, and for experts under the names of transformers' modules;
    older files say input_linear and output_linear, which need no rule.
    """
    at = "block_sparse_moe"
    return (
        _SINKS,
        DerivationRule((f"{at}.experts.gate_up_proj",), {f"{at}.input_linear.weight": same}),
        DerivationRule((f"{at}.experts.down_proj",), {f"{at}.output_linear.weight": same}),
    )


_WINDOW_NAMES: Names = {
    **LLAMA,
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_up_shexp",  # fused with its gate, which comes first
    "shared_mlp.output_linear": "ffn_down_shexp",
}

# -- mixtures with a shared FFN -------------------------------------------------------------------

_SHARED_NAMES: Names = {
    **_EXPERT_NAMES,
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


def _shared_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    shared = gate_and_up("shared_mlp.input_linear", "shared_mlp.gate", "shared_mlp.up")
    return _EXPERT_RULE, shared


# -- the rows -------------------------------------------------------------------------------------

GRANITE_FAMILIES: dict[str, Family] = {
    "granite": Family(
        "granite",
        {
            **COMMON,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        copied={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "granitemoe": Family(
        "granitemoe",
        _EXPERT_DEFAULTS,
        _EXPERT_NAMES,
        copied=GRANITE_SCALES,
        experts=True,
        derived=always(_EXPERT_RULE),
    ),
    "granitemoehybrid": _HYBRID_EXPERTS,
    "granite_swa": Family(
        "granite_swa",
        {
            **{key: it for key, it in _EXPERT_DEFAULTS.items() if "experts" not in key},
            "rms_norm_eps": 1e-5,
            "vocab_size": 100352,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        _WINDOW_NAMES,
        windowed=all_but_first_of_four,
        copied=GRANITE_SCALES,
        derived=lambda keys: (_SINKS,),
        more=_window_keys,
    ),
    "granitemoe_swa": Family(
        "granite_swa",
        {**_EXPERT_DEFAULTS, "sliding_window": 128, "shared_intermediate_size": 0},
        _WINDOW_NAMES,
        windowed=all_but_first_of_four,
        copied=GRANITE_SCALES,
        experts=True,
        derived=_window_rules,
        more=_window_keys,
    ),
    "granitemoeshared": Family(
        "granitemoe",
        {**_EXPERT_DEFAULTS, "shared_intermediate_size": 0},
        _SHARED_NAMES,
        copied=GRANITE_SCALES,
        experts=True,
        derived=_shared_rules,
    ),
}
GRANITE_FAMILIES["granite4_vision_text"] = GRANITE_FAMILIES["granite"]

# Rows that ``variant`` chooses.
GRANITE_VARIANTS = (
    _HYBRID_DENSE,
    replace(_HYBRID_DENSE, arch="granite"),
    replace(_HYBRID_EXPERTS, arch="granitemoe"),
)
