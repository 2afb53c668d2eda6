"""Family row of Step 3.5 and 3.7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, leading_dense, scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM
from treadle.models.graphs.limits import LIMIT, SHARED_LIMIT

_WIDE = "full_attention"
_NARROW = "sliding_attention"
_OTHER = "attention_other_setting"
_N_MTP = "num_nextn_predict_layers"
_SHARES = "partial_rotary_factors"
_ENUM = "moe_layers_enum"


def by_layer(keys: MetadataReader, key: str, n_layer: int) -> list[Any]:
    """Return the list in ``key``, one value per layer; published folders append those of MTP
    layers, which are dropped. Raises FileError if it is no list of that length.
    """
    found = keys.get(key)
    most = n_layer + keys.integer(_N_MTP, 0, lo=0)
    if not isinstance(found, list) or len(found) not in (n_layer, most):
        keys.fail(key, f"is {found!r:.60}", f"a list of {n_layer}")
    return found[:n_layer]


def _keys(keys: MetadataReader) -> dict[str, Any]:
    """Return config.json's keys under transformers' names; published folders have others."""
    given = dict(keys.values)
    n_layer = keys.integer("num_hidden_layers")
    kinds = [_WIDE] * n_layer
    if keys.get("layer_types") is not None:
        kinds = given["layer_types"] = by_layer(keys, "layer_types", n_layer)
    for key in ("swiglu_limits", "swiglu_limits_shared", "mlp_layer_types"):
        if keys.get(key) is not None:
            given[key] = by_layer(keys, key, n_layer)
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
    """Return each layer's FFN kind, "dense" or "sparse". config.json lists the numbers of the
    layers with experts in one string; by default all but the first three have them.
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
    """Return RoPE parameters by kind of layer, taken from the first layer of each kind. ``kinds``:
    each layer's. Scaling applies only to layers without a window.
    """
    made: dict[str, Any] = {}
    for kind in (_WIDE, _NARROW):
        i = kinds.index(kind) if kind in kinds else 0
        base = keys.get("rope_theta")
        base = by_layer(keys, "rope_theta", len(kinds))[i] if isinstance(base, list) else base
        made[kind] = {"rope_type": "default", "rope_theta": 10000.0 if base is None else base}
        if keys.get(_SHARES) is not None:
            made[kind]["partial_rotary_factor"] = by_layer(keys, _SHARES, len(kinds))[i]
    if (scaling := keys.within("rope_scaling")) is not None:
        made[_WIDE] |= scaling.values
    return made


def _step_more(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys for Step: query heads of each layer, number of leading dense layers, width
    of the shared expert, limits of SwiGLU.
    """
    n_head = keys.integer(_HEADS)
    kinds = keys.get("layer_types") or [_WIDE] * n_layer
    own = keys.integer("num_sliding_attention_heads", n_head)
    made: dict[str, Any] = {
        "attention.head_count": [own if kind == _NARROW else n_head for kind in kinds],
        "leading_dense_block_count": leading_dense(keys, n_layer, 0),
        "expert_shared_feed_forward_length": keys.integer("share_expert_dim"),
        EXPERTS_NORM: True,
    }
    for key, name in (("swiglu_limits", LIMIT), ("swiglu_limits_shared", SHARED_LIMIT)):
        if keys.get(key) is not None:
            limits = [each or 0.0 for each in by_layer(keys, key, n_layer)]
            if not all(type(each) in (int, float) and each >= 0 for each in limits):
                keys.fail(key, f"is {limits!r:.60}", "limits, 0 or null for none")
            made[name] = [f32(each) for each in limits]
    return made


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for experts, and for the bias of router scores: ``moe.router_bias`` in published
    folders, ``mlp.gate.e_score_correction_bias`` in those that transformers writes.
    """
    return (
        scores("moe.router_bias", "moe.score"),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        *PACKED_EXPERTS,
    )


_NAMES: Names = {
    **LLAMA_EXPERTS,
    "self_attn.g_proj": "attn_gate",
    "moe.gate": "ffn_gate_inp",
    "moe.score": "exp_probs_b",
    **{f"moe.{one}_proj": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
    **{f"share_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
}

# -- the rows -------------------------------------------------------------------------------------

STEP_FAMILIES: dict[str, Family] = {
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
        _NAMES,
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
        derived=_rules,
        extra_layers=_N_MTP,
        more=_step_more,
        normalize_keys=_keys,
    ),
}
