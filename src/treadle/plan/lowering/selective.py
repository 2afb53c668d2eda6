"""Ops of Mamba-1 layers: the selective scan, and the norms of some columns before it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.recurrent.gates import UnitHeads
from treadle.kernels.recurrent.mamba1 import A_SCALE, STRIP, Selective
from treadle.kernels.spec import Grid, Spec
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def columns_norm(ops: CpuOps, label: str, x: Rows, *, weight: str, eps: float) -> Rows:
    """RMS norm of ``x``, some columns of a row, in place; ``weight``: "" for none."""
    steps = ops.steps
    rows, column = ops.place(x)
    n = x.width
    given: dict[str, Any] = {"x": rows, "stride": rows.row_bytes // 4, "column": column}
    # Without a weight, the norm equals sqrt(n) x / sqrt(sum + n eps).
    spec: Spec = UnitHeads(n, 1, math.sqrt(n), n * eps)
    if weight:
        spec = ColumnNorm(n, eps)
        given["w"] = steps.vector(weight)
    steps.emit(label, spec, Grid(1, "n_tokens"), **given)
    return Floats(label, n, rows, column)


def selective(
    ops: CpuOps, label: str, x: Rows, z: Rows, dt: Rows, b: Rows, c: Rows, *, layer: int, stem: str
) -> Rows:
    """Mamba-1's recurrence and the gate after it; ``stem``: the prefix of A and D."""
    steps = ops.steps
    state = ops.config.layers[layer].state
    assert state is not None, layer
    places = [ops.place(each) for each in (x, z, b, c)]
    (rows, values), (gate_rows, gates), (bc, keys), (queries_rows, queries) = places
    assert (rows, bc) == (gate_rows, queries_rows), label
    steps_rows = ops.floats(dt)
    states = steps.cache.states_of(layer)
    out = steps.floats(label, state.n_inner)
    spec = Selective(state.n_inner, state.n_state)
    steps.emit(
        label,
        spec,
        Grid(spec.items, "n_parts"),
        x=rows,
        dt=steps_rows,
        bc=bc,
        a=steps.vector(f"{stem}_a", A_SCALE, turned=STRIP),
        d=steps.vector(f"{stem}_d"),
        states=states.const,
        out=out,
        stride=rows.row_bytes // 4,
        dt_stride=steps_rows.row_bytes // 4,
        bc_stride=bc.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        values=values,
        gates=gates,
        keys=keys,
        queries=queries,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer) + 4 * (state.n_conv - 1) * state.n_channels,
    )
    return Floats(label, state.n_inner, out)
