"""Gated FFN with a sparse gate, of which most values are 0 (Gemma 3n's first layers)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.gated import GATED

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``down(act(relu(gate(h) - c)) * up(h))``; c is the mean of the token's gate values in
    layer ``i`` plus ``Layer.cut`` of their standard deviations.
    """
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    fn = g.config.arch.activation
    gate, up = g.linears(f"{at}.gate_up", h, [f"{blk}_gate", f"{blk}_up"])
    h = g.call("sparse_gate", f"{at}.{fn}", gate, up, fn=fn, cut=g.config.layers[i].cut)
    return g.linear(f"{at}.down", h, f"{blk}_down")


SPARSE = "gated_sparse"
GATED_SPARSE = replace(GATED, build=build)
