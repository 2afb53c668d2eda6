"""Family rows of Step 3.5 and 3.7 and MiMo V2, whose keys have two spellings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.mixtures import PACKED_EXPERTS, scores
from treadle.convert.hf.families.windowed_mixtures import leading_dense
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.keys import MetadataReader
from treadle.models.archs import EXPERTS_NORM
from treadle.models.graphs.limits import LIMIT, SHARED_LIMIT

_WIDE = "full_attention"
_NARROW = "sliding_attention"
_OTHER = "attention_other_setting"
_FURTHER = "num_nextn_predict_layers"
_SHARES = "partial_rotary_factors"
_ENUM = "moe_layers_enum"


# -- Step -------------------------------------------------------------------------------------


def _listed(keys: MetadataReader, key: str, n_layer: int) -> list[Any]:
    """Return a value for each layer; published folders also list MTP layers."""
    found = keys.get(key)
    most = n_layer + keys.integer(_FURTHER, 0, lo=0)
    if not isinstance(found, list) or len(found) not in (n_layer, most):
        keys.fail(key, f"is {found!r:.60}", f"a list of {n_layer}")
    return found[:n_layer]


def _step_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return published folders' keys in transformers' spelling."""
    given = dict(keys.values)
    n_layer = keys.integer("num_hidden_layers")
    kinds = [_WIDE] * n_layer
    if keys.get("layer_types") is not None:
        kinds = given["layer_types"] = _listed(keys, "layer_types", n_layer)
    for key in ("swiglu_limits", "swiglu_limits_shared", "mlp_layer_types"):
        if keys.get(key) is not None:
            given[key] = _listed(keys, key, n_layer)
    if given.get("mlp_layer_types") is None:
        given["mlp_layer_types"] = _kinds_of_ffns(keys, n_layer)
    if (other := keys.within(_OTHER)) is not None:
        n_head = keys.integer("num_attention_heads")
        n_kv = "num_attention_groups"
        given.setdefault("num_sliding_attention_heads", other.integer(_HEADS, n_head))
        for key in (n_kv, "head_dim"):
            if other.get(key) is not None and other.get(key) != keys.get(key):
                other.refuse(key, f"is {other.get(key)!r:.60}, but transformers ignores it")
    rope = given.get("rope_parameters")
    if not isinstance(rope, dict) or _WIDE not in rope:
        given["rope_parameters"] = _ropes(keys, kinds)
        given = {key: it for key, it in given.items() if key not in ("rope_scaling", "rope_theta")}
    return given


_HEADS = "num_attention_heads"


def _kinds_of_ffns(keys: MetadataReader, n_layer: int) -> list[str]:
    """Return the FFN kind of each layer from a list of layers with experts, written as one
    string.
    """
    found = keys.get(_ENUM)
    if found is None:
        return ["dense" if i < 3 else "sparse" for i in range(n_layer)]
    words = found.split(",") if isinstance(found, str) else found
    try:
        sparse = {int(word) for word in words if str(word).strip()}
    except (TypeError, ValueError):
        keys.fail(_ENUM, f"is {found!r:.60}", "numbers of layers")
    return ["sparse" if i in sparse else "dense" for i in range(n_layer)]


def _ropes(keys: MetadataReader, kinds: Sequence[Any]) -> dict[str, Any]:
    """Return RoPE settings for each kind of layer, taken from the first such layer; scaling applies
    to layers without a window.
    """
    result: dict[str, Any] = {}
    for kind in (_WIDE, _NARROW):
        i = kinds.index(kind) if kind in kinds else 0
        base = keys.get("rope_theta")
        base = _listed(keys, "rope_theta", len(kinds))[i] if isinstance(base, list) else base
        result[kind] = {"rope_type": "default", "rope_theta": 10000.0 if base is None else base}
        if keys.get(_SHARES) is not None:
            result[kind]["partial_rotary_factor"] = _listed(keys, _SHARES, len(kinds))[i]
    if (scaling := keys.within("rope_scaling")) is not None:
        result[_WIDE] |= scaling.values
    return result


