"""Ops of recurrent layers: convolutions, recurrences, gates and norms.

All but ``rates``, ``channel_rates`` and the recurrences work in place: they overwrite their input.
Kernels that one kind of model needs are imported by its ops.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.matmul.select_activation import matrix_act
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.chunk_keys import CHUNK
from treadle.kernels.recurrent.chunked import Chunked, ChunkedDelta, ChunkedMamba2
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.recurrent.gates import OutputGate, Rates, SplitHalves, UnitHeads
from treadle.kernels.recurrent.rules import Delta, Mamba2
from treadle.kernels.recurrent.scan import BLOCK as SOME
from treadle.kernels.recurrent.scan import Scan
from treadle.kernels.spec import LINE, Grid, Spec, round_up
from treadle.plan.lowering.deferred import Floats
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.models.config import Recurrence
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps

# -- Mamba-2 and the gated delta rule -------------------------------------------------------------

UNIT_EPS = 1e-6  # added to the sum of squares of queries and keys


def convolution(ops: PlanOps, label: str, x: Rows, *, layer: int, weight: str) -> Rows:
    """Return the silu of a short causal convolution of each column of ``x``, in place. ``weight``:
    name of the taps; the file's bias, if any, is added before the silu.
    """
    bias = ops.has(f"{weight}.bias")
    spec = Convolution(x.width, state_of(ops, layer).n_conv, bias=bias)
    bias_rows = ops.steps.vector(f"{weight}.bias") if bias else None
    return convolved(ops, label, spec, x, layer, f"{weight}.weight", bias_rows)


def gated_convolution(ops: PlanOps, label: str, x: Rows, *, layer: int, weight: str) -> Rows:
    """Split ``x`` into b, c and v; return c times the short causal convolution of b times v, in
    place. ``weight``: name of the taps.
    """
    state = state_of(ops, layer)
    spec = Convolution(state.n_channels, state.n_conv, gates=True)
    return convolved(ops, label, spec, x, layer, weight, None)


def convolved(
    ops: PlanOps,
    label: str,
    spec: Convolution,
    x: Rows,
    layer: int,
    weight: str,
    bias: Any,
    off: int = 0,
    gain: Any = None,
) -> Rows:
    """Emit the convolution ``spec`` of ``x`` in place. ``weight``: name of the taps; ``bias``,
    ``gain``: constants, or None; ``off``: byte offset, within the layer's state, of the inputs that
    it keeps.
    """
    steps = ops.steps
    (rows, column) = ops.place(x)
    states = steps.cache.states_of(layer)
    steps.emit(
        label,
        spec,
        Grid(spec.tiles, "n_parts"),
        x=rows,
        w=steps.vector(weight, turned=True),
        bias=bias,
        gain=gain,
        states=states.const,
        stride=rows.row_bytes // 4,
        column=column,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer) + off,
    )
    return Floats(label, spec.k, rows, column)


def block_convolution(
    ops: PlanOps, label: str, x: Rows, delta: Rows, *, layer: int, weight: str, side: int
) -> Rows:
    """Return the short causal convolution of each column of ``x`` with earlier rows of the same
    sequence in the run, in place. ``weight``: a tensor with two sets of weights; ``delta``: what
    each token adds to the weights of both sets; ``side``: the set that is used, 0 or 1.
    """
    from treadle.kernels.recurrent.block_convolution import BlockConvolution

    steps = ops.steps
    at = steps.config.layers[layer].block_taps
    assert at is not None, layer
    spec = BlockConvolution(x.width, at.n, at.group)
    rows, column = ops.place(x)
    deltas, delta_column = ops.place(delta)
    steps.emit(
        label,
        spec,
        Grid(spec.tiles, "n_parts"),
        x=rows,
        delta=deltas,
        base=steps.vector(weight),
        stride=rows.row_bytes // 4,
        column=column,
        delta_stride=deltas.row_bytes // 4,
        delta_column=delta_column + side * at.n * (x.width // at.group),
        first=side * at.n * x.width,
    )
    return Floats(label, x.width, rows, column)


def rates(
    ops: PlanOps,
    label: str,
    x: Rows,
    beta: Rows | None = None,
    *,
    a: str,
    bias: str,
    most: float = 1.0,
) -> Rows:
    """Return the two rates of a recurrence side by side, each with a value per head: the step size,
    softplus of ``x`` plus bias; and the factor by which the state decays, ``e**(a * step size)``.
    With ``beta`` the first is ``most`` times its sigmoid instead. ``a``, ``bias``: names of
    vectors.
    """
    steps = ops.steps
    (rows, column) = ops.place(x)
    out = steps.floats(label, 2 * round_up(x.width, COLUMNS))
    beta_column = None
    if beta is not None:
        beta_rows, beta_column = ops.place(beta)
        assert beta_rows is rows, label
    steps.emit(
        label,
        Rates(x.width, beta=beta is not None, most=most),
        Grid(1, "n_tokens"),
        x=rows,
        a=steps.vector(a),
        bias=steps.vector(bias),
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        column=column,
        beta_column=beta_column,
    )
    return Floats(label, 2 * x.width, out)


def mamba2(ops: PlanOps, label: str, x: Rows, rates: Rows, *, layer: int, weight: str) -> Rows:
    """Return the result of Mamba-2's recurrence, f32 ``[N, n_inner]``. ``x``: values, B and C side
    by side; ``rates``: as ``rates`` returns them; ``weight``: the name of D.
    """
    state = state_of(ops, layer)
    sizes = state.n_head, state.head_dim, state.n_state, state.n_group
    by_chunks = _chunked(ops, layer)
    spec = ChunkedMamba2(*sizes) if by_chunks else Mamba2(*sizes, block_of(ops))
    n = state.n_inner
    (rows, column) = ops.place(x)
    columns = {"values": column, "keys": column + n, "queries": column + n + state.n_keys}
    return emit_scan(ops, label, spec, rows, rates, layer, columns, ops.steps.vector(weight))


def delta(ops: PlanOps, label: str, x: Rows, rates: Rows, *, layer: int, grouped: bool) -> Rows:
    """Return the result of the gated delta rule, f32 ``[N, n_inner]``. ``x``: queries, keys and
    values side by side; ``rates``: as ``rates`` returns them. Queries and keys are first scaled to
    unit length; ``grouped``: neighbouring value heads share a key head.
    """
    state = state_of(ops, layer)
    (rows, column) = ops.place(x)
    widths = ((0, state.n_keys), (state.n_keys, state.n_keys), (2 * state.n_keys, state.n_inner))
    q, k, v = (Floats(label, n, rows, column + at) for at, n in widths)
    return delta_apart(ops, label, q, k, v, rates, layer=layer, grouped=grouped)


def delta_apart(
    ops: PlanOps, label: str, q: Rows, k: Rows, v: Rows, rates: Rows, *, layer: int, grouped: bool
) -> Rows:
    """Return the result of the gated delta rule as ``delta`` does, but of queries, keys and values
    at any columns of one buffer.
    """
    state = state_of(ops, layer)
    places = [ops.place(x) for x in (q, k, v)]
    assert all(rows is places[0][0] for rows, _ in places), label
    for name, scale, part in (("q", state.n_state**-0.5, q), ("k", 1.0, k)):
        unit_heads(ops, f"{label}.{name}_unit", part, state.n_group, scale)
    sizes = state.n_head, state.head_dim, state.n_state, state.n_group
    by_chunks = _chunked(ops, layer)
    kind, block = (ChunkedDelta, 1) if by_chunks else (Delta, block_of(ops))
    spec = kind(*sizes, block, grouped=grouped)
    names = ("queries", "keys", "values")
    columns = {name: column for name, (_, column) in zip(names, places, strict=True)}
    return emit_scan(ops, label, spec, places[0][0], rates, layer, columns, None)


def unit_heads(ops: PlanOps, label: str, x: Rows, heads: int, scale: float) -> None:
    """Emit a step that scales each of ``heads`` equal parts of ``x`` to Euclidean length ``scale``,
    in place.
    """
    rows, column = ops.place(x)
    ops.steps.emit(
        label,
        UnitHeads(x.width // heads, heads, scale, UNIT_EPS),
        Grid(heads, "n_tokens"),
        x=rows,
        stride=rows.row_bytes // 4,
        column=column,
    )


def emit_scan(
    ops: PlanOps,
    label: str,
    spec: Scan,
    rows: Buffer,
    rates: Rows,
    layer: int,
    columns: dict[str, int],
    d: Any,
) -> Rows:
    """Emit the recurrence ``spec`` and return its result, f32 ``[N, n_inner]``. ``columns``: where
    "values", "keys" and "queries" begin in ``rows``; ``rates``: two numbers per head and token;
    ``d``: Mamba's D, or None.
    """
    steps = ops.steps
    state = state_of(ops, layer)
    states = steps.cache.states_of(layer)
    factors = ops.floats(rates)
    out = steps.floats(label, state.n_inner)
    stride = rows.row_bytes // 4
    chunks = None
    if isinstance(spec, Chunked):
        n_chunks = -(-steps.plan.n_tokens // CHUNK)
        chunks = Buffer(f"{label}.keys", n_chunks, spec.keys.n_bytes * spec.n_group, "u1")
        steps.emit(
            f"{label}.keys",
            spec.keys,
            Grid(spec.n_group, "n_tokens", CHUNK),
            x=rows,
            out=chunks,
            stride=stride,
            keys=columns["keys"],
            queries=columns["queries"],
        )
    state_off, passing = state_access(ops, layer)
    steps.emit(
        label,
        replace(spec, passing=passing),
        Grid(spec.items, "n_parts"),
        x=rows,
        rates=factors,
        d=d,
        chunks=chunks,
        states=states.const,
        out=out,
        stride=stride,
        rates_stride=factors.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        values=columns["values"],
        keys=columns["keys"],
        queries=columns["queries"],
        cell_bytes=states.cell_bytes,
        state_off=state_off,
    )
    return Floats(label, state.n_inner, out)


def state_access(ops: PlanOps, layer: int) -> tuple[int, bool]:
    """Return the byte offset of a layer's recurrent state within a sequence's states, and whether
    to write it with non-temporal stores.

    Those are faster for a single token, since the weights evict the state before the next token
    anyway. They need states of whole cache lines.
    """
    steps = ops.steps
    state = state_of(ops, layer)
    states = ops.steps.cache.states_of(layer)
    state_off = states.layer_off(layer) + 4 * (state.n_conv - 1) * state.n_channels
    in_lines = not (states.cell_bytes | state_off | 4 * state.head_dim) % LINE
    return state_off, in_lines and steps.plan.n_tokens == 1 and steps.isa.simt is None


def silu_gate(
    ops: PlanOps,
    label: str,
    x: Rows,
    gate: Rows,
    *,
    layer: int,
    norm: str,
    groups: int,
    gate_first: bool = False,
) -> Rows:
    """Return ``x * silu(gate)``, in place. ``norm``: name of the weights of an RMS norm of each of
    ``groups`` equal parts of ``x``, "" for no norm; with ``gate_first`` the norm is applied to the
    product instead of ``x``.
    """
    eps = state_of(ops, layer).norm_eps if norm else 0.0
    spec = OutputGate("silu", x.width, groups if norm else 1, eps, gate_first and bool(norm))
    return gated(ops, label, spec, x, gate, norm)


def sigmoid_gate(ops: PlanOps, label: str, x: Rows, gate: Rows, *, gain: float = 1.0) -> Rows:
    """Return ``x`` times the sigmoid of ``gate``, times ``gain``, in place; ``gate`` has one value
    per value of ``x``, or one per head.
    """
    return _gate_heads(ops, label, "sigmoid", x, gate, gain)


def softplus_gate(ops: PlanOps, label: str, x: Rows, gate: Rows) -> Rows:
    """Return ``x`` times the softplus of ``gate``, in place; ``gate`` is shaped as in
    ``sigmoid_gate``.
    """
    return _gate_heads(ops, label, "softplus", x, gate)


def _gate_heads(ops: PlanOps, label: str, fn: str, x: Rows, gate: Rows, gain: float = 1.0) -> Rows:
    own = gate.width == x.width
    spec = OutputGate(fn, x.width, 1 if own else gate.width, one=not own, gain=gain)
    return gated(ops, label, spec, x, gate, "")


def gated(ops: PlanOps, label: str, spec: OutputGate, x: Rows, gate: Rows, norm: str) -> Rows:
    """Emit the gate ``spec`` of ``x``, in place; ``norm``: the name of a norm's weights, or ""."""
    steps = ops.steps
    rows = ops.floats(x)
    (gates, column) = ops.place(gate)
    steps.emit(
        label,
        spec,
        Grid(spec.groups, "n_tokens"),
        x=rows,
        gate=gates,
        w=steps.vector(norm) if norm else None,
        stride=rows.row_bytes // 4,
        gate_stride=gates.row_bytes // 4,
        column=column,
    )
    return Floats(label, x.width, rows)


