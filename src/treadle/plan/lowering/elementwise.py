"""Ops that change rows value by value: clamps, factors, xIELU, AltUp, LAuReL, sparse gates, and
embeddings beside hidden states.

A model needs few of these ops, so each imports its own kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.kernels.activation_layout import BLOCK, ActivationLayout
from treadle.kernels.elementwise.elementwise import Embed, Pack
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.spec import Grid, Spec
from treadle.plan.lowering.deferred import Floats, StepOutput

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.plan import Buffer

# -- clamps ---------------------------------------------------------------------------------------


def clamped(ops: PlanOps, label: str, x: Rows, *, limit: float) -> Rows:
    """Clamp ``x`` to between ``-limit`` and ``limit``, in place."""
    from treadle.kernels.elementwise.clamp import Clamp

    rows, column = ops.place(x)
    stride = rows.row_bytes // 4
    spec = Clamp(x.width, limit)
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return Floats(label, x.width, rows, column)


def capped(ops: PlanOps, label: str, x: Rows, *, cap: float) -> Rows:
    """Replace ``x`` by ``cap * tanh(x / cap)``, in place."""
    from treadle.kernels.elementwise.softcap import Softcap

    rows = ops.floats(x)
    spec = Softcap(x.width, cap, outputs=False)
    grid = Grid(spec.pieces, spec.count)
    ops.steps.emit(label, spec, grid, y=rows, stride=rows.row_bytes // 4)
    return Floats(label, x.width, rows)


# -- factors per token or head --------------------------------------------------------------------


def tempered(ops: PlanOps, label: str, x: Rows, *, table: int) -> Rows:
    """Multiply each token's row of ``x``, in place, by the cosine that rope table number ``table``
    has for the token; such a table only scales queries and rotates nothing.
    """
    from treadle.kernels.elementwise.scale import Temper

    rows, column = ops.place(x)
    spec = Temper(x.width, table)
    stride = rows.row_bytes // 4
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return x


def multiplied(ops: PlanOps, label: str, x: Rows, *, gain: float) -> Rows:
    """Multiply ``x`` by ``gain`` in place."""
    from treadle.kernels.elementwise.scale import ScaleColumns

    rows, column = ops.place(x)
    spec = ScaleColumns(x.width, gain)
    stride = rows.row_bytes // 4
    ops.steps.emit(label, spec, Grid(1, "n_tokens"), x=rows, stride=stride, column=column)
    return Floats(label, x.width, rows, column)


def normed_heads(ops: PlanOps, label: str, x: Rows, *, heads: int, gains: str = "") -> Rows:
    """Replace each of ``heads`` equal parts of ``x`` by its RMS norm, without weights. ``gains``: a
    tensor with a factor for each part, or "".
    """
    from treadle.kernels.elementwise.column_norm import ColumnNorm
    from treadle.kernels.recurrent.gates import UnitHeads

    rows, column = ops.place(x)
    k = x.width // heads
    grid = Grid(heads, "n_tokens")
    given: dict[str, Any] = {"x": rows, "stride": rows.row_bytes // 4, "column": column}
    spec: Spec = UnitHeads(k, heads, math.sqrt(k), k * ops.config.norm_eps)
    if gains:
        weights = ops.steps.weights
        each = weights.tensor(gains).dequantize().ravel().repeat(k)
        given["w"] = weights.numbers(f"{gains} x {k}", np.pad(each, (0, COLUMNS)))
        ops.steps.plan.tensors_used.add(gains)
        spec = ColumnNorm(k, ops.config.norm_eps, heads, own=True)
    ops.steps.emit(label, spec, grid, **given)
    return x


def normed_times(ops: PlanOps, label: str, x: Rows, *, factor: str) -> Rows:
    """Return the RMS norm of ``x``, without weights, times the only value of the tensor
    ``factor``.
    """
    (value,) = ops.steps.weights.tensor(factor).dequantize().ravel().tolist()
    ops.steps.plan.tensors_used.add(factor)
    return ops.norm(label, x, "", scale=value)


def weighed(ops: PlanOps, label: str, x: Rows, scores: Rows) -> Rows:
    """Return ``x`` times the sigmoid of the largest of each token's ``scores``."""
    from treadle.kernels.elementwise.scale import ScaleByExpert

    rows = ops.floats(x)
    of = ops.floats(scores)
    out = ops.steps.floats(label, x.width)
    ops.steps.emit(
        label,
        ScaleByExpert(x.width, scores.width),
        Grid(1, "n_tokens"),
        x=rows,
        scores=of,
        out=out,
        stride=rows.row_bytes // 4,
        scores_stride=of.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)


# -- xIELU ----------------------------------------------------------------------------------------

# most parts of a row; a part is a multiple of _VECTOR values
_PARTS = 16
_VECTOR = 16


