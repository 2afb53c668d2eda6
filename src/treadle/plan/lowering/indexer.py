"""CPU lowering of sparse attention's choice of keys: the op ``chosen`` of
``models/mixers/indexed.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from treadle.kernels.attention.indexer import Choose, IndexScores, IndexStore
from treadle.kernels.attention.records import PAGE, WORD_BYTES
from treadle.kernels.spec import Grid, numbered
from treadle.models.ops import tensor_of
from treadle.plan.lowering.deferred import Chosen, Product
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.models.ops import Rows
    from treadle.plan.lowering.ops import CpuOps


def chosen(ops: CpuOps, label: str, q: Rows, k: Rows, weights: Rows, *, layer: int) -> Rows:
    """Store the indexer's keys ``k``, and return the keys that it chooses for queries ``q``.

    ``q`` is ``[N, heads * head_dim]``, ``k`` is normed, ``weights`` has one for each head. In a
    context that no query sees more of than its choice, all keys are chosen, and nothing but the
    keys is computed.
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
    )
    pages: dict[str, Any] = {
        "pool": pool.const,
        "page_bytes": pool.cell_bytes,
        "layer_off": pool.layer_off(layer),
    }
    given: dict[str, Any] = {"key": rows, "k_stride": rows.row_bytes // 4, "k_column": column, **pages}
    if every:
        for unused in (q, weights):
            if isinstance(unused, Product) and unused.of.y is None:
                names = [tensor_of(stem, part) for stem in unused.of.stems for part in _PARTS]
                steps.plan.tensors_ignored |= steps.plan.tensors & set(names)
        steps.emit(f"{label}.store", store, Grid(1, "n_tokens"), **given)
        return Chosen(label, 0, None)
    queries = ops.floats(q)
    stride = queries.row_bytes // 4
    steps.emit(f"{label}.store", store, Grid(1, "n_tokens"), q=queries, stride=stride, **given)
    factors, first = ops.place(weights)
    n = steps.plan.n_tokens
    words = -(-n_ctx // PAGE)
    scores = Buffer(f"{label}.scores", n, words * PAGE * 4)
    spec = IndexScores(
        steps.cache.kv,
        index.n_head,
        1,
        index.head_dim,
        1,
        pool=pool.index,
        latent=True,
        scale=1.0 / math.sqrt(index.head_dim * index.n_head),
        top=index.top,
        unit=index.unit,
    )
    few = steps.plan.few_tokens
    for which, field, serves in (
        (0, "n_attn_items", range(few + 1, n + 1)),
        (1, "n_attn_few", range(few + 1)),
    ):
        if not serves or (which and not few):
            continue
        steps.emit(
            f"{label}.few_scores" if which else f"{label}.scores",
            spec,
            Grid(1, numbered(field, pool.index)),
            serves=serves,
            qkv=queries,
            stride=stride,
            weights=factors,
            weights_stride=factors.row_bytes // 4,
            weights_column=first,
            scores=scores,
            scores_stride=words * PAGE,
            few=which,
            **pages,
        )
    bits = Buffer(f"{label}.chosen", n, words * WORD_BYTES, "u4")
    steps.emit(
        f"{label}.choose",
        Choose(index.top, index.unit, index.local),
        Grid(1, "n_tokens"),
        scores=scores,
        chosen=bits,
        scores_stride=words * PAGE,
        chosen_stride=words,
    )
    return Chosen(label, 0, bits)


_PARTS = "weight", "bias"