def halves(ops: PlanOps, label: str, x: Rows, heads: int) -> tuple[Rows, Rows]:
    """Emit a step that reorders each row of ``x`` in place: the first halves of its ``heads`` equal
    parts, then the second halves. Return both as columns of the same buffer.
    """
    rows, column = ops.place(x)
    n = x.width // 2
    ops.steps.emit(
        label,
        SplitHalves(n // heads, heads),
        Grid(1, "n_tokens"),
        x=rows,
        stride=rows.row_bytes // 4,
        column=column,
    )
    return Floats(label, n, rows, column), Floats(label, n, rows, column + n)


def block_of(ops: PlanOps) -> int:
    """Return the number of tokens that a recurrence processes at a time: the constant SOME in plans
    of many tokens, else 1.

    It is also 1 in deterministic mode, where results must not depend on how a text is split into
    runs, and on GPUs, where each thread has one column.
    """
    steps = ops.steps
    alone = steps.deterministic or steps.isa.simt is not None
    return 1 if alone or steps.plan.n_tokens < SOME else SOME


def _chunked(ops: PlanOps, layer: int) -> bool:
    """Return whether a recurrence runs by chunks on matrix registers. It does so only where the
    layer's products of many tokens are rounded to bf16 as well.
    """
    steps = ops.steps
    state = state_of(ops, layer)
    matrix = steps.isa.matrix
    if matrix is None or steps.deterministic or steps.plan.n_tokens <= matrix.vector_tokens:
        return False
    fmt = steps.weights.format(f"blk.{layer}.ssm_out.weight")
    narrow = matrix_act(fmt, steps.isa) == "bf16"
    return narrow and not (state.head_dim % CHUNK or state.n_state % BLOCK)


def state_of(ops: PlanOps, layer: int) -> Recurrence:
    """Return the state sizes of a recurrent layer."""
    state = ops.config.layers[layer].state
    assert state is not None, layer
    return state


# -- Kimi Delta Attention: a convolution for each part, decay by channel, a normed gate -----------


def part_convolution(
    ops: PlanOps, label: str, x: Rows, *, layer: int, weight: str, before: int
) -> Rows:
    """Emit a short convolution of ``x`` and its silu, in place, for a layer that has several short
    convolutions; return the result. ``weight``: name of the tensor of taps, without ``.weight``.

    The inputs that the convolutions keep lie one after another in the layer's state; ``before``:
    number of columns of the layer's earlier convolutions.
    """
    spec = Convolution(x.width, state_of(ops, layer).n_conv)
    off = 4 * (spec.taps - 1) * before
    return convolved(ops, label, spec, x, layer, f"{weight}.weight", None, off)


def residual_convolution(
    ops: PlanOps, label: str, x: Rows, *, layer: int, weight: str, before: int, gain: str
) -> Rows:
    """Return ``x`` plus its short convolution, without silu, in place. ``gain``: the tensor whose
    value multiplies ``x`` first, or "". ``before``: as in ``part_convolution``.
    """
    n_conv = state_of(ops, layer).n_conv
    spec = Convolution(x.width, n_conv, plain=True, residual=True, scaled=bool(gain))
    off = 4 * (spec.taps - 1) * before
    value = ops.steps.vector(gain) if gain else None
    return convolved(ops, label, spec, x, layer, weight, None, off, value)


def channel_rates(
    ops: PlanOps,
    label: str,
    x: Rows,
    beta: Rows,
    *,
    a: str,
    bias: str,
    floor: float = 0.0,
    sign: float = 1.0,
    most: float = 1.0,
) -> Rows:
    """Return side by side, for Kimi Delta Attention: the sigmoid of ``beta`` times ``most``, a
    value per head; and the decay of each row of a head's state (``kda.ChannelRates``), made of
    ``x``.

    ``a``, ``bias``: names of vectors; ``floor``: the least logarithm of a decay, 0 for none;
    ``sign``: a factor of ``a``.
    """
    from treadle.kernels.recurrent.kda import ChannelRates

    steps = ops.steps
    rows, column = ops.place(x)
    beta_rows, beta_column = ops.place(beta)
    heads = beta.width
    out = steps.floats(label, round_up(heads, COLUMNS) + x.width)
    steps.emit(
        label,
        ChannelRates(heads, x.width // heads, floor, most),
        Grid(heads, "n_tokens"),
        x=rows,
        beta=beta_rows,
        a=steps.vector(a, sign),
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
    ops: PlanOps, label: str, q: Rows, k: Rows, v: Rows, rates: Rows, *, layer: int
) -> Rows:
    """Return the result of the delta rule with a decay for each channel of the keys, f32 ``[N,
    n_inner]``. ``rates``: as ``channel_rates`` returns them. Queries and keys are first scaled to
    unit length; they and the values must be columns of one buffer.
    """
    from treadle.kernels.recurrent.kda import ChannelDelta

    state = state_of(ops, layer)
    places = [ops.place(x) for x in (q, k, v)]
    assert all(rows is places[0][0] for rows, _ in places), label
    for name, x, scale in (("q", q, state.n_state**-0.5), ("k", k, 1.0)):
        unit_heads(ops, f"{label}.{name}_unit", x, state.n_head, scale)
    names = ("queries", "keys", "values")
    columns = {name: column for name, (_, column) in zip(names, places, strict=True)}
    sizes = state.n_head, state.head_dim, state.n_state, state.n_head
    spec = ChannelDelta(*sizes, block_of(ops))
    return emit_scan(ops, label, spec, places[0][0], rates, layer, columns, None)


def normed_gate(
    ops: PlanOps,
    label: str,
    x: Rows,
    gate: Rows,
    *,
    layer: int,
    norm: str,
    gain: float = 1.0,
) -> Rows:
    """Return the RMS norm of each head of ``x``, with weights ``norm``, times the sigmoid of
    ``gate``, times ``gain``, in place.
    """
    state = state_of(ops, layer)
    spec = OutputGate("sigmoid", x.width, state.n_head, state.norm_eps, gain=gain)
    return gated(ops, label, spec, x, gate, norm)


# -- Mamba-1 --------------------------------------------------------------------------------------


def columns_norm(ops: PlanOps, label: str, x: Rows, *, weight: str, eps: float) -> Rows:
    """Return the RMS norm of ``x``, which may be some columns of a buffer, in place; ``weight``:
    name of the norm's weights, "" for none.
    """
    from treadle.kernels.elementwise.column_norm import ColumnNorm

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
    ops: PlanOps, label: str, x: Rows, z: Rows, dt: Rows, b: Rows, c: Rows, *, layer: int, stem: str
) -> Rows:
    """Return the result of Mamba-1's recurrence over the values ``x`` with step sizes ``dt``
    (before the softplus) and vectors ``b`` and ``c``, gated by ``silu(z)``, f32 ``[N, n_inner]``;
    ``stem``: the prefix of the tensors A and D.
    """
    from treadle.kernels.recurrent.mamba1 import A_SCALE, STRIP, Selective

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
