"""Family row of GLM-5.3-Flash: several residual streams, Kimi Delta Attention, and latent attention
to blocks of keys that an indexer chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.deepseek import (
    FULL,
    INDEXED_NAMES,
    head_rules,
    index_keys,
    indexer_types,
    listed_kinds,
)
from treadle.convert.hf.families.experts import PACKED_EXPERTS, scores
from treadle.convert.hf.families.kda import (
    FORGET_GATE,
    KDA_AT,
    kda_config,
    kda_names,
    kda_rules,
    kda_sizes,
)
from treadle.convert.hf.families.streams import STREAM_NAMES, manifold_keys, stream_rules
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, decay, same
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_GATING
from treadle.models.graphs.experts import SIGMOID
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.latent import KEY, KV_RANK, VALUE
from treadle.models.graphs.limits import LIMIT, SHARED_LIMIT
from treadle.models.graphs.pooled import TAIL, UNIT
from treadle.models.graphs.recurrence import KDA_FLOOR, LAYER_EPS

_STATE = "linear_attention"
_ATTENTION = ("indexed_attention", "full_attention")
_EVERY = 4  # transformers' default: every fourth layer has attention
_DENSE = 3  # and the first three have no experts


def _kinds(keys: MetadataReader, n_layer: int) -> list[int]:
    """Return 1 for each layer with attention, 0 for one with a recurrent state."""
    kinds = keys.get("layer_types")
    if kinds is None:
        return [int(i % _EVERY == _EVERY - 1) for i in range(n_layer)]
    names = _STATE, *_ATTENTION
    if not isinstance(kinds, list) or len(kinds) != n_layer or not all(k in names for k in kinds):
        keys.fail("layer_types", f"is {kinds!r:.60}", f"{n_layer} of {_STATE}, {_ATTENTION[0]}")
    return [int(kind != _STATE) for kind in kinds]


def _state_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return the keys of Kimi Delta Attention: sizes, and the lower bound of decay. They come from
    ``linear_attn_config`` (published folders) or from outer keys (folders that transformers
    writes).
    """
    sizes = kda_sizes(keys, heads=64, head_dim=128)
    part = kda_config(keys)
    floor = keys.number("linear_lower_bound", -5.0, lo=-1e6, hi=0.0)
    floor = part.number("gate_lower_bound", floor, lo=-1e6, hi=0.0)
    return {**sizes, KDA_FLOOR: f32(floor)}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    rank = keys.integer("kv_lora_rank")
    if keys.integer("qk_rope_head_dim", 0, lo=0):
        keys.refuse("qk_rope_head_dim", "treadle supports only attention without rope")
    limit = [f32(keys.number("swiglu_limit", lo=0.0))] * n_layer
    dense = listed_kinds(keys, n_layer)
    if not dense:
        dense = {"leading_dense_block_count": keys.integer("first_k_dense_replace", _DENSE, lo=0)}
    kinds = keys.get("indexer_types")
    return {
        "attention.head_count_kv": _kinds(keys, n_layer),
        KV_RANK: rank,
        Q_RANK: keys.integer("q_lora_rank"),
        KEY: rank,
        VALUE: rank,
        f"{KEY}_mla": keys.integer("qk_nope_head_dim"),
        f"{VALUE}_mla": keys.integer("v_head_dim"),
        "rope.dimension_count": 0,
        LAYER_EPS: f32(1e-6),  # of the indexer's norm
        **_state_keys(keys),
        **index_keys(keys),
        UNIT: keys.integer("index_kpool"),
        TAIL: keys.flag("index_kpool_always_select_tail", True),
        **manifold_keys(keys),
        EXPERTS_GATING: SIGMOID,
        LIMIT: limit,
        SHARED_LIMIT: limit,
        **dense,
        **indexer_types(keys, n_layer, [FULL] * n_layer if kinds is None else kinds),
    }


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    gate = f"{KDA_AT}{FORGET_GATE}"
    renamed = {
        "self_attn.indexer.index_kpool_compress_ape": "indexer_ape.weight",
        "self_attn.indexer.index_kpool_compress_gate": "indexer_gate.weight",
        **{f"{gate}f_{x}_proj.weight": f"self_attn.f_{x}_proj.weight" for x in "ab"},
    }
    return (
        *head_rules(keys),
        *(DerivationRule((name,), {to: same}) for name, to in renamed.items()),
        *stream_rules("hc_{half}_{part}", "{half}_hc.{part}"),
        *kda_rules(decay, within=("", FORGET_GATE)),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        *PACKED_EXPERTS,
    )


_NAMES: Names = {
    **INDEXED_NAMES,
    **kda_names(),
    "indexer_ape": "indexer_compressor_ape",
    "indexer_gate": "indexer_compressor_gate",
    **STREAM_NAMES,
}

GLM_NEXT_FAMILIES = {
    "glm5_next_text": Family(
        "glm5-next",
        {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "vocab_size": 154880,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "max_position_embeddings": 1048576,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 256,
            "v_head_dim": 256,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_kpool": 16,
            "linear_head_dim": 128,
            "linear_num_heads": 64,
            "linear_conv_kernel_dim": 4,
            "hc_mult": 4,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "swiglu_limit": 10.0,
        },
        _NAMES,
        {"head_dim": "qk_nope_head_dim"},
        only={"attention_bias": False, "mhc": True, "mla_use_nope": True},
        experts=True,
        derived=_rules,
        extra_layers="num_nextn_predict_layers",
        more=_keys,
    )
}
