"""Attention with the layer's own relative bias, where T5's layers share that of the first layer."""

from __future__ import annotations

from dataclasses import replace

from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import TensorRow

REL_B = "attn_rel_b.weight"
DISTANCES = replace(ATTENTION, rows=(*ATTENTION.rows, TensorRow(REL_B, ("n_buckets", "n_head"))))
