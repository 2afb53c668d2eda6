"""Matrix products, ``y[N, M] = x[N, K] W[M, K]^T (+ bias) (+ residual)``: what gemm and gemv share.

W may be several tensors of one format (q, k, v; gate, up): *segments*, each with its own columns of
y. ``tokens`` is the number of tokens an item handles (a multiple of the tile's), so that few rows
and many cores still make many items. Strides and columns count f32 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.formats import Format, by_name
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32
from treadle.kernels.act import BLOCK, Act
from treadle.kernels.blocks import At, WeightRows
from treadle.kernels.spec import Args, Frame, Spec
from treadle.record import dataclass

COLUMNS = 128  # f32 columns of y are padded to this, so that no tile needs a mask at its edge


@dataclass(frozen=True)
class Matmul(Spec):
    """The fields that every matrix product has, and its arguments."""

    args = Args("x:in residual:in? y:out stride tokens", each="w:tensor bias:const? rows column")
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
    def needs(self) -> set[str]:
        return self.args.required | {name for name in ("bias", "residual") if getattr(self, name)}

    @property
    def count(self) -> str:
        return "n_outputs" if self.outputs else "n_tokens"

    def layout(self) -> Act:
        """How this kernel wants its activations."""
        raise NotImplementedError

    @property
    def product(self) -> Matmul:
        """The gemm or gemv that it is, or is made of."""
        return self

    @property
    def sub(self) -> int:
        """Codes that share scale and minimum."""
        return self.fmt.codes.sum_sub if self.fmt.codes else BLOCK

    def rows_per_item(self, lanes: int) -> int:
        raise NotImplementedError

    def strips(self, heights: Sequence[int], lanes: int) -> int:
        """Items of a chunk of tokens, for segments of these heights."""
        rows = self.rows_per_item(lanes)
        return sum(-(-height // rows) for height in heights)

    def weights_ref(self, w: Sequence[Any], rows: int) -> np.ndarray:
        """A segment's weights, float64 ``[M, K]``."""
        return self.fmt.dequantize_rows(self.fmt.join(w).reshape(rows, -1)).astype(np.float64)

    def products_ref(self, args: Any, run: Any) -> list[np.ndarray]:
        """Each segment's product, ``[N, M]``."""
        x = self.layout().read_ref(args.x, int(run[self.count]))
        segments = zip(args.w, args.rows, strict=True)
        return [x @ self.weights_ref(w, rows).T for w, rows in segments]

    def run_ref(self, args: Any, run: Any) -> None:
        for i, out in enumerate(self.products_ref(args, run)):
            n, m = out.shape
            here = slice(n), slice(args.column[i], args.column[i] + m)
            if self.bias:
                out += args.bias[i][:m]
            if self.residual:
                out += args.residual.reshape(-1, args.stride)[here]
            args.y.reshape(-1, args.stride)[here] = out


@dataclass
class Segment:
    """One item's rows of a tensor, their biases, and where the tensor's columns begin."""

    rows: WeightRows
    bias: Val | None
    column: Val


def pick_segment(k: Builder, frame: Frame, spec: Matmul, item: Val, rows: int) -> Segment:
    """The segment and row that ``item`` (counted in strips of ``rows`` over all segments) falls
    on.
    """
    chosen: list[Val] = []
    first = item * rows
    for s in range(spec.segments):
        m = frame.each("rows", s)
        values = [*frame.each("w", s), frame.each("bias", s), m, frame.each("column", s)]
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
    source = WeightRows(At(spec.fmt, tuple(parts)), here, m, spec.k)
    return Segment(source, bias if spec.bias else None, column)


def add_bias(k: Builder, seg: Segment, row: Val, lanes: int) -> Val | None:
    """The bias of ``lanes`` rows from ``row`` on; bias vectors are padded, so whole vectors may be
    read.
    """
    return k.load(seg.bias, f32 * lanes, offset=row * 4) if seg.bias is not None else None
