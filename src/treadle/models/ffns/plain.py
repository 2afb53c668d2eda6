"""FFN without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.gated import DOWN_AND_NORMS, GATED, NORMS_BEFORE
from treadle.models.structure import with_bias

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``down(act(up(h)))``, with the matrices of layer ``i``."""
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    fn = g.config.arch.activation
    h = g.activate(f"{at}.{fn}", g.linear(f"{at}.up", h, f"{blk}_up"), fn)
    return g.linear(f"{at}.down", h, f"{blk}_down")


PLAIN = replace(
    GATED,
    build=build,
    rows=(
        *NORMS_BEFORE,
        *with_bias("ffn_up", "n_ff", "n_embd"),
        *DOWN_AND_NORMS,
    ),
)
