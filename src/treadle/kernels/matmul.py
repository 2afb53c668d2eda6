"""Matrix products, ``y[N, M] = x[N, K] W[M, K]^T (+ bias) (+ residual)``: what gemm and gemv share.

W may be several tensors of one format (q, k, v; gate, up): *segments*, each with its own columns of
y. Arguments: ``x, residual, y, y_stride, chunk`` then for each segment ``w, bias, m, y_column``;
strides and columns in f32 values. ``chunk`` is the number of tokens an item handles (a multiple of
the tile's), so that few rows and many cores still make many items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.formats import Format, by_name
from treadle.jit.types import f32
from treadle.kernels.act import BLOCK, Act
from treadle.kernels.spec import Frame, Spec

if TYPE_CHECKING:
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

X, RESIDUAL, Y, Y_STRIDE, CHUNK, SEGMENTS = range(6)
SEGMENT_SLOTS = 4  # w, bias, m, y_column
W, BIAS, ROWS, COLUMN = range(4)
COLUMNS = 64  # f32 columns of y are padded to this, so that no tile needs a mask at its edge


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
        """Codes that share a scale."""
        return self.fmt.codes.sub if self.fmt.codes else BLOCK

    def rows_per_item(self, lanes: int) -> int:
        raise NotImplementedError

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        n = int(run[self.count])
        x = self.layout().read_ref(arrays[X], n)
        y = arrays[Y].reshape(-1, arrays[Y_STRIDE])
        for s in range(self.segments):
            w, bias, m, column = arrays[SEGMENTS + SEGMENT_SLOTS * s :][:SEGMENT_SLOTS]
            weights = self.fmt.dequantize_rows(w.reshape(m, -1)).astype(np.float64)
            out = x @ weights.T
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

    weights: Val
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
        base = SEGMENTS + SEGMENT_SLOTS * s
        m = frame.int(base + ROWS)
        values = [frame.ptr(base + W), frame.ptr(base + BIAS), m, frame.int(base + COLUMN)]
        padded = (m + (rows - 1)) // rows * rows
        if s == 0:
            chosen, here = values, first
            passed = padded
        else:
            inside = first >= passed
            chosen = [k.select(inside, new, old) for new, old in zip(values, chosen, strict=True)]
            here = k.select(inside, first - passed, here)
            passed = passed + padded
    return Segment(chosen[0], chosen[1] if spec.bias else None, chosen[2], chosen[3], here)


def add_bias(k: Builder, seg: Segment, row: Val, lanes: int) -> Val | None:
    """The bias of ``lanes`` rows from ``row`` on; bias vectors are padded, so whole vectors may be
    read.
    """
    return k.load(seg.bias, f32 * lanes, offset=row * 4) if seg.bias is not None else None
