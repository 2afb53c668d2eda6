"""Attention with required sinks, in models whose other layers have none (MiMo V2)."""

from __future__ import annotations

from dataclasses import replace

from treadle.models.mixers.attention import ATTENTION, ATTENTION_QKV
from treadle.models.structure import TensorRow

SINKS, SINKS_QKV = (
    replace(
        each,
        rows=tuple(
            TensorRow(row.name, row.shape) if row.name == "attn_sinks.weight" else row
            for row in each.rows
        ),
    )
    for each in (ATTENTION, ATTENTION_QKV)
)