def _step_more(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return per-layer heads and limits."""
    n_head = keys.integer(_HEADS)
    kinds = keys.get("layer_types") or [_WIDE] * n_layer
    own = keys.integer("num_sliding_attention_heads", n_head)
    result: dict[str, Any] = {
        "attention.head_count": [own if kind == _NARROW else n_head for kind in kinds],
        "leading_dense_block_count": leading_dense(keys, n_layer, 0),
        "expert_shared_feed_forward_length": keys.integer("share_expert_dim"),
        EXPERTS_NORM: True,
    }
    for key, name in (("swiglu_limits", LIMIT), ("swiglu_limits_shared", SHARED_LIMIT)):
        if keys.get(key) is not None:
            limits = [each or 0.0 for each in _listed(keys, key, n_layer)]
            if not all(type(each) in (int, float) and each >= 0 for each in limits):
                keys.fail(key, f"is {limits!r:.60}", "limits, 0 or null for none")
            result[name] = [f32(each) for each in limits]
    return result


def _step_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for the bias, next to the gate in published folders, inside it in transformers'
    modules.
    """
    return (
        scores("moe.router_bias", "moe.score"),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        *PACKED_EXPERTS,
    )


_STEP: Names = {
    **LLAMA_EXPERTS,
    "self_attn.g_proj": "attn_gate",
    "moe.gate": "ffn_gate_inp",
    "moe.score": "exp_probs_b",
    **{f"moe.{one}_proj": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
    **{f"share_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
}

# -- MiMo -------------------------------------------------------------------------------------

_SHARE = 0.334
_BASES = {_WIDE: 5e6, _NARROW: 1e4}
_SAME = {"swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim", f"swa_{_HEADS}": _HEADS}


def _mimo_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return published folders' keys in transformers' spelling."""
    given = dict(keys.values)
    n_layer = keys.integer("num_hidden_layers")
    for key, own in _SAME.items():
        if keys.get(key) not in (None, keys.get(own)):
            keys.refuse(key, f"is {keys.get(key)!r:.60}, and {own} is {keys.get(own)!r:.60}")
    if given.get("layer_types") is None:
        windowed = [i > 0 and (i + 1) % 6 > 0 for i in range(n_layer)]
        if keys.get("hybrid_layer_pattern") is not None:
            windowed = [bool(flag) for flag in _listed(keys, "hybrid_layer_pattern", n_layer)]
        given["layer_types"] = [_NARROW if flag else _WIDE for flag in windowed]
    if given.get("mlp_layer_types") is None:
        sparse = [i > 0 for i in range(n_layer)]
        if keys.get("moe_layer_freq") is not None:
            sparse = [bool(flag) for flag in _listed(keys, "moe_layer_freq", n_layer)]
        given["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in sparse]
    if keys.get("sliding_window_size") is not None:  # tokens before the current one
        given["sliding_window"] = keys.integer("sliding_window_size") + 1
    if keys.get("layernorm_epsilon") is not None:
        given["rms_norm_eps"] = keys.number("layernorm_epsilon", lo=0.0, hi=1.0)
    if given.get("rope_parameters") is None:
        share = keys.number("partial_rotary_factor", _SHARE, lo=0.0, hi=1.0)
        words = {_WIDE: "rope_theta", _NARROW: "swa_rope_theta"}
        given["rope_parameters"] = {
            kind: {
                "rope_type": "default",
                "rope_theta": keys.number(word, _BASES[kind], lo=1.001),
                "partial_rotary_factor": share,
            }
            for kind, word in words.items()
        }
        for word in (*words.values(), "partial_rotary_factor"):
            given.pop(word, None)
    return given


def _mimo_more(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; numbers of key heads are per layer."""
    n_kv = keys.integer("num_key_value_heads")
    kinds = keys.get("layer_types")
    own = keys.integer("swa_num_key_value_heads", 2 * n_kv)
    shares = [
        rope.number("partial_rotary_factor", _SHARE, lo=0.0, hi=1.0)
        for of in [keys.within("rope_parameters")]
        for kind in (_WIDE, _NARROW)
        if of and (rope := of.within(kind))
    ]
    if len({*shares}) > 1:
        keys.refuse(
            "rope_parameters",
            "partial_rotary_factor must be the same in all layers of this architecture",
        )
    return {
        "attention.head_count_kv": [own if kind == _NARROW else n_kv for kind in kinds],
        "attention.value_length": keys.integer("v_head_dim"),
        "attention.value_scale": f32(keys.number("attention_value_scale", 1.0, lo=0.0)),
        "leading_dense_block_count": leading_dense(keys, n_layer, 0),
    }


def _mimo_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the rules; published folders name sinks differently."""
    sinks = {"self_attn.sinks.weight": same}
    return (
        DerivationRule(("self_attn.attention_sink_bias",), sinks),
        DerivationRule(("self_attn.sinks",), sinks),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        *PACKED_EXPERTS,
    )


# -- the rows ---------------------------------------------------------------------------------

FLASH: dict[str, Family] = {
    "mimo_v2_flash": Family(
        "mimo2",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e6,
            "partial_rotary_factor": _SHARE,
            "tie_word_embeddings": False,
            "vocab_size": 152576,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "intermediate_size": 16384,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
        },
        {**LLAMA_EXPERTS, "self_attn.sinks": "attn_sinks"},
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        only={
            "routed_scaling_factor": 1.0,  # llama.cpp supports no other
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "add_swa_attention_sink_bias": True,
        },
        experts=True,
        derived=_mimo_rules,
        more=_mimo_more,
        respelt=_mimo_keys,
    ),
    "step3p5": Family(
        "step35",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128815,
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "query_pre_attn_scalar": None,
            "partial_rotary_factor": None,
            "max_position_embeddings": 128000,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "moe_router_scaling_factor": 1.0,
        },
        _STEP,
        older_words={"num_key_value_heads": "num_attention_groups"},
        norm_shift=1.0,
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        copied={"moe_router_scaling_factor": "expert_weights_scale"},
        only={
            "moe_router_activation": "sigmoid",
            "norm_expert_weight": True,
            "use_head_wise_attn_gate": True,
            "use_qk_norm": True,
            "zero_centered": True,
        },
        experts=True,
        derived=_step_rules,
        extra_layers=_FURTHER,
        more=_step_more,
        respelt=_step_keys,
    ),
}
