"""Attention residuals of Kimi K3 in float64 and plain numpy."""

from __future__ import annotations

import numpy as np

from tests.reference import Array, Layer, Tensors, gated, log_softmax, rms_norm
from tests.reference_states import MIXED
from treadle.models.config import Config


def through_blocks(config: Config, x: Array, tensor: Tensors) -> Array:
    """The normed states after all layers, of embeddings ``x [n_tokens, n_embd]``."""
    kept: list[Array] = []

    def mixed(name: str) -> Array:
        rows = np.stack([*kept, x])
        scores = (rms_norm(rows, tensor(f"{name}.weight"), config.norm_eps)).sum(-1)
        weights = np.exp(log_softmax(scores.T)).T
        return np.asarray((weights[:, :, None] * rows).sum(0))

    for i in range(config.n_layer):
        maps = Layer(config, i, tensor)
        h = maps.norm(mixed(f"blk.{i}.attn_res_score"), "attn_norm")
        begins = i % config.attn_res_block_size == 0
        if begins:
            kept.append(x)
        h = MIXED[maps.at.mixer](maps, h)
        x = h if begins else x + h
        x = x + gated(maps, maps.norm(mixed(f"blk.{i}.ffn_res_score"), "ffn_norm"))
    return rms_norm(mixed("output_res_score"), tensor("output_norm.weight"), config.norm_eps)
