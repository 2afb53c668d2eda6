"""Base of the matrix products, gemm and gemv: ``y[N, M] = x[N, K] W[M, K]^T (* factor) (+ bias) (+
residual)``.

W may be several tensors of one format (q, k, v; gate, up): *segments*, each with its own columns of
y. With ``experts`` each tensor holds a matrix for each expert, ``pitch`` rows apart, and a row of x
is multiplied by one of them. A ``factor`` is one number a tensor; for experts, one an expert. With
``heads`` there is a matrix for each head. Each is multiplied by its own rows of x, ``x_pitch``
bytes from one head's to the next one's, into its own columns, ``y_pitch`` from one head's to the
next one's.

``tokens`` is the number of tokens an item handles (a multiple of the tile's), so that few rows and
many cores still make many items. Strides and columns count f32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import Format, by_name
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32
from treadle.kernels.activation_layout import BLOCK, ActivationLayout
from treadle.kernels.format_blocks import BlockAddress, WeightRows
from treadle.kernels.spec import Args, Frame, Spec, f32_values, load_record

# Adjacent rows for one expert. ``tiles`` is their count, i64, then these records; a gemv's
# ``tiles`` are the experts of its rows, i32.
TILE = np.dtype([(name, "i8") for name in ("expert", "first", "n")])
BY_HEAD = {"pitch", "x_pitch", "y_pitch"}
# Arguments.
ONCE = "x:in residual:in? y:out stride tokens tiles:in? x_pitch:? y_pitch:?"
EACH = "w:tensor bias:const? factor:const? rows column pitch:?"


def tiles_of(raw: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the expert of each TILE record and the numbers of its rows. ``raw``, i64: the number of
    records, then the records.
    """
    for expert, first, n in raw[1 : 1 + 3 * int(raw[0])].reshape(-1, 3).tolist():
        yield expert, np.arange(first, first + n)


