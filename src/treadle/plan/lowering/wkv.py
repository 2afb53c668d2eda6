"""Ops of RWKV-7: the token shift, and the recurrence with its inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.kernels.recurrent.wkv import ROW, TokenShift, Wkv, WkvKeys, WkvOut
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Floats
from treadle.plan.lowering.recurrent import state_access, state_of

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps

NORM_EPS = 64e-5  # of the norm of each head


def token_shift(
    ops: PlanOps, label: str, x: Rows, *, layer: int, weight: str, n: int, part: int = 0
) -> Rows:
    """Return ``n`` mixtures of each row of ``x`` with the previous token's row, side by side, f32
    ``[N, n * width]``. ``weight``: the stem of the shares, a vector for each mixture.

    A sequence's last token is kept as the ``part``-th of the layer's shift states.
    """
    steps = ops.steps
    rows = ops.floats(x)
    states = steps.cache.states_of(layer)
    out = steps.floats(label, n * x.width)
    spec = TokenShift(x.width, n)
    steps.emit(
        label,
        spec,
        Grid(spec.tiles, "n_parts"),
        x=rows,
        w=steps.vector(f"{weight}.weight"),
        states=states.const,
        out=out,
        stride=rows.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer) + 4 * part * x.width,
    )
    return Floats(label, n * x.width, out)


def wkv_keys(
    ops: PlanOps,
    label: str,
    decay: Rows,
    rate: Rows,
    key: Rows,
    value: Rows,
    first: Rows | None = None,
    mix: Rows | None = None,
    *,
    layer: int,
    stem: str,
) -> Rows:
    """Return the inputs of ``wkv`` for each token, f32 ``[N, len(ROW) * n_inner]``, as
    ``kernels.recurrent.wkv.WkvKeys`` computes them.

    decay, rate, key, value: products of the token's mixtures.
    first, mix: the first layer's values, and the logits of their share in this layer's; None in the
    first layer.
    stem: prefix of the vectors ``_w0``, ``_a0``, ``_v0``, ``_k_k`` and ``_k_a``.
    """
    steps = ops.steps
    state = state_of(ops, layer)
    given = {"decay": decay, "rate": rate, "key": key, "value": value, "first": first, "mix": mix}
    rows = {name: ops.floats(x) for name, x in given.items() if x is not None}
    (row_bytes,) = {x.row_bytes for x in rows.values()}
    names = {"w0": "w0", "a0": "a0", "k_k": "k_k", "k_a": "k_a"}
    names |= {"mix0": "v0"} if mix is not None else {}
    vectors = {name: steps.vector(f"{stem}_{own}.weight") for name, own in names.items()}
    args: dict[str, Any] = {**rows, **vectors}
    out = steps.floats(label, len(ROW) * state.n_inner)
    steps.emit(
        label,
        WkvKeys(state.n_head, state.head_dim, mixed=mix is not None),
        Grid(state.n_head, "n_tokens"),
        out=out,
        stride=row_bytes // 4,
        out_stride=out.row_bytes // 4,
        **args,
    )
    return Floats(label, len(ROW) * state.n_inner, out)


def wkv(ops: PlanOps, label: str, r: Rows, rows: Rows, *, layer: int) -> Rows:
    """Return the output of RWKV-7's recurrence, f32 ``[N, n_inner]``: the layer's state is updated
    by ``rows`` (of ``wkv_keys``), token by token, and multiplied by each token's query ``r``.
    """
    steps = ops.steps
    state = state_of(ops, layer)
    queries = ops.floats(r)
    keys = ops.floats(rows)
    states = steps.cache.states_of(layer)
    out = steps.floats(label, state.n_inner)
    state_off, passing = state_access(ops, layer)
    spec = Wkv(state.n_head, state.head_dim, state.n_state, state.n_head, passing=passing)
    steps.emit(
        label,
        spec,
        Grid(spec.items, "n_parts"),
        x=keys,
        r=queries,
        states=states.const,
        out=out,
        stride=keys.row_bytes // 4,
        r_stride=queries.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        cell_bytes=states.cell_bytes,
        state_off=state_off,
    )
    return Floats(label, state.n_inner, out)


def wkv_out(
    ops: PlanOps,
    label: str,
    x: Rows,
    r: Rows,
    rows: Rows,
    gate: Rows | None = None,
    *,
    layer: int,
    stem: str,
) -> Rows:
    """Return ``gate * (norm(x) + bonus)``, in place; the bonus is made of ``r`` and the token's own
    inputs ``rows`` (of ``wkv_keys``). The norm of each head is applied if the file has its weights,
    the gate if it is given. ``stem``: prefix of the tensors.
    """
    steps = ops.steps
    state = state_of(ops, layer)
    made, seen, keys = (ops.floats(each) for each in (x, r, rows))
    gates = None if gate is None else ops.floats(gate)
    assert {each.row_bytes for each in (made, seen, gates or made)} == {made.row_bytes}, label
    norm = f"{stem}_ln"
    spec = WkvOut(
        state.n_head,
        state.head_dim,
        NORM_EPS,
        norm=ops.has(f"{norm}.weight"),
        gate=gate is not None,
    )
    steps.emit(
        label,
        spec,
        Grid(state.n_head, "n_tokens"),
        x=made,
        r=seen,
        rows=keys,
        gate=gates,
        r_k=steps.vector(f"{stem}_r_k.weight"),
        w=steps.vector(f"{norm}.weight") if spec.norm else None,
        bias=steps.vector(f"{norm}.bias") if spec.norm else None,
        stride=made.row_bytes // 4,
        rows_stride=keys.row_bytes // 4,
    )
    return Floats(label, state.n_inner, made)
