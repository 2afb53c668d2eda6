"""Attention between two short convolutions within a drafted block (DFlash 2).

::

    c = W h                              what each token adds to the weights of both
    y = convolution(attention(convolution(h)))

Only tokens of the same block, those before, are combined: a block begins without history, and the
keys and values of the text's tokens are made without convolutions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sizes, Sublayer

SIDES = 2  # a convolution before the sublayer, and one after it


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``convolution(attention(convolution(h)))`` of layer ``i``."""
    return convolved(g, i, h, ATTENTION)


def convolved(g: Ops, i: int, h: Rows, inner: Sublayer) -> Rows:
    """Return ``convolution(inner(convolution(h)))`` of layer ``i``: the sublayer ``inner`` between
    its two convolutions.
    """
    stem = f"blk.{i}.{inner.label}_conv"
    at = f"L{i}.{inner.label}"
    delta = g.linear(f"{at}.conv_proj", h, f"{stem}_proj")
    given = {"layer": i, "weight": f"{stem}_base"}
    h = g.call("block_convolution", f"{at}.conv_in", h, delta, side=0, **given)
    y = inner.build(g, i, h)
    return g.call("block_convolution", f"{at}.conv_out", y, delta, side=1, **given)


def rows_of(inner: Sublayer) -> tuple[TensorRow, ...]:
    """Return the tensor rows of the sublayer ``inner`` and of the two convolutions around it."""
    stem = f"{inner.label}_conv"
    return (
        *inner.rows,
        TensorRow(f"{stem}_base", ("n_sides", "n_taps", "n_embd")),
        TensorRow(f"{stem}_proj.weight", ("n_deltas", "n_embd")),
    )


def sizes_of(layer: Layer) -> Sizes:
    """Return, by name, the sizes in the shapes of the convolutions' tensors (``rows_of``)."""
    taps = layer.block_taps
    assert taps is not None
    return {"n_sides": SIDES, "n_taps": taps.n, "n_deltas": taps.n_deltas}


ATTENTION_BLOCK_CONVOLVED = replace(
    ATTENTION,
    build=build,
    rows=rows_of(ATTENTION),
    sizes=lambda layer: {**ATTENTION.sizes(layer), **sizes_of(layer)},
)
