"""Weights of the decoder's cross attention: the rows of the sound that it attends to
at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.prepared_plan import PlanKey
from treadle.errors import ContextFullError, TreadleError
from treadle.kernels.run_state import PAGE

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.speech.batch import EncodedWindow


def cross_weights(
    engine: Engine, window: EncodedWindow, ids: Sequence[int], heads: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return the cross-attention weights of ``heads`` (layer, head) when the decoder reads ``ids``:
    f32 ``[n_heads, n_ids, n_keys]``; ``n_keys``: rows of the encoded window.

    Raises TreadleError for no ids or a closed window, ContextFullError for too many ids.
    """
    n = len(ids)
    if not n:
        raise TreadleError("no ids")
    if n > engine.n_ctx:
        raise ContextFullError(f"{n} ids: the decoder reads {engine.n_ctx}")
    engine.check_ids(ids)
    with engine.lock:
        queries = _queries(engine, window, ids, sorted({layer for layer, _ in heads}))
        made = [_weights(engine, window, queries[layer], layer, head) for layer, head in heads]
    return np.stack(made) if made else np.empty((0, n, window.keys.n_keys), np.float32)


def _queries(
    engine: Engine, window: EncodedWindow, ids: Sequence[int], layers: Sequence[int]
) -> dict[int, np.ndarray]:
    """Run ``ids`` in a temporary sequence that attends to ``window``; return by layer the queries
    of its cross attention times the scale of scores, f32 ``[n_ids, n_head, head_dim]``. ``layers``
    must be in ascending order.
    """
    row = engine.cache.sequence()
    row.attend_to(window.keys.hold())
    found = {}
    try:
        key = PlanKey(len(ids), 1, "logits")
        ready, _ = engine.lay_out(key, [BatchItem(row, list(ids), 1)])
        steps = ready.plan.steps
        places = {step.label: i for i, step in enumerate(steps)}
        begin = 0
        for layer in layers:
            end = places[f"L{layer}.cross.scale"] + 1
            engine.device.run(ready.program, range(begin, end))
            begin = end
            at = engine.config.layers[layer]
            rows = ready.rows(steps[end - 1].args["qkv"], len(ids), at.n_head * at.head_dim)
            found[layer] = rows.reshape(len(ids), at.n_head, at.head_dim).copy()
        engine.check_files()
    finally:
        row.close()
    return found


def _weights(
    engine: Engine, window: EncodedWindow, queries: np.ndarray, layer: int, head: int
) -> np.ndarray:
    """Return one head's cross-attention weights, f32 ``[n_ids, n_keys]``. ``queries``: those of
    ``layer``, as ``_queries`` returns them.
    """
    at = engine.config.layers[layer]
    pool = engine.cache.cross_of(layer)
    n_keys = window.keys.n_keys
    which = engine.cache.cross.index(pool)
    group = head // (at.n_head // at.n_head_kv)
    place = 0, pool.cell_bytes, pool.layer_off(layer), group
    pages = [
        pool.layout.read_ref(pool.layout.head_ref(pool.read(page), *place))[0]
        for page in window.keys.pages[which]
    ]
    keys = np.concatenate(pages)[:n_keys]
    assert len(pages) * PAGE >= n_keys
    scores = queries[:, head].astype(np.float64) @ keys.T
    scores -= scores.max(1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(1, keepdims=True)
    made: np.ndarray = weights.astype(np.float32)
    return made
