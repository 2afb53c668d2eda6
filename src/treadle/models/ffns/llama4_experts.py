"""Experts of Llama 4: one per token; the sigmoid of its score scales its input, not its output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import EXPERTS, shared_expert

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``expert(h * sigmoid(score)) + shared(h)``: ``expert`` is the one expert that the
    router chooses for a token in layer ``i``, ``score`` its score, ``shared`` the shared expert.
    """
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    scores = g.linear(f"{at}.router", h, f"{blk}_gate_inp")
    shared = shared_expert(g, i, f"{at}.shared", h) if g.has(f"{blk}_up_shexp.weight") else []
    x = g.call("weighed", f"{at}.weighed", h, scores)
    return g.call("experts", at, x, scores, *shared, layer=i)


EXPERTS_WEIGHED = replace(EXPERTS, build=build)
