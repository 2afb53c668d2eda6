"""Matrix products, ``y[N, M] = x[N, K] W[M, K]^T (+ bias) (+ residual)``: what gemm and gemv share.

W may be several tensors of one format (q, k, v; gate, up): *segments*, each with its own columns of
y. Arguments: ``x, residual, y, y_stride, chunk`` then for each segment ``w, bias, m, y_column``,
with a ``w`` for each array that a tensor of the format has; strides and columns in f32 values.
``chunk`` is the number of tokens an item handles (a multiple of the tile's), so that few rows and
many cores still make many items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.formats import Format, by_name
from treadle.jit.types import f32
from treadle.kernels.act import BLOCK, Act
from treadle.kernels.blocks import At
from treadle.kernels.spec import Frame, Spec

if TYPE_CHECKING:
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

X, RESIDUAL, Y, Y_STRIDE, CHUNK, SEGMENTS = range(6)
W, BIAS, ROWS, COLUMN = range(4)  # of a segment; see ``Matmul.slot``
COLUMNS = 128  # f32 columns of y are padded to this, so that no tile needs a mask at its edge


@dataclass(frozen=True)
class Matmul(Spec):
    """The fields that every matrix product has."""

    w: str  # weight format
    act: str  # activation kind
    k: int
    mr: int  # gemm: vectors of rows a tile holds; gemv: rows
    nr: int  # tokens
    segments: int = 1
    bias: bool = False
    residual: bool = False
    outputs: bool = False  # rows are the run's outputs, not its tokens

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    @property
    def count(self) -> str:
        return "n_outputs" if self.outputs else "n_tokens"

    def layout(self) -> Act:
        """How this kernel wants its activations."""
        raise NotImplementedError

    @property
    def sub(self) -> int:
        """Codes that share scale and minimum."""
        return self.fmt.codes.sum_sub if self.fmt.codes else BLOCK

    @property
    def segment_slots(self) -> int:
        """Arguments of a segment."""
        return COLUMN + len(self.fmt.strides)

    def slot(self, segment: int, which: int) -> int:
        """The place of an argument of a segment: of W, that of the first array."""
        further = len(self.fmt.strides) - 1 if which > W else 0
        return SEGMENTS + self.segment_slots * segment + which + further

    def segment_args(self, segment: int) -> slice:
        """The places of all of them."""
        return slice(self.slot(segment, W), self.slot(segment + 1, W))

    def rows_per_item(self, lanes: int) -> int:
        raise NotImplementedError

    def strips(self, heights: Sequence[int], lanes: int) -> int:
        """Items of a chunk of tokens, for segments of these heights."""
        rows = self.rows_per_item(lanes)
        return sum(-(-height // rows) for height in heights)

    def weights_ref(self, arrays: Sequence[Any], segment: int) -> np.ndarray:
        """A segment's weights, float64 ``[M, K]``."""
        *parts, _, m, _ = arrays[self.segment_args(segment)]
        return self.fmt.dequantize_rows(self.fmt.join(parts).reshape(m, -1)).astype(np.float64)

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        n = int(run[self.count])
        x = self.layout().read_ref(arrays[X], n)
        y = arrays[Y].reshape(-1, arrays[Y_STRIDE])
        for s in range(self.segments):
            *_, bias, m, column = arrays[self.segment_args(s)]
            out = x @ self.weights_ref(arrays, s).T
            if self.bias:
                out += bias[:m]
            if self.residual:
                out += arrays[RESIDUAL].reshape(-1, arrays[Y_STRIDE])[:n, column : column + m]
            y[:n, column : column + m] = out


@dataclass
class Segment:
    """One item's rows: a tensor, its height, where its columns start, and which of its rows the
    item begins at.
    """

    weights: At
    bias: Val | None
    m: Val
    column: Val
    first: Val


def pick_segment(k: Builder, frame: Frame, spec: Matmul, item: Val, rows: int) -> Segment:
    """The segment and row that ``item`` (counted in strips of ``rows`` over all segments) falls
    on.
    """
    chosen: list[Val] = []
    first = item * rows
    for s in range(spec.segments):
        m = frame.int(spec.slot(s, ROWS))
        parts = [frame.ptr(spec.slot(s, W) + i) for i in range(len(spec.fmt.strides))]
        values = [*parts, frame.ptr(spec.slot(s, BIAS)), m, frame.int(spec.slot(s, COLUMN))]
        padded = (m + (rows - 1)) // rows * rows
        if s == 0:
            chosen, here = values, first
            passed = padded
        else:
            inside = first >= passed
            chosen = [k.select(inside, new, old) for new, old in zip(values, chosen, strict=True)]
            here = k.select(inside, first - passed, here)
            passed = passed + padded
    *parts, bias, m, column = chosen
    weights = At(spec.fmt, tuple(parts))
    return Segment(weights, bias if spec.bias else None, m, column, here)


def add_bias(k: Builder, seg: Segment, row: Val, lanes: int) -> Val | None:
    """The bias of ``lanes`` rows from ``row`` on; bias vectors are padded, so whole vectors may be
    read.
    """
    return k.load(seg.bias, f32 * lanes, offset=row * 4) if seg.bias is not None else None
