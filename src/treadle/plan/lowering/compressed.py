"""CPU lowering of attention to rows of tokens and of units, and of indexers of units
(``models/mixers/compressed.py``, ``models/mixers/pooled.py``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from treadle.kernels.attention.hadamard import Rotate
from treadle.kernels.attention.indexer import Choose
from treadle.kernels.attention.row_attention import SCORED, RowAttention, RowChoice, RowScores
from treadle.kernels.attention.row_pages import RowStore, TurnHeads
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.compress import Compress
from treadle.kernels.run_state import PAGE, WORD_BYTES, round_up
from treadle.kernels.spec import Grid
from treadle.plan.lowering.deferred import Chosen, Floats
from treadle.plan.lowering.indexer import ignore, rotation_back
from treadle.plan.plan import ALIGN, Buffer

if TYPE_CHECKING:
    from treadle.kvcache.page_pool import Pool
    from treadle.models.config import Compressed, Indexer
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps


def units_stored(
    ops: PlanOps, label: str, kv: Rows, gate: Rows, *, layer: int, stem: str, index: bool
) -> Rows:
    """Emit the rows of units (compressed keys), and store them: attention's, or with ``index``
    those of the layer's indexer. Return them, f32 ``[N, width]``: for each token its unit's row so
    far.

    kv, gate: each token's values and scores; a unit's row is the sum of its tokens' values, weighed
    by the softmax of their scores.
    stem: prefix of the tensors ``_ape`` (bias of scores) and ``_norm``, which a file may lack.
    """
    steps = ops.steps
    cache = steps.cache
    pool = cache.index_pool_of(layer) if index else cache.unit_pool_of(layer)
    sizes = ops.config.layers[layer].compressed
    width = pool.spec.head_dim
    spec = Compress(width, pool.spec.unit, sizes is not None and sizes.overlap)
    (values, kv_column), (scores, gate_column) = ops.place(kv), ops.place(gate)
    states = cache.states_of(layer)
    before = 0
    if index and sizes is not None:  # the state of attention's units comes first
        own = cache.unit_pool_of(layer).spec.head_dim
        before = Compress(own, sizes.unit, sizes.overlap).n_values
    out = steps.floats(label, width)
    steps.emit(
        label,
        spec,
        Grid(spec.tiles, "n_parts"),
        kv=values,
        gate=scores,
        bias=steps.vector(f"{stem}_ape.weight"),
        states=states.const,
        out=out,
        kv_stride=values.row_bytes // 4,
        gate_stride=scores.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        kv_column=kv_column,
        gate_column=gate_column,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer) + 4 * before,
    )
    _store(ops, f"{label}.store", out, 0, pool, layer, f"{stem}_norm")
    return Floats(label, width, out)


def rows_chosen(ops: PlanOps, label: str, q: Rows, weights: Rows, *, layer: int) -> Rows:
    """Return the units that an indexer chooses for queries ``q [N, heads * head_dim]``, whose heads
    have ``weights [N, heads]``: a list of unit numbers for each token, i32. If the context has no
    more units than the indexer chooses, all are chosen and nothing is emitted.
    """
    steps = ops.steps
    index = _indexer_of(ops, layer)
    scores = _scores(ops, label, q, weights, layer)
    if scores is None:
        return Chosen(label, 0, None)
    n_bytes = round_up(4 * (1 + index.top), ALIGN)
    chosen = Buffer(f"{label}.chosen", steps.plan.n_tokens, n_bytes, "i4")
    steps.emit(
        f"{label}.choose",
        RowChoice(index.top, index.unit),
        Grid(1, "n_tokens"),
        scores=scores,
        chosen=chosen,
        scores_stride=scores.row_bytes // 4,
        chosen_stride=n_bytes // 4,
    )
    return Chosen(label, 0, chosen)


def units_chosen(ops: PlanOps, label: str, q: Rows, weights: Rows, *, layer: int) -> Rows:
    """Return, as bits, the keys that each token sees: those of the units that an indexer chooses,
    and those after the last whole unit. ``q``, ``weights`` and the case of a short context: as in
    ``rows_chosen``.
    """
    steps = ops.steps
    index = _indexer_of(ops, layer)
    scores = _scores(ops, label, q, weights, layer)
    if scores is None:
        return Chosen(label, 0, None)
    words = -(-steps.cache.n_ctx // PAGE)
    bits = Buffer(f"{label}.chosen", steps.plan.n_tokens, words * WORD_BYTES, "u4")
    steps.emit(
        f"{label}.choose",
        Choose(index.top, index.unit, whole=True, dense=True),
        Grid(1, "n_tokens"),
        scores=scores,
        chosen=bits,
        scores_stride=scores.row_bytes // 4,
        chosen_stride=words,
    )
    return Chosen(label, 0, bits)


def _scores(ops: PlanOps, label: str, q: Rows, weights: Rows, layer: int) -> Buffer | None:
    """Emit an indexer's scores of units, for queries ``q`` with ``weights`` of their heads. Return
    them, f32 ``[N, most units]``, or None if the context has no more units than are chosen.
    """
    steps = ops.steps
    index = _indexer_of(ops, layer)
    pool = steps.cache.index_pool_of(layer)
    most = -(-steps.cache.n_ctx // index.unit)
    if most <= index.top:
        ignore(steps, q, weights)
        return None
    queries = ops.floats(q)
    factors, first = ops.place(weights)
    if ops.config.layers[layer].rope is not None:
        _emit_rotation(ops, f"{label}.rope", queries, layer, index.n_head, index.head_dim, pool)
    elif pool.layout.keys.fmt.rotated:
        rotated = Rotate(index.head_dim, index.n_head)
        stride = queries.row_bytes // 4
        grid = Grid(index.n_head, "n_tokens")
        steps.emit(f"{label}.rotate", rotated, grid, x=queries, stride=stride)
    width = round_up(most, COLUMNS)
    scores = Buffer(f"{label}.scores", steps.plan.n_tokens, 4 * width)
    slices = -(-most // SCORED)
    steps.emit(
        f"{label}.scores",
        RowScores(
            steps.cache.kv,
            index.n_head,
            index.head_dim,
            index.unit,
            index.top,
            slices,
            1.0 / math.sqrt(index.head_dim * index.n_head),
            pool.index,
        ),
        Grid(slices, "n_tokens"),
        q=queries,
        weights=factors,
        pool=pool.const,
        scores=scores,
        stride=queries.row_bytes // 4,
        weights_stride=factors.row_bytes // 4,
        weights_column=first,
        scores_stride=width,
        page_bytes=pool.cell_bytes,
        layer_off=pool.layer_off(layer),
    )
    return scores


def rows_attended(
    ops: PlanOps,
    label: str,
    q: Rows,
    kv: Rows,
    chosen: Rows | None = None,
    *,
    layer: int,
    norm: str,
    sinks: str,
) -> Rows:
    """Store the batch's own rows ``kv``, and return attention of ``q`` to the rows of the last
    tokens and to the layer's rows of units, f32 ``[N, n_head * head_dim]``.

    A row is key and value of all heads. Queries are normed head by head, without weights; ``norm``
    is the stem of the norm of rows. ``chosen``: the units that each token sees, None for all;
    ``sinks``: stem of the scores of a key without a value, one for each head. The result is rotated
    back by the token's position.
    """
    steps = ops.steps
    cache = steps.cache
    at = ops.config.layers[layer]
    sizes = _sizes_of(ops, layer)
    pool = cache.pool_of(layer)
    queries = ops.floats(q)
    rows, column = ops.place(kv)
    eps, scale = ops.config.norm_eps, ops.config.attn_scale
    heads = at.n_head, at.head_dim
    _emit_rotation(ops, f"{label}.rope", queries, layer, *heads, pool, eps=eps, scale=scale)
    _store(ops, f"{label}.store", rows, column, pool, layer, norm)
    out = steps.floats(f"{label}.out", at.n_head * at.head_dim)
    listed = chosen.bits if isinstance(chosen, Chosen) else None
    given: dict[str, Any] = {}
    units = 0
    if sizes.unit:
        others = cache.unit_pool_of(layer)
        units = others.index
        given = {
            "units": others.const,
            "units_page_bytes": others.cell_bytes,
            "units_layer_off": others.layer_off(layer),
        }
    top = 0
    if listed is not None:
        assert at.indexer is not None
        top = at.indexer.top
        given |= {"chosen": listed, "chosen_stride": listed.row_bytes // 4}
    spec = RowAttention(
        cache.kv,
        at.n_head,
        at.head_dim,
        at.window,
        pool.index,
        sizes.unit,
        units,
        top,
        block=not at.causal,
    )
    steps.emit(
        label,
        spec,
        Grid(spec.n_groups, "n_tokens"),
        qkv=queries,
        sinks=steps.vector(f"{sinks}.weight"),
        pool=pool.const,
        out=out,
        stride=queries.row_bytes // 4,
        out_stride=out.row_bytes // 4,
        page_bytes=pool.cell_bytes,
        layer_off=pool.layer_off(layer),
        **given,
    )
    _emit_rotation(ops, f"{label}.rope_back", out, layer, *heads, pool, inverse=True)
    return Floats(label, at.n_head * at.head_dim, out)


def rows_stored(ops: PlanOps, label: str, kv: Rows, *, layer: int, norm: str) -> Rows:
    """Store the rows ``kv`` of tokens without attending to them; return ``kv``. ``norm``: stem of
    the norm of rows.
    """
    rows, column = ops.place(kv)
    _store(ops, label, rows, column, ops.steps.cache.pool_of(layer), layer, norm)
    return kv


def _sizes_of(ops: PlanOps, layer: int) -> Compressed:
    sizes = ops.config.layers[layer].compressed
    assert sizes is not None
    return sizes


def _indexer_of(ops: PlanOps, layer: int) -> Indexer:
    index = ops.config.layers[layer].indexer
    assert index is not None
    return index


def _emit_rotation(
    ops: PlanOps,
    label: str,
    x: Buffer,
    layer: int,
    n_head: int,
    head_dim: int,
    pool: Pool,
    **more: Any,
) -> None:
    """Emit a step that scales, norms and rotates each head of ``x`` in place, as ``more``, further
    fields of ``TurnHeads``, says. ``pool``: its page format decides on Hadamard rotation.
    """
    table = ops.config.layers[layer].rope
    assert table is not None
    spec = TurnHeads(
        ops.config.arch.rope,
        n_head,
        head_dim,
        ops.config.ropes[table].dims,
        table=table,
        hadamard=pool.layout.keys.fmt.rotated,
        **more,
    )
    grid = Grid(n_head, "n_tokens")
    ops.steps.emit(label, spec, grid, x=x, stride=x.row_bytes // 4, column=0)


def _store(
    ops: PlanOps, label: str, rows: Buffer, column: int, pool: Pool, layer: int, norm: str
) -> None:
    """Emit a step that norms and rotates rows, and stores them in the layer's pages of ``pool``.
    ``rows``, ``column``: the buffer, and where the rows begin in it; ``norm``: stem of a norm that
    the file may lack.
    """
    steps = ops.steps
    table = ops.config.layers[layer].rope
    normed = ops.has(f"{norm}.weight")
    spec = RowStore(
        ops.config.arch.rope if table is not None else "none",
        steps.cache.kv,
        pool.spec.head_dim,
        ops.config.ropes[table].dims if table is not None else 0,
        ops.config.norm_eps if normed else None,
        pool.spec.unit,
        pool.index,
        table or 0,
    )
    given: dict[str, Any] = {}
    if spec.rotates_back:
        assert table is not None
        given["back"] = rotation_back(ops, table, spec.unit - 1)
    if normed:
        given["norm"] = steps.vector(f"{norm}.weight")
    steps.emit(
        label,
        spec,
        Grid(1, "n_tokens"),
        key=rows,
        pool=pool.const,
        k_stride=rows.row_bytes // 4,
        k_column=column,
        page_bytes=pool.cell_bytes,
        layer_off=pool.layer_off(layer),
        **given,
    )
