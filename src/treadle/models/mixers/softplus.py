"""Attention whose gate needs a matrix of its own: a softplus of as many values as attention gives,
or of one for each head (Laguna), or the sigmoid of one for each head (Step 3.5).
"""

from __future__ import annotations

from dataclasses import replace

from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import TensorRow

_OTHERS = tuple(row for row in ATTENTION.rows if row.name != "attn_gate.weight")
SOFTPLUS = replace(ATTENTION, rows=(*_OTHERS, TensorRow("attn_gate.weight", ("n_attn", "n_embd"))))
SOFTPLUS_HEADS = replace(
    ATTENTION, rows=(*_OTHERS, TensorRow("attn_gate.weight", ("n_head", "n_embd")))
)
SIGMOID_HEADS = SOFTPLUS_HEADS
