"""Ops of Kimi Delta Attention: parallel convolutions, per-channel decay, a normed output gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.matmul.matmul import COLUMNS
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.recurrent.gates import OutputGate
from treadle.kernels.recurrent.kda import ChannelDelta, ChannelRates
from treadle.kernels.spec import Grid, round_up
from treadle.plan.lowering.deferred import Floats
from treadle.plan.lowering.states import block_of, convolved, gated, scanned, state_of, unit_heads

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def part_convolution(
    ops: CpuOps, label: str, x: Rows, *, layer: int, weight: str, before: int
) -> Rows:
    """Short convolution and silu of each column, one of several convolutions of a layer.

    Their cached inputs are concatenated in the state; ``before``: columns of the earlier ones.
    """
    spec = Convolution(x.width, state_of(ops, layer).n_conv)
    off = 4 * (spec.taps - 1) * before
    return convolved(ops, label, spec, x, layer, f"{weight}.weight", None, off)


def channel_rates(ops: CpuOps, label: str, x: Rows, beta: Rows, *, a: str, bias: str) -> Rows:
    """Return side by side the sigmoid of ``beta``, and the decay of each row of a head's state."""
    steps = ops.steps
    rows, column = ops.place(x)
    beta_rows, beta_column = ops.place(beta)
    heads = beta.width
    out = steps.floats(label, round_up(heads, COLUMNS) + x.width)
    steps.emit(
        label,
        ChannelRates(heads, x.width // heads),
        Grid(heads, "n_tokens"),
        x=rows,
        beta=beta_rows,
        a=steps.vector(a),
        bias=steps.vector(bias),
        out=out,
        stride=rows.row_bytes // 4,
        beta_stride=beta_rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
        beta_column=beta_column,
    )
    return Floats(label, heads + x.width, out)


def channel_delta(
    ops: CpuOps, label: str, q: Rows, k: Rows, v: Rows, rates: Rows, *, layer: int
) -> Rows:
    """The delta rule. Queries and keys are scaled to unit length here; with values, they lie in the
    same rows.
    """
    state = state_of(ops, layer)
    places = [ops.place(x) for x in (q, k, v)]
    assert all(rows is places[0][0] for rows, _ in places), label
    for name, x, scale in (("q", q, state.n_state**-0.5), ("k", k, 1.0)):
        unit_heads(ops, f"{label}.{name}_unit", x, state.n_head, scale)
    names = ("queries", "keys", "values")
    columns = {name: column for name, (_, column) in zip(names, places, strict=True)}
    sizes = state.n_head, state.head_dim, state.n_state, state.n_head
    spec = ChannelDelta(*sizes, block_of(ops))
    return scanned(ops, label, spec, places[0][0], rates, layer, columns, None)


def normed_gate(ops: CpuOps, label: str, x: Rows, gate: Rows, *, layer: int, norm: str) -> Rows:
    """The RMS norm of each head of ``x``, times the sigmoid of ``gate``."""
    state = state_of(ops, layer)
    spec = OutputGate("sigmoid", x.width, state.n_head, state.norm_eps)
    return gated(ops, label, spec, x, gate, norm)