@dataclass(frozen=True)
class Matmul(Spec):
    """Base of the matrix products: their common fields, arguments and numpy twin."""

    args = Args(ONCE, EACH)
    w: str  # weight format
    act: str  # activation kind
    k: int
    mr: int  # gemm: vectors of rows in a tile; gemv: rows
    nr: int  # tokens
    segments: int = 1
    bias: bool = False
    factor: bool = False  # multiplies W's products: scales of NVFP4 are too coarse without one
    residual: bool = False
    outputs: bool = False  # rows are the run's outputs, not its tokens
    experts: int = 0  # experts a token; ``tiles`` assigns rows to experts
    heads: int = 0  # each with its own rows of x and columns of y
    per: int = 1  # rows of x and y for each token or output

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    @property
    def needs(self) -> set[str]:
        given = {name for name in ("bias", "factor", "residual") if getattr(self, name)}
        given |= {"tiles", "pitch"} if self.experts else set()
        return self.args.required | given | (BY_HEAD if self.heads else set())

    @property
    def compile_ms(self) -> float:
        return 50.0 + 2.5 * self.mr * self.nr

    @property
    def count(self) -> str:
        return "n_outputs" if self.outputs else "n_tokens"

    def n_rows(self, frame: Frame) -> Val:
        """Return the number of a run's rows of x, i64."""
        n = frame.run(self.count)
        return n * self.per if self.per > 1 else n

    def layout(self) -> ActivationLayout:
        """Return the layout of the activations x that this kernel reads."""
        raise NotImplementedError

    @property
    def product(self) -> Matmul:
        """The gemm or gemv that this kernel is built on: itself, except for ``Gated``."""
        return self

    @property
    def sub(self) -> int:
        """Number of consecutive weights that share a minimum, or a scale in formats without
        minimums. As many activations share a compensation (``ActivationLayout``).
        """
        return self.fmt.codes.sum_sub if self.fmt.codes else BLOCK

    def rows_per_item(self, lanes: int) -> int:
        raise NotImplementedError

    def strips(self, heights: Sequence[int], lanes: int) -> int:
        """Return the number of items for one chunk of tokens, for segments of ``heights`` rows."""
        rows = self.rows_per_item(lanes)
        return sum(-(-height // rows) for height in heights)

    def weights_ref(self, w: Sequence[Any], rows: int) -> np.ndarray:
        """Return a segment's weights, float64 ``[rows, K]``. ``w``: the arrays of its tensor in the
        file's format.
        """
        return self.fmt.dequantize_rows(self.fmt.join(w).reshape(rows, -1)).astype(np.float64)

    def left_out_ref(self, source: Any, rows: np.ndarray, w: Sequence[Any], m: int) -> Any:
        """Return the part of a segment's products that this kernel leaves out by design,
        ``[N, m]``; 0.0 for most kernels. ``source``: a buffer of activations; ``rows``: its rows
        that are multiplied; ``w``: the segment's arrays, of ``m`` rows.
        """
        return 0.0

    def met_ref(self, args: Any, run: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return what is multiplied as (expert or head, numbers of rows of x, numbers of rows of
        y): an entry for each tile of an expert, or for each head; without both, one entry with
        number 0.
        """
        if not self.experts:
            rows = np.arange(int(run[self.count]) * self.per)
            return [(head, rows, rows) for head in range(max(1, self.heads))]
        return [(e, rows, rows) for e, rows in tiles_of(args.tiles)]

    def products_ref(self, args: Any, run: Any) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Return, for each entry of ``met_ref``, the numbers of its rows of y, and each segment's
        products ``[rows, M]`` with factor and bias.
        """
        result = []
        for expert, rows, to in self.met_ref(args, run):
            source = args.x[expert * args.x_pitch :] if self.heads else args.x
            x = self.layout().read_ref(source, int(rows[-1]) + 1 if len(rows) else 0)[rows]
            parts = []
            for i, m in enumerate(args.rows):
                first = expert * args.pitch[i] if expert else 0
                w = [
                    a.reshape(-1)[n * first :][: n * m]
                    for a, n in zip(args.w[i], self.fmt.row_strides(self.k), strict=True)
                ]
                part = x @ self.weights_ref(w, m).T - self.left_out_ref(source, rows, w, m)
                part = part * float(args.factor[i][expert]) if self.factor else part
                parts.append(part + args.bias[i][first : first + m] if self.bias else part)
            result.append((to, parts))
        return result

    def run_ref(self, args: Any, run: Any) -> None:
        y = args.y.reshape(-1, args.stride)
        for head, (to, parts) in enumerate(self.products_ref(args, run)):
            for column, part in zip(args.column, parts, strict=True):
                column += head * args.y_pitch if self.heads else 0
                here = to, slice(column, column + part.shape[1])
                if self.residual:
                    part = part + f32_values(args.residual).reshape(-1, args.stride)[here]
                y[here] = part


@dataclass
class Segment:
    """One item's rows of a segment, their factor and biases, and the segment's first
    column in y.
    """

    rows: WeightRows
    factor: Val | None
    bias: Val | None
    column: Val


@dataclass
class StripShare:
    """One item's work: a strip of rows, its expert or head if any, and the tokens ``start`` to
    before ``stop``. ``end``: one past the last token of the strip over all items.
    """

    strip: Val
    expert: Val | None
    start: Val
    stop: Val
    end: Val


def shares(
    k: Builder, frame: Frame, spec: Matmul, strips: Callable[[], Val]
) -> Callable[[Val], StripShare]:
    """Return the function from an item to its StripShare. Consecutive items are the chunks of
    tokens of one strip, or with experts the strips of one tile. ``strips`` emits the number of
    strips.
    """
    if spec.experts:
        n_strips = strips()

        def of_tile(item: Val) -> StripShare:
            tile = load_record(k, frame.tiles + (8 + item // n_strips * TILE.itemsize), TILE)
            stop = tile["first"] + tile["n"]
            return StripShare(item % n_strips, tile["expert"], tile["first"], stop, stop)

        return of_tile
    n_tokens = spec.n_rows(frame)
    chunk = frame.tokens
    n_chunks = (n_tokens + (chunk - 1)) // chunk
    per_head = strips() if spec.heads else n_chunks

    def of_chunk(item: Val) -> StripShare:
        start = item % n_chunks * chunk
        strip = item // n_chunks
        head = None
        if spec.heads:
            strip, head = strip % per_head, strip // per_head
        return StripShare(strip, head, start, k.min(start + chunk, n_tokens), n_tokens)

    return of_chunk


def n_strips(k: Builder, frame: Frame, spec: Matmul, rows: int) -> Val:
    """Return the number of strips of ``rows`` rows over all segments."""
    total = k.i64(0)
    for s in range(spec.segments):
        total = total + (frame.each("rows", s) + (rows - 1)) // rows
    return total


def pick_segment(
    k: Builder, frame: Frame, spec: Matmul, item: Val, rows: int, expert: Val | None = None
) -> Segment:
    """Return the Segment of strip number ``item``, counted in strips of ``rows`` rows over all
    segments, for an expert or a head if given.
    """
    chosen: list[Val] = []
    first = item * rows
    for s in range(spec.segments):
        m = frame.each("rows", s)
        values = [*frame.each("w", s), frame.each("factor", s), frame.each("bias", s)]
        values += [m, frame.each("column", s)]
        values += [frame.each("pitch", s)] if expert is not None else []
        padded = (m + (rows - 1)) // rows * rows
        if s == 0:
            chosen = values
            here = first
            passed = padded
        else:
            inside = first >= passed
            chosen = [k.select(inside, new, old) for new, old in zip(values, chosen, strict=True)]
            here = k.select(inside, first - passed, here)
            passed = passed + padded
    pitch = chosen.pop() if expert is not None else None
    *parts, factor, bias, m, column = chosen
    weights = BlockAddress(spec.fmt, tuple(parts))
    if expert is not None and pitch is not None:
        weights = weights.row(expert * pitch, spec.k)
        bias = bias + expert * pitch * 4
        factor = factor + expert * 4
    if expert is not None and spec.heads:
        column = column + expert * frame.y_pitch
    rows_of = WeightRows(weights, here, m, spec.k)
    by = k.load(factor, f32) if spec.factor else None
    return Segment(rows_of, by, bias if spec.bias else None, column)


def finish(k: Builder, seg: Segment, y: Val, row: Val, *, biased: bool = True) -> Val:
    """Return ``y``, the sums of the segment's rows from ``row`` on, times its factor, plus its bias
    if ``biased``. Bias vectors are padded, so whole vectors may be read.
    """
    if seg.factor is not None:
        y = y * (seg.factor if y.ty == f32 else k.splat(seg.factor, y.ty))
    if seg.bias is not None and biased:
        y = y + k.load(seg.bias, y.ty, offset=row * 4)
    return y
