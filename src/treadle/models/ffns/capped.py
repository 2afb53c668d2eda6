"""Experts whose router scores may have a softcap, alone or in parallel to a dense FFN (Grok)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns import DENSE_EXPERTS
from treadle.models.ffns.experts import EXPERTS
from treadle.models.ffns.gated import GATED, feed

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sizes


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``experts(h)``, the weighted sum of each token's experts in layer ``i``; in layers of
    the kind DENSE_EXPERTS, ``(experts(h) + ffn(h)) / sqrt(2)`` with a dense FFN.
    """
    at = f"L{i}.ffn"
    layer = g.config.layers[i]
    assert layer.experts is not None
    scores = g.linear(f"{at}.router", h, f"blk.{i}.ffn_gate_inp")
    if cap := layer.experts.cap:
        scores = g.call("capped", f"{at}.router_cap", scores, cap=cap)
    if layer.ffn != DENSE_EXPERTS:
        return g.call("experts", at, h, scores, layer=i)
    dense = feed(g, i, h, f"{at}.dense")
    made = g.call("experts", at, h, scores, dense, layer=i)
    return g.call("multiplied", f"{at}.scale", made, gain=math.sqrt(0.5))


def _sizes(layer: Layer) -> Sizes:
    return {**GATED.sizes(layer), **EXPERTS.sizes(layer)}


_ROWS = tuple(row for row in EXPERTS.rows if "shexp" not in row.name)
_SAME = {row.name for row in _ROWS}
_MORE = tuple(row for row in GATED.rows if row.name not in _SAME)
EXPERTS_CAPPED = replace(EXPERTS, build=build, rows=_ROWS)
EXPERTS_DENSE = replace(EXPERTS, build=build, rows=(*_ROWS, *_MORE), sizes=_sizes)
