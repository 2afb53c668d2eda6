"""Family row of SmallThinker."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_GATING, EXPERTS_NORM
from treadle.models.graphs.experts import SIGMOID
from treadle.models.graphs.positions import by_period

_SOFTMAX = 1  # llama.cpp's number
_NAMES: Names = {
    **LLAMA,
    "block_sparse_moe.primary_router": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.{one}": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
}


def _layout(keys: MetadataReader, key: str, n_layer: int, usual: bool) -> list[bool]:
    flags = keys.get(key)
    if flags is None:
        return [usual] * n_layer
    if not isinstance(flags, list) or len(flags) != n_layer or any(f not in (0, 1) for f in flags):
        keys.fail(key, f"is {flags!r:.60}", f"{n_layer} flags")
    return [bool(flag) for flag in flags]


def _windows(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all but the first of each four, or none.
    Raises UnsupportedError for other layouts, and unless the layers with a window (all, if none has
    one) are those with RoPE: GGUF has no key for this.
    """
    flags = _layout(keys, "sliding_window_layout", n_layer, False)
    if any(flags) and flags != by_period(-4, n_layer):
        keys.refuse(
            "sliding_window_layout",
            "treadle supports windows only in all but the first of each 4 layers",
        )
    if _layout(keys, "rope_layout", n_layer, True) != (flags if any(flags) else [True] * n_layer):
        keys.refuse(
            "rope_layout",
            "treadle supports RoPE only in layers with a window, or in all layers if none has one",
        )
    return flags if any(flags) else None


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    softmax = keys.flag("moe_primary_router_apply_softmax", False)
    return {
        "expert_count": keys.integer("moe_num_primary_experts"),
        "expert_used_count": keys.integer("moe_num_active_primary_experts"),
        "expert_feed_forward_length": keys.integer("moe_ffn_hidden_size"),
        EXPERTS_GATING: _SOFTMAX if softmax else SIGMOID,
        EXPERTS_NORM: True,
    }


SMALLTHINKER_FAMILIES: dict[str, Family] = {
    "smallthinker": Family(
        "smallthinker",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "num_hidden_layers": 32,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window_size": 4096,
            "moe_ffn_hidden_size": 768,
            "moe_num_primary_experts": 32,
            "moe_num_active_primary_experts": 4,
        },
        _NAMES,
        {"intermediate_size": "moe_ffn_hidden_size", "sliding_window": "sliding_window_size"},
        activation="relu",
        windowed=_windows,
        only={"norm_topk_prob": True},
        experts=True,
        more=_keys,
    ),
}
