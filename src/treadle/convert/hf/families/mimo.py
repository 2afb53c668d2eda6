"""Family row of MiMo V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, leading_dense, scores
from treadle.convert.hf.families.step import by_layer
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.metadata import MetadataReader

_WIDE = "full_attention"
_NARROW = "sliding_attention"

_HEADS = "num_attention_heads"

_SHARE = 0.334
_BASES = {_WIDE: 5e6, _NARROW: 1e4}
_SAME = {"swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim", f"swa_{_HEADS}": _HEADS}


def _keys(keys: MetadataReader) -> dict[str, Any]:
    """Return config.json's keys under transformers' names; published folders have others."""
    given = dict(keys.values)
    n_layer = keys.integer("num_hidden_layers")
    for key, own in _SAME.items():
        if keys.get(key) not in (None, keys.get(own)):
            keys.refuse(key, f"is {keys.get(key)!r:.60}, and {own} is {keys.get(own)!r:.60}")
    if given.get("layer_types") is None:
        windowed = [i > 0 and (i + 1) % 6 > 0 for i in range(n_layer)]
        if keys.get("hybrid_layer_pattern") is not None:
            windowed = [bool(flag) for flag in by_layer(keys, "hybrid_layer_pattern", n_layer)]
        given["layer_types"] = [_NARROW if flag else _WIDE for flag in windowed]
    if given.get("mlp_layer_types") is None:
        sparse = [i > 0 for i in range(n_layer)]
        if keys.get("moe_layer_freq") is not None:
            sparse = [bool(flag) for flag in by_layer(keys, "moe_layer_freq", n_layer)]
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


def _more(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys: key heads of each layer, the size and scale of values, and the number of
    leading dense layers. Raises UnsupportedError if the share of rotated dims differs between kinds
    of layers.
    """
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


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the rules for sinks (published folders name them differently), router bias and
    experts.
    """
    sinks = {"self_attn.sinks.weight": same}
    return (
        DerivationRule(("self_attn.attention_sink_bias",), sinks),
        DerivationRule(("self_attn.sinks",), sinks),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        *PACKED_EXPERTS,
    )


# -- the rows -------------------------------------------------------------------------------------

MIMO_FAMILIES: dict[str, Family] = {
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
        derived=_rules,
        more=_more,
        normalize_keys=_keys,
    ),
}
