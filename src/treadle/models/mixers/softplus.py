"""Attention with a required matrix for its gate: softplus of a value per output element or per head
(Laguna), or sigmoid of a value per head (Step 3.5, LFM 3, Spark X2.5).
"""

from __future__ import annotations

from treadle.models.mixers.attention import ATTENTION, ATTENTION_QKV
from treadle.models.structure import TensorRow, with_rows

_OF_HEADS = TensorRow("attn_gate.weight", ("n_head", "n_embd"))
SOFTPLUS = with_rows(ATTENTION, TensorRow("attn_gate.weight", ("n_attn", "n_embd")))
SOFTPLUS_HEADS = with_rows(ATTENTION, _OF_HEADS)
SIGMOID_HEADS = SOFTPLUS_HEADS
SIGMOID_FUSED = with_rows(ATTENTION_QKV, _OF_HEADS)
