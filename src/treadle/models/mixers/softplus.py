"""Attention with a required matrix for its gate: softplus of a value per output element or per head
(Laguna), or sigmoid of a value per head (Step 3.5, LFM 3, Spark X2.5).
"""

from __future__ import annotations

from dataclasses import replace

from treadle.models.mixers.attention import ATTENTION, ATTENTION_QKV
from treadle.models.structure import TensorRow

_OTHERS = tuple(row for row in ATTENTION.rows if row.name != "attn_gate.weight")
SOFTPLUS = replace(ATTENTION, rows=(*_OTHERS, TensorRow("attn_gate.weight", ("n_attn", "n_embd"))))
SOFTPLUS_HEADS = replace(
    ATTENTION, rows=(*_OTHERS, TensorRow("attn_gate.weight", ("n_head", "n_embd")))
)
SIGMOID_HEADS = SOFTPLUS_HEADS
SIGMOID_FUSED = replace(
    ATTENTION_QKV,
    rows=(
        *(row for row in ATTENTION_QKV.rows if row.name != "attn_gate.weight"),
        TensorRow("attn_gate.weight", ("n_head", "n_embd")),
    ),
)
