"""Attention with required sinks, in models whose other layers have none (MiMo V2)."""

from __future__ import annotations

from treadle.models.mixers.attention import ATTENTION, ATTENTION_QKV
from treadle.models.structure import TensorRow, with_rows

SINKS, SINKS_QKV = (
    with_rows(each, TensorRow("attn_sinks.weight", ("n_head",)))
    for each in (ATTENTION, ATTENTION_QKV)
)
