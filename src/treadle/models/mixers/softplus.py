"""Attention whose result is multiplied by the softplus of a gate, made of the states by a matrix of
its own: a value for each that attention gives, or one for each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.attention import ATTENTION, attended
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """``output(attention(h) * softplus(gate(h)))``."""
    at, blk = f"L{i}.attn", f"blk.{i}.attn"
    y = attended(g, i, h)
    y = g.call("softplus_gate", f"{at}.gated", y, g.linear(f"{at}.gate", h, f"{blk}_gate"))
    return g.linear(f"{at}.output", y, f"{blk}_output")


_OTHERS = tuple(row for row in ATTENTION.rows if row.name != "attn_gate.weight")
SOFTPLUS = replace(
    ATTENTION,
    build=build,
    rows=(*_OTHERS, TensorRow("attn_gate.weight", ("n_attn", "n_embd"))),
)
SOFTPLUS_HEADS = replace(
    SOFTPLUS,
    rows=(*_OTHERS, TensorRow("attn_gate.weight", ("n_head", "n_embd"))),
)
