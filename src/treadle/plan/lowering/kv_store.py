"""The op ``kv_store``: stores a layer's keys and values, to which no token of the same run
attends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import NormOf, unwrap

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def kv_store(ops: PlanOps, label: str, k: Rows, v: Rows, *, layer: int) -> Rows:
    """Store the keys ``k`` and values ``v`` in the layer's pages, after the norms and the rope that
    ``attend`` would apply; return ``k``.
    """
    steps = ops.steps
    config = steps.config
    at = config.layers[layer]
    pool = steps.cache.pool_of(layer)
    way = unwrap(k)
    v_norm = v if isinstance(v, NormOf) else None
    (rows, k_column), (other, v_column) = (
        ops.place(way.source),
        ops.place(v_norm.x if v_norm else v),
    )
    if other is not rows:
        raise UnsupportedError(f"{label}: keys and values are not in one buffer")
    rope = None if way.table is None else config.ropes[way.table]
    norm = way.norm
    weight = norm and steps.vector(f"{norm.weight}.weight", norm.scale)
    steps.emit(
        label,
        RopeStore(
            config.arch.rope if rope else "none",
            steps.cache.kv,
            0,
            at.n_head_kv,
            at.head_dim,
            rope.dims if rope else 0,
            1.0,
            norm.eps if norm else None,
            pool.index,
            way.table or 0,
            at.head_dim_v,
            norm_last=way.norm_last,
            v_eps=v_norm.eps if v_norm else None,
        ),
        Grid(at.n_head_kv, "n_tokens", whole=min(PAGE, steps.plan.n_tokens)),
        qkv=rows,
        stride=rows.row_bytes // 4,
        q_norm=weight,
        k_norm=weight,
        pool=pool.const,
        k_column=k_column,
        v_column=v_column,
        page_bytes=pool.cell_bytes,
        layer_off=pool.layer_off(layer),
    )
    return k
