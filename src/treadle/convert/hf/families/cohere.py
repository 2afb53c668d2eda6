"""Family rows of Cohere's Command models."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import LAYER_NORM
from treadle.convert.hf.families.experts import PACKED_EXPERTS, leading_dense
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.hf.windows import all_but_every
from treadle.files.keys import MetadataReader
from treadle.models.archs import EXPERTS_GATING
from treadle.models.graphs.positions import by_period

_COHERE = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _cohere2(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Refuse a missing window: transformers then applies RoPE in no layer, GGUF in all of them."""
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    return {}


_CHOSEN_ALONE = 3  # llama.cpp's number of softmax over the chosen experts
_RMS = "attention.layer_norm_rms_epsilon"


def _expert_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of either norm and two FFN widths; a layer without window has RoPE if it is
    dense.
    """
    width = keys.integer("intermediate_size")
    dense = leading_dense(keys, n_layer, 0)
    shared = keys.integer("num_shared_experts", 0, lo=0)
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    period = "prefix_dense_sliding_window_pattern"
    if dense and keys.integer(period, 1, lo=0) != 1:
        keys.refuse(
            period, f"is {keys.get(period)}: treadle supports only 1, RoPE in all dense layers"
        )
    made: dict[str, Any] = {
        _RMS: None,
        "attention.layer_norm_epsilon": f32(keys.number("layer_norm_eps", lo=0.0, hi=1.0)),
        "expert_feed_forward_length": width,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": width * shared,
        "leading_dense_block_count": dense,
    }
    if keys.get("rms_norm_eps") is not None:
        made[_RMS] = f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0))
        del made["attention.layer_norm_epsilon"]
    if keys.get("prefix_dense_intermediate_size") is not None:
        made["feed_forward_length"] = keys.integer("prefix_dense_intermediate_size")
    chosen_by = keys.text("expert_selection_fn", "softmax")
    if chosen_by not in ("softmax", "sigmoid"):
        keys.refuse(
            "expert_selection_fn", f"{chosen_by!r:.60}: treadle supports softmax and sigmoid"
        )
    if chosen_by == "softmax":
        made[EXPERTS_GATING] = _CHOSEN_ALONE
    return made


def _expert_windows(keys: MetadataReader, n_layer: int) -> Windowed:
    """Put the window in all but the last of each four layers, counted after the dense layers."""
    dense = leading_dense(keys, n_layer, 0)
    period = keys.integer("sliding_window_pattern", 4)
    return [False] * dense + by_period(period, n_layer - dense)


COHERE_FAMILIES: dict[str, Family] = {
    "cohere": Family(
        "command-r",
        {**_COHERE, "rope_theta": 500000.0},
        words=LAYER_NORM,
        paired=True,
        copied={"logit_scale": "logit_scale"},
    ),
    "cohere2": Family(
        "cohere2",
        {**_COHERE, "rope_theta": 10000.0, "sliding_window": 4096},
        words=LAYER_NORM,
        windowed=all_but_every(4, overridable=True),
        paired=True,
        copied={"logit_scale": "logit_scale"},
        more=_cohere2,
    ),
    "cohere2_moe": Family(
        "cohere2moe",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 256000,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        LLAMA_EXPERTS,
        {"rms_norm_eps": "layer_norm_eps"},
        windowed=_expert_windows,
        paired=True,
        copied={"logit_scale": "logit_scale"},
        only={"shared_expert_combination_strategy": "average"},
        experts=True,
        derived=lambda keys: PACKED_EXPERTS,
        more=_expert_keys,
    ),
}
