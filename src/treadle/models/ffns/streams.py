"""Gemma 3n's AltUp (several streams of hidden states, of which each layer computes the first and
corrects the others) and LAuReL (a low-rank product in parallel to the mixer).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from treadle.models.ops import TensorSlice
from treadle.models.structure import Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def predicted(g: Ops, i: int, x: Rows) -> Rows:
    """Return AltUp's prediction of the streams after layer ``i``, f32
    ``[N, n_streams * n_embd]``: each is a combination of all streams ``x`` before the layer, in
    that shape, by coefficients computed for the token.
    """
    at = f"blk.{i}.altup"
    n = g.config.n_streams
    more = {"router": f"{at}_router", "coef": f"{at}_predict_coef"}
    return g.call("predict", f"L{i}.altup.predict", x, n=n, **more)


def corrected(g: Ops, i: int, x: Rows, y: Rows) -> Rows:
    """Correct the predicted streams ``x``, f32 ``[N, n_streams * n_embd]``, in place: to each the
    difference of layer ``i``'s result ``y``, f32 ``[N, n_embd]``, and the first stream is added,
    times a coefficient. Return the corrected first stream times the weights ``correct_scale``.
    """
    at = f"blk.{i}.altup"
    n = g.config.n_streams
    more = {"router": f"{at}_router", "coef": f"{at}_correct_coef", "scale": f"{at}_correct_scale"}
    return g.call("correct", f"L{i}.altup.correct", x, y, n=n, **more)


def low_rank(g: Ops, i: int, h: Rows) -> Rows:
    """Return LAuReL's low-rank product ``right(left(h))``, with two matrices of layer ``i``."""
    h = g.linear(f"L{i}.laurel.left", h, f"blk.{i}.laurel_l")
    return g.linear(f"L{i}.laurel.right", h, f"blk.{i}.laurel_r")


def spread(g: Ops, x: Rows) -> Rows:
    """Return the initial streams, f32 ``[N, n_streams * n_embd]``: the embeddings ``x``, and
    projections of them scaled to the magnitude of ``x``.
    """
    return g.call("spread", "altup.spread", x, g.linear("altup.proj", x, "altup_proj"))


def joined(g: Ops, x: Rows) -> Rows:
    """Return f32 ``[N, n_embd]``: the mean of the first of the streams ``x`` and of projections of
    the others, which are scaled to its magnitude.
    """
    n = g.config.n_streams
    width = g.config.n_embd
    total = None
    first = g.columns(x, 0, width)
    for i in range(1, n):
        h = g.call("take", f"altup.take{i}", x, first=i * width, n=width)
        h = g.linear(
            f"altup.unembd{i}", h, TensorSlice("altup_unembd_proj", (i - 1) * width, width)
        )
        rows = (first, h) if total is None else (first, h, total)
        total = g.call("join", f"altup.join{i}", *rows, n=n)
    assert total is not None
    return total


HALF = math.sqrt(0.5)
ALTUP = Sublayer(
    label="altup",
    before="altup_router_norm",
    after="",
    after_sum="",
    build=predicted,
    rows=(
        TensorRow("altup_router.weight", ("n_streams", "n_embd")),
        TensorRow("altup_router_norm.weight", ("n_embd",)),
        TensorRow("altup_predict_coef.weight", ("n_pairs", "n_streams")),
        TensorRow("altup_correct_coef.weight", ("n_streams", "n_streams")),
        TensorRow("altup_correct_scale.weight", ("n_embd",)),
    ),
    sizes=lambda layer: {},
)
LAUREL = Sublayer(
    label="laurel",
    before="",
    after="laurel_post_norm",
    after_sum="",
    build=low_rank,
    rows=(
        TensorRow("laurel_l.weight", ("n_laurel", "n_embd")),
        TensorRow("laurel_r.weight", ("n_embd", "n_laurel")),
        TensorRow("laurel_post_norm.weight", ("n_embd",)),
    ),
    sizes=lambda layer: {},
)