def xielu(ops: PlanOps, label: str, x: Rows, *, layer: int) -> Rows:
    """Apply xIELU to each value in place, with the layer's parameters."""
    from treadle.kernels.elementwise.xielu import Xielu

    steps = ops.steps
    rows = ops.floats(x)
    groups = gcd(x.width // _VECTOR, _PARTS) if x.width % _VECTOR == 0 else 1
    steps.emit(
        label,
        Xielu(x.width, groups),
        Grid(groups, "n_tokens"),
        x=rows,
        w=steps.weights.numbers(f"{label}:f32", ops.config.layers[layer].curve),
        stride=rows.row_bytes // 4,
    )
    return Floats(label, x.width, rows)


# -- embeddings next to hidden states (multi-token prediction) ------------------------------------


def embedded_beside(
    ops: PlanOps, label: str, x: Rows, *, weight: str, scale: float, norms: tuple[str, str]
) -> Rows:
    """Write the tokens' embeddings (table ``weight``), times ``scale``, into the first half of the
    rows of ``x``, and norm each half in place with the weights named in ``norms``.
    """
    rows = ops.floats(x)
    width = x.width // 2
    _embed(ops, label, rows, weight, scale, width)
    for i, norm in enumerate(norms):
        _norm_columns(ops, label, norm, rows, i * width, width)
    return Floats(label, x.width, rows)


def embedded_before(
    ops: PlanOps, label: str, x: Rows, *, weight: str, norms: tuple[str, str]
) -> Rows:
    """Return the tokens' embeddings (table ``weight``) and ``x`` side by side, f32 ``[N, 2 *
    width]``, each normed with the weights that ``norms`` names for it.
    """
    both = concatenated(ops, f"{label}.states", x, at=1, n=2)
    rows = ops.floats(both)
    _embed(ops, label, rows, weight, 1.0, x.width)
    for i, norm in enumerate(norms):
        _norm_columns(ops, label, norm, rows, i * x.width, x.width)
    return both


def concatenated(
    ops: PlanOps, label: str, x: Rows, parts: Rows | None = None, *, at: int, n: int
) -> Rows:
    """Copy ``x`` into part ``at`` of rows of ``n`` parts that have its width, f32
    ``[N, n * width]``, and return these: ``parts``, or new ones whose other parts are undefined.
    """
    rows, column = ops.place(x)
    out = ops.steps.floats(label, n * x.width) if parts is None else ops.floats(parts)
    _copy_columns(ops, label, rows, column, out, at * x.width, x.width)
    return Floats(label, n * x.width, out)


def projected_streams(
    ops: PlanOps,
    label: str,
    x: Rows,
    *,
    n: int,
    embd: str,
    norms: tuple[str, str],
    weight: str,
) -> Rows:
    """Return ``n`` streams, f32 ``[N, n * n_embd]``. Each is the matrix ``weight`` times two
    vectors side by side, the token's embedding and that stream of ``x``, which are normed with the
    weights named in ``norms``. ``embd``: the stem of the embeddings. The matrix is read once for
    all streams.
    """
    steps = ops.steps
    width = x.width // n
    given, column = ops.place(x)
    rows = steps.floats(f"{label}.rows", 2 * width, per=n)
    pitch = rows.row_bytes // 4 // n
    _embed(ops, label, rows, embd, 1.0, width)
    _norm_columns(ops, label, norms[0], rows, 0, width)
    for s in range(n):
        at = s * pitch
        stream = f"{label}.{s}"
        if s:
            _copy_columns(ops, f"{stream}.embd", rows, 0, rows, at, width)
        first = column + s * width
        _copy_columns(ops, f"{stream}.states", given, first, rows, at + width, width)
        _norm_columns(ops, stream, norms[1], rows, at + width, width)
    more = {"bias": steps.has(f"{weight}.bias"), "factor": steps.has_factor(weight)}
    spec = steps.matmul(weight, 2 * width, per=n, **more)
    act = spec.layout()
    packed = steps.activations(f"{weight}.pack", act, per=n)
    pack = Pack("copy", act.kind, act.k, act.group, act.sub, per=n, unit=act.unit)
    one = act.grid(pack.slices, "n_tokens")  # of one row per token
    grid = replace(one, base=n * one.base) if act.group % n else replace(one, per=one.per // n)
    steps.emit(f"{weight}.pack", pack, grid, x=rows, out=packed, stride=pitch, up=0)
    y = steps.floats(weight, width, per=n)
    steps.multiply(weight, spec, [weight], [width], [0], packed, y)
    own = y.row_bytes // 4 // n
    if own == width:
        return Floats(weight, n * width, y)
    streams: list[Rows] = []  # the rows of all streams, after each of these was added
    for s in range(n):
        part = Floats(weight, width, y, s * own)
        label_of = f"{label}.{s}.stream"
        streams.append(concatenated(ops, label_of, part, *streams[-1:], at=s, n=n))
    return streams[-1]


def _copy_columns(
    ops: PlanOps, label: str, x: Buffer, column: int, out: Buffer, to: int, width: int
) -> None:
    """Copy ``width`` columns of ``x``, from ``column`` on, to ``out`` from column ``to`` on."""
    from treadle.kernels.elementwise.altup import CopyColumns

    ops.steps.emit(
        label,
        CopyColumns(width),
        Grid(1, "n_tokens"),
        x=x,
        out=out,
        stride=x.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
        to=to,
    )


def _embed(ops: PlanOps, label: str, rows: Buffer, weight: str, scale: float, width: int) -> None:
    """Write the tokens' embeddings from the table ``weight``, times ``scale``, into the first
    ``width`` columns of ``rows``.
    """
    steps = ops.steps
    name = f"{weight}.weight"
    steps.emit(
        f"{label}.embd",
        Embed(steps.weights.format(name).name, width, scale),
        Grid(1, "n_tokens"),
        w=steps.weight(name),
        x=rows,
        stride=rows.row_bytes // 4,
        **steps.row_of(name),
        shape=(width,),
    )


def _norm_columns(
    ops: PlanOps, label: str, norm: str, rows: Buffer, column: int, width: int
) -> None:
    """Norm ``width`` columns of ``rows``, from ``column`` on, in place; ``norm``: stem of the
    weights.
    """
    from treadle.kernels.elementwise.column_norm import ColumnNorm

    ops.steps.emit(
        f"{label}.{norm.rpartition('.')[2]}",
        ColumnNorm(width, ops.config.norm_eps),
        Grid(1, "n_tokens"),
        x=rows,
        w=ops.steps.vector(f"{norm}.weight"),
        stride=rows.row_bytes // 4,
        column=column,
    )


# -- residual streams and sparse gates ------------------------------------------------------------

FEW = 8  # tokens: up to so many, rows are split to give several threads work
SLICES = 4


def spread(ops: PlanOps, label: str, x: Rows, y: Rows) -> Rows:
    """Return AltUp's streams, ``x`` and the parts of ``y`` side by side; each part of ``y`` is as
    wide as ``x`` and is rescaled to the magnitude of ``x``.
    """
    from treadle.kernels.elementwise.altup import SpreadStreams

    steps = ops.steps
    rows = ops.floats(x)
    (others, column) = ops.place(y)
    out = steps.floats(label, x.width + y.width)
    steps.emit(
        label,
        SpreadStreams(x.width, 1 + y.width // x.width),
        Grid(1, "n_tokens"),
        x=rows,
        y=others,
        out=out,
        stride=rows.row_bytes // 4,
        y_stride=others.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
    )
    return Floats(label, x.width + y.width, out)


def take(ops: PlanOps, label: str, x: Rows, *, first: int, n: int) -> Rows:
    """Return a copy of ``n`` columns of ``x``, from ``first`` on, in a buffer of its own."""
    from treadle.kernels.elementwise.altup import CopyColumns

    steps = ops.steps
    (rows, column) = ops.place(x)
    out = steps.floats(label, n)
    steps.emit(
        label,
        CopyColumns(n),
        Grid(1, "n_tokens"),
        x=rows,
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column + first,
        to=0,
    )
    return Floats(label, n, out)


def join(ops: PlanOps, label: str, x: Rows, y: Rows, total: Rows | None = None, *, n: int) -> Rows:
    """Return ``total + y / n``, with the stream ``y`` rescaled to the magnitude of ``x``.
    ``total``: the sum over earlier streams; None for the first one: ``x / n``. ``n``: number of
    streams.
    """
    from treadle.kernels.elementwise.altup import Join

    steps = ops.steps
    rows = ops.floats(x)
    out = steps.floats(label, y.width)
    steps.emit(
        label,
        Join(y.width, n, first=total is None),
        Grid(1, "n_tokens"),
        x=rows,
        y=ops.floats(y),
        total=None if total is None else ops.floats(total),
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, y.width, out)


def predict(ops: PlanOps, label: str, x: Rows, *, n: int, router: str, coef: str) -> Rows:
    """Return AltUp's predictions of ``n`` streams, each a combination of all streams ``x [N, n *
    n_embd]``. ``router``, ``coef``: stems of the tensors that make the coefficients.
    """
    from treadle.kernels.elementwise.altup import Predict

    steps = ops.steps
    rows = ops.floats(x)
    width = x.width // n
    slices = _slices(ops, width)
    out = steps.floats(label, x.width)
    steps.emit(
        label,
        Predict(width, n, ops.config.norm_eps, slices),
        Grid(slices, "n_tokens"),
        x=rows,
        out=out,
        norm=steps.vector(f"{router}_norm.weight"),
        router=steps.vector(f"{router}.weight"),
        coef=steps.vector(f"{coef}.weight"),
        stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)


def correct(
    ops: PlanOps, label: str, x: Rows, y: Rows, *, n: int, router: str, coef: str, scale: str
) -> Rows:
    """Correct AltUp's ``n`` predicted streams ``x`` in place: the layer's result ``y`` for the
    first stream differs from its prediction, and each stream gets a share of the difference. Return
    the first stream times the vector ``scale``. ``router``, ``coef``: as in ``predict``.
    """
    from treadle.kernels.elementwise.altup import Correct

    steps = ops.steps
    rows = ops.floats(x)
    others = ops.floats(y)
    slices = _slices(ops, y.width)
    out = steps.floats(label, y.width)
    steps.emit(
        label,
        Correct(y.width, n, ops.config.norm_eps, slices),
        Grid(slices, "n_tokens"),
        x=rows,
        y=others,
        out=out,
        norm=steps.vector(f"{router}_norm.weight"),
        router=steps.vector(f"{router}.weight"),
        coef=steps.vector(f"{coef}.weight"),
        scale=steps.vector(f"{scale}.weight"),
        stride=rows.row_bytes // 4,
        y_stride=others.row_bytes // 4,
    )
    return Floats(label, y.width, out)


def add_beside(ops: PlanOps, label: str, x: Rows, y: Rows, *, weight: str) -> Rows:
    """Add the RMS norm of ``y``, with weights ``weight``, to all streams of ``x`` but the first, in
    place.
    """
    from treadle.kernels.elementwise.altup import AddBeside

    steps = ops.steps
    rows = ops.floats(x)
    others = ops.floats(y)
    slices = _slices(ops, y.width)
    steps.emit(
        label,
        AddBeside(y.width, x.width // y.width, ops.config.norm_eps, slices),
        Grid(slices, "n_tokens"),
        x=rows,
        y=others,
        w=steps.vector(f"{weight}.weight"),
        stride=rows.row_bytes // 4,
        y_stride=others.row_bytes // 4,
    )
    return Floats(label, x.width, rows)


def laurel(
    ops: PlanOps,
    label: str,
    x: Rows,
    a: Rows,
    b: Rows,
    *,
    norms: tuple[str, str, str],
    scale: float,
) -> Rows:
    """Return ``scale * (x + norm(x) + norm(a) + norm(b))``; ``norms``: the names of the weights of
    the three norms, in this order.
    """
    from treadle.kernels.elementwise.altup import Laurel

    steps = ops.steps
    rows = [ops.floats(each) for each in (x, a, b)]
    slices = _slices(ops, x.width)
    out = steps.floats(label, x.width)
    w_x, w_a, w_b = (steps.vector(f"{name}.weight") for name in norms)
    steps.emit(
        label,
        Laurel(x.width, ops.config.norm_eps, scale, slices),
        Grid(slices, "n_tokens"),
        x=rows[0],
        a=rows[1],
        b=rows[2],
        out=out,
        w_x=w_x,
        w_a=w_a,
        w_b=w_b,
        stride=rows[0].row_bytes // 4,
        out_stride=out.row_bytes // 4,
    )
    return Floats(label, x.width, out)


def sparse_gate(ops: PlanOps, label: str, gate: Rows, up: Rows, *, fn: str, cut: float) -> Rows:
    """Return ``fn(max(0, gate - c)) * up``; c is the row's mean plus ``cut`` standard deviations.

    It is written in the layout of the next product. ``gate`` and ``up`` must be products of one
    input.
    """
    from treadle.kernels.elementwise.sparse_gate import SparseGate

    steps = ops.steps

    def make(act: ActivationLayout) -> Buffer:
        rows = ops.floats(gate)
        (others, column) = ops.place(up)
        assert others is rows, label
        out = steps.activations(label, act)
        whole = steps.plan.n_tokens > FEW
        more = {"sub": act.sub, "unit": act.unit}
        spec = SparseGate(fn, act.kind, act.k, act.group, cut, **more, whole=whole)
        grid = act.grid(spec.slices, "n_tokens")
        stride = rows.row_bytes // 4
        steps.emit(label, spec, grid, x=rows, out=out, stride=stride, up=column)
        return out

    return StepOutput(label, gate.width, make)


def _slices(ops: PlanOps, width: int) -> int:
    """Return the number of slices that a token's row of ``width`` values is split into, so that
    several threads have work.
    """
    few = ops.steps.plan.n_tokens <= FEW
    return SLICES if few and not width % (SLICES * BLOCK) else 1
