"""Products with matrices whose inputs and results the file clamps (Gemma 4's small towers)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from treadle.kernels.elementwise.clamp import ClampBetween
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats
from treadle.plan.weights import bound_of, tensor_of_slice

if TYPE_CHECKING:
    from treadle.models.ops import Rows, TensorName
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.plan import Buffer


class Bounds(NamedTuple):
    """A smallest and a largest value; -inf and inf where the file has no bound."""

    low: float
    high: float


FREE = Bounds(-math.inf, math.inf)


def bounded_products(ops: PlanOps, label: str, x: Rows, stems: Sequence[TensorName]) -> list[Rows]:
    """Return ``clamp(clamp(x) W^T)`` for each of the matrices ``stems``, with the bounds that the
    file has for the inputs and for the results of each matrix.

    Matrices with equal bounds of their inputs read the same clamped rows, in one product.
    """
    steps = ops.steps
    alike: dict[Bounds, list[int]] = {}
    for i, stem in enumerate(stems):
        alike.setdefault(_bounds(steps, stem, "input"), []).append(i)
    made: dict[int, Rows] = {}
    for n, (bounds, members) in enumerate(alike.items()):
        suffix = f".{n}" if n else ""
        h = x
        if bounds != FREE:
            out = steps.floats(f"{label}.input", x.width)
            h = _clamped(ops, f"{label}.input_clamp{suffix}", x, bounds, out, 0)
        found = ops.products(f"{label}{suffix}", h, [stems[i] for i in members])
        made |= dict(zip(members, found, strict=True))
    results = [_bounds(steps, stem, "output") for stem in stems]
    if len(alike) == 1 and all(bounds == FREE for bounds in results):
        return [made[i] for i in range(len(stems))]
    out = steps.floats(label, sum(round_up(made[i].width, COLUMNS) for i in made))
    column = 0
    clamped = []
    for i, (stem, bounds) in enumerate(zip(stems, results, strict=True)):
        which = tensor_of_slice(stem).rpartition(".")[2] if len(stems) > 1 else "output"
        clamped.append(_clamped(ops, f"{label}.{which}_clamp", made[i], bounds, out, column))
        column += round_up(made[i].width, COLUMNS)
    return clamped


def _clamped(
    ops: PlanOps, label: str, x: Rows, bounds: Bounds, out: Buffer, out_column: int
) -> Rows:
    """Emit a step that writes ``x``, clamped to ``bounds``, into ``out`` from ``out_column`` on."""
    steps = ops.steps
    rows, column = ops.place(x)
    steps.emit(
        label,
        ClampBetween(x.width),
        Grid(1, "n_tokens"),
        x=rows,
        bounds=steps.weights.numbers(f"{bounds.low} to {bounds.high}", bounds),
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
        out_column=out_column,
    )
    return Floats(label, x.width, out, out_column)


def _bounds(steps: Steps, stem: TensorName, side: str) -> Bounds:
    """Return the bounds of the inputs (``side`` "input") or of the results ("output") of the matrix
    ``stem``.
    """
    found = []
    for end, without in (("min", FREE.low), ("max", FREE.high)):
        name = bound_of(stem, side, end)
        if name not in steps.config.bounds:
            found.append(without)
            continue
        steps.plan.tensors_used.add(name)
        found.append(float(steps.weights.tensor(name).dequantize().ravel()[0]))
    return Bounds(*found)
