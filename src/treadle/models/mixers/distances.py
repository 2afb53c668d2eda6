"""Attention with a relative bias for each layer; in T5 all layers share that of the first."""

from __future__ import annotations

from dataclasses import replace

from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import TensorRow

REL_B = "attn_rel_b.weight"
DISTANCES = replace(ATTENTION, rows=(*ATTENTION.rows, TensorRow(REL_B, ("n_buckets", "n_head"))))
