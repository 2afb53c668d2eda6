"""Cross attention: steps that store an encoder's keys and values, and that attend to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Grid
from treadle.plan.lowering.attention import emit_attention
from treadle.plan.lowering.deferred import Floats

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def cross_store(ops: PlanOps, label: str, k: Rows, v: Rows, *, layer: int) -> Rows:
    """Store the keys ``k`` and values ``v`` of an encoder's rows in the layer's cross pool; return
    ``k``.
    """
    steps = ops.steps
    at = steps.config.layers[layer]
    pool = steps.cache.cross_of(layer)
    (kv, k_column), (other, v_column) = ops.place(k), ops.place(v)
    if other is not kv:
        raise UnsupportedError(f"{label}: keys and values are not in one buffer")
    sizes = 0, at.n_head_kv, at.head_dim, 0
    steps.emit(
        label,
        RopeStore("none", steps.cache.kv, *sizes, 1.0, pool=pool.index, head_dim_v=at.head_dim_v),
        Grid(at.n_head_kv, "n_tokens", whole=min(PAGE, steps.plan.n_tokens)),
        qkv=kv,
        stride=kv.row_bytes // 4,
        pool=pool.const,
        k_column=k_column,
        v_column=v_column,
        page_bytes=pool.cell_bytes,
        layer_off=pool.layer_off(layer),
    )
    return k


def cross_attend(ops: PlanOps, label: str, q: Rows, *, layer: int) -> Rows:
    """Return the attention of each token's queries ``q`` over its sequence's encoder rows, f32
    ``[N, n_head * head_dim_v]``.
    """
    steps = ops.steps
    at = steps.config.layers[layer]
    rows = ops.floats(q)
    sizes = at.n_head, at.n_head_kv, at.head_dim, 0
    steps.emit(
        f"{label}.scale",
        RopeStore("none", steps.cache.kv, *sizes, steps.config.attn_scale, queries_only=True),
        Grid(at.n_head_kv, "n_tokens", whole=min(PAGE, steps.plan.n_tokens)),
        qkv=rows,
        stride=rows.row_bytes // 4,
    )
    out = emit_attention(steps, label, layer, rows, pool=steps.cache.cross_of(layer))
    return Floats(label, at.n_head * at.head_dim_v, out)
