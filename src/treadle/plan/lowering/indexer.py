"""CPU lowering of sparse attention's choice of keys: the op ``chosen`` of
``models/mixers/indexed.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.kernels.attention.indexer import Choose, IndexScores, IndexStore
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.run_state import PAGE, WORD_BYTES, numbered
from treadle.kernels.spec import Grid
from treadle.models.ops import tensor_of
from treadle.plan.lowering.deferred import Chosen, Floats, NormOf, Product
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.plan import Const


def moving_mean(ops: PlanOps, label: str, x: Rows, *, layer: int, n: int) -> Rows:
    """Replace each token's ``x`` by the mean of its own and the ``n - 1`` tokens' before it, in
    place.
    """
    steps = ops.steps
    rows, column = ops.place(x)
    states = steps.cache.states_of(layer)
    steps.emit(
        label,
        spec := Convolution(x.width, n, plain=True),
        Grid(spec.tiles, "n_parts"),
        x=rows,
        w=steps.weights.numbers(f"mean of {n} x {x.width}", [1.0 / n] * (n * x.width + COLUMNS)),
        states=states.const,
        stride=rows.row_bytes // 4,
        column=column,
        cell_bytes=states.cell_bytes,
        state_off=states.layer_off(layer),
    )
    return Floats(label, x.width, rows, column)


def chosen(
    ops: PlanOps, label: str, q: Rows, k: Rows, weights: Rows | None = None, *, layer: int
) -> Rows:
    """Store the indexer's keys ``k``, and return the keys that it chooses for queries ``q``, as
    bits.

    q: ``[N, heads * head_dim]``. k: normed. weights: of the heads, ``[N, heads]``; None: all are 1.

    If the context is too short for a choice, all keys are chosen: keys are stored and nothing else
    is emitted.
    """
    steps = ops.steps
    at = ops.config.layers[layer]
    index = at.indexer
    assert index is not None
    pool = steps.cache.index_pool_of(layer)
    n_ctx = steps.cache.n_ctx
    every = n_ctx <= index.top * index.unit
    table = None if at.rope is None else ops.config.ropes[at.rope]
    rows, column = ops.place(k)
    store = IndexStore(
        index.rope if table else "none",
        steps.cache.kv,
        0 if every else index.n_head,
        index.head_dim,
        table.dims if table else 0,
        index.first,
        pool.index,
        at.rope or 0,
        back=table is not None and index.pooled,
    )
    pages: dict[str, Any] = {
        "pool": pool.const,
        "page_bytes": pool.cell_bytes,
        "layer_off": pool.layer_off(layer),
    }
    given: dict[str, Any] = {
        "key": rows,
        "k_stride": rows.row_bytes // 4,
        "k_column": column,
        **pages,
    }
    if store.back:
        assert at.rope is not None
        given["back"] = rotation_back(ops, at.rope, index.unit - 1)  # to its first position
    if every:
        ignore(steps, q, weights)
        steps.emit(f"{label}.store", store, Grid(1, "n_tokens"), **given)
        return Chosen(label, 0, None)
    queries = ops.floats(q)
    stride = queries.row_bytes // 4
    steps.emit(f"{label}.store", store, Grid(1, "n_tokens"), q=queries, stride=stride, **given)
    weighted: dict[str, Any] = {}
    if weights is not None:
        factors, first = ops.place(weights)
        weighted["weights"] = factors
        weighted |= {"weights_stride": factors.row_bytes // 4, "weights_column": first}
    n = steps.plan.n_tokens
    words = -(-n_ctx // PAGE)
    planes = index.n_head if index.apart else 1
    scores = Buffer(f"{label}.scores", n, planes * words * PAGE * 4)
    spec = IndexScores(
        steps.cache.kv,
        index.n_head,
        1,
        index.head_dim,
        1,
        pool=pool.index,
        latent=True,
        scale=1.0 / math.sqrt(index.head_dim * index.n_head),
        weighted=weights is not None,
        apart=index.apart,
        top=index.top,
        unit=index.unit,
        whole=index.pooled,
    )
    few = steps.plan.few_tokens
    given = {"qkv": queries, "stride": stride, **weighted, **pages}
    given |= {"scores": scores, "scores_stride": words * PAGE}
    if n > few:
        items = Grid(1, numbered("n_attn_items", pool.index))
        steps.emit(
            f"{label}.scores", spec, items, query_counts=range(few + 1, n + 1), few=0, **given
        )
    if few:
        items = Grid(1, numbered("n_attn_few", pool.index))
        steps.emit(f"{label}.few_scores", spec, items, query_counts=range(few + 1), few=1, **given)
    bits = Buffer(f"{label}.chosen", n, planes * words * WORD_BYTES, "u4")
    steps.emit(
        f"{label}.choose",
        Choose(index.top, index.unit, index.local, index.pooled, planes),
        Grid(planes, "n_tokens"),
        scores=scores,
        chosen=bits,
        scores_stride=words * PAGE,
        chosen_stride=words,
    )
    return Chosen(label, 0, bits)


def rotation_back(ops: PlanOps, table: int, n: int) -> Const:
    """Return the cosines and sines, f32 ``[dims]``, that rotate a key back by ``n`` positions, at
    the frequencies of rope table number ``table``.
    """
    inverse = ops.config.ropes[table].frequencies(ops.config.n_ctx_train)[0]
    angles = np.asarray(inverse) * -n
    turn = np.concatenate([np.cos(angles), np.sin(angles)])
    return ops.steps.weights.numbers(f"rope {table} back by {n}", turn)


_PARTS = "weight", "bias"


def ignore(steps: Steps, *unused: Rows | None) -> None:
    """List the weights of ``unused``, deferred rows that no step reads, as ignored, so that
    ``Plan.check`` accepts them.
    """
    stems: list[Any] = []
    for rows in unused:
        if isinstance(rows, NormOf):
            stems.append(rows.weight)
        if isinstance(rows, Product) and rows.of.y is None:
            stems += rows.of.stems
    names = {tensor_of(stem, part) for stem in stems for part in _PARTS}
    steps.plan.tensors_ignored |= steps.plan.tensors & names
