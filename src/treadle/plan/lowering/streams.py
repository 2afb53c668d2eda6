"""Ops of layers with several residual streams (AltUp, LAuReL), and of sparse gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.activation_layout import BLOCK, ActivationLayout
from treadle.kernels.elementwise.altup import (
    AddBeside,
    CopyColumns,
    Correct,
    Join,
    Laurel,
    Predict,
    SpreadStreams,
)
from treadle.kernels.elementwise.sparse_gate import SparseGate
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats, StepOutput

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps
    from treadle.plan.plan import Buffer

FEW = 8  # tokens: up to so many, rows are split to give several threads work
SLICES = 4


def spread(ops: CpuOps, label: str, x: Rows, y: Rows) -> Rows:
    """Concatenate ``x`` with the parts of ``y``, each as wide as ``x`` and rescaled to its
    magnitude.
    """
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


def take(ops: CpuOps, label: str, x: Rows, *, first: int, n: int) -> Rows:
    """Copy ``n`` values of each row, from ``first`` on, into a new buffer."""
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
    )
    return Floats(label, n, out)


def join(ops: CpuOps, label: str, x: Rows, y: Rows, total: Rows | None = None, *, n: int) -> Rows:
    """Return ``total + y / n``, with ``y`` rescaled to the magnitude of ``x``; ``total`` defaults
    to ``x / n``.
    """
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


def predict(ops: CpuOps, label: str, x: Rows, *, n: int, router: str, coef: str) -> Rows:
    """AltUp's prediction of each stream from all streams ``x``."""
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
    ops: CpuOps, label: str, x: Rows, y: Rows, *, n: int, router: str, coef: str, scale: str
) -> Rows:
    """Correct the streams ``x`` in place by the difference between ``y`` and its prediction; return
    the first stream times ``scale``.
    """
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


def add_beside(ops: CpuOps, label: str, x: Rows, y: Rows, *, weight: str) -> Rows:
    """Add the norm of ``y`` to all streams of ``x`` but the first, in place."""
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
    ops: CpuOps, label: str, x: Rows, a: Rows, b: Rows, *, norms: tuple[str, str, str], scale: float
) -> Rows:
    """Return ``scale`` times the sum of ``x`` and of the norms of ``x``, ``a`` and ``b``."""
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


def sparse_gate(ops: CpuOps, label: str, gate: Rows, up: Rows, *, fn: str, cut: float) -> Rows:
    """Return ``fn(max(0, gate - c)) * up``, c being the row's mean plus ``cut`` standard
    deviations.

    It is written in the layout of the next product. ``gate`` and ``up`` must be products of one
    input.
    """
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


def _slices(ops: CpuOps, width: int) -> int:
    """Return the number of parts that a token's row is split into, one thread each."""
    few = ops.steps.plan.n_tokens <= FEW
    return SLICES if few and not width % (SLICES * BLOCK) else 1
