"""FFN of Apertus: no gate, and an activation (xIELU) with parameters per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.plain import PLAIN

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``down(xielu(up(h)))``; xIELU has the parameters ``Layer.curve`` of layer ``i``."""
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    h = g.call("xielu", f"{at}.xielu", g.linear(f"{at}.up", h, f"{blk}_up"), layer=i)
    return g.linear(f"{at}.down", h, f"{blk}_down")


XIELU = replace(PLAIN, build=build)
