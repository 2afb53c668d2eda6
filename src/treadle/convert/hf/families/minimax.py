"""Family rows of MiniMax M2 and M3."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import PACKED_EXPERTS, always, scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, LLAMA_EXPERTS, experts_123
from treadle.convert.sources.derived_tensors import DerivationRule, lower, upper
from treadle.files.metadata import MetadataReader
from treadle.models.archs import LEADING_DENSE
from treadle.models.graphs.blocks import BLOCK_SIZE, LOCAL
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP

_SPARSE = "block_sparse_moe."
_PARTS = "gate", "up", "down"
_INDEXER = "q_proj", "k_proj", "q_norm", "k_norm"
_BLOCKS = "minimax_m3_sparse"


def _halves(at: str) -> DerivationRule:
    """Return the rule that splits a fused FFN matrix into gate (upper half of the rows) and up;
    ``at``: prefix of the tensors' names.
    """
    gives = {f"{at}gate_proj.weight": upper, f"{at}up_proj.weight": lower}
    return DerivationRule((f"{at}gate_up_proj.weight",), gives, side="B")


def _m3_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return M3's keys of experts and of indexers. Raises UnsupportedError unless the same layers,
    the last ones, have both.
    """
    inner = keys.within("sparse_attention_config") or MetadataReader({}, keys.path)
    width = keys.integer("intermediate_size", 3072)
    shared = keys.integer("shared_intermediate_size", width * keys.integer("n_shared_experts", 1))
    if shared % width:
        keys.refuse("shared_intermediate_size", f"is {shared}: expected a multiple of {width}")
    sparse = _flags(keys, n_layer, "mlp_layer_types", "sparse", keys.get("moe_layer_freq"))
    blocks = _flags(keys, n_layer, "layer_types", _BLOCKS, inner.get("sparse_attention_freq"))
    n_dense = sparse.index(True) if True in sparse else n_layer
    if sparse != blocks or not all(sparse[n_dense:]):
        what = "treadle supports indexers in the layers with experts, behind those without"
        keys.refuse("layer_types", f"{sum(blocks)} indexers, {sum(sparse)} layers: {what}")

    def size(name: str, other: str, usual: int) -> int:
        return keys.integer(name, inner.integer(other, usual))

    return {
        "expert_feed_forward_length": width,
        "expert_shared_count": shared // width,
        LEADING_DENSE: n_dense,
        INDEX_HEADS: size("index_n_heads", "sparse_num_index_heads", 4),
        INDEX_DIM: size("index_head_dim", "sparse_index_dim", 128),
        INDEX_TOP: size("index_topk_blocks", "sparse_topk_blocks", 16),
        BLOCK_SIZE: size("index_block_size", "sparse_block_size", 128),
        LOCAL: size("index_local_blocks", "sparse_local_block", 1),
    }


def _flags(keys: MetadataReader, n_layer: int, key: str, kind: str, older: Any) -> list[bool]:
    """Return which layers are of ``kind``, bool [n_layer]: by config.json's ``key``, a list of
    kinds, or, without it, by ``older``, the value of an older key: a list of ones and zeros.
    """
    found = keys.get(key)
    if found is None:
        found = older if older is not None else [key == "mlp_layer_types"] * n_layer
    if not isinstance(found, list) or len(found) != n_layer:
        keys.fail(key, f"is {found!r:.60}", f"a list of {n_layer}")
    return [each in (kind, 1, True) for each in found]


MINIMAX_FAMILIES: dict[str, Family] = {
    "minimax_m2": Family(
        "minimax-m2",
        {
            **COMMON,
            "vocab_size": 200064,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": None,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        experts=True,
        derived=always(
            scores("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.score")
        ),
    ),
    "minimax_m3_vl_text": Family(
        "minimax-m3",
        {
            **COMMON,
            "vocab_size": 200064,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "rope_theta": 5e6,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.0,
            "dense_intermediate_size": 12288,
            "moe_layer_freq": None,
            "partial_rotary_factor": None,
        },
        {
            **LLAMA_EXPERTS,
            **experts_123("block_sparse_moe."),
            **{f"{_SPARSE}shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in _PARTS},
            **{f"self_attn.index_{x}": f"indexer.{x}" for x in _INDEXER},
            **{f"self_attn.indexer.{x}": f"indexer.{x}" for x in _INDEXER},
        },
        {"intermediate_size": "dense_intermediate_size"},
        norm_shift=1.0,
        only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        experts=True,
        derived=always(
            *PACKED_EXPERTS,
            *(_halves(f"mlp.{part}") for part in ("", "shared_experts.")),
            scores("mlp.gate.e_score_correction_bias", "mlp.score"),
            scores("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.score"),
        ),
        more=_m3_keys,
    ),
}
