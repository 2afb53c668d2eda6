"""Attention weights in numpy: the softmax that the attention kernels compute and do not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.kernels.attention.relative_bias import row_values
from treadle.kernels.attention.relative_logits import farthest
from treadle.kernels.attention.work_item import alibi_slopes
from treadle.kernels.run_state import PAGE

if TYPE_CHECKING:
    from treadle.kernels.attention.paged import Attention


def attention_weights(
    spec: Attention,
    q: npt.NDArray[np.float32],
    start: int,
    read_page: Callable[[int], np.ndarray | None],
    *,
    chunk: int = 0,
    sinks: np.ndarray | None = None,
    distances: np.ndarray | None = None,
    rel_logits: np.ndarray | None = None,
) -> npt.NDArray[np.float32]:
    """Return the weights of queries over all keys of their sequence, float32
    ``[n_head, n, start + n]``, 0 for keys that a query does not see.

    q: queries as the attention step reads them, rotated and scaled, ``[n, n_head * head_dim]``, of
    the tokens from position ``start`` on. read_page: returns the bytes of the layer's part of the
    sequence's i-th page, None if the page was freed because a window has passed it. chunk: the
    length of the chunks within which tokens see each other, 0 for none. sinks: a score of each head
    without a key. distances: biases by head and distance (``relative_bias.py``). rel_logits: those
    of each query, ``[n, n_head * relative_values]`` (``relative_logits.py``).
    """
    n = len(q)
    end = start + n
    per = spec.n_head // spec.n_head_kv
    keys = np.zeros((spec.n_head_kv, -(-end // PAGE) * PAGE, spec.head_dim))
    for i in range(-(-end // PAGE)):
        page = read_page(i)
        if page is None:
            continue
        for head in range(spec.n_head_kv):
            part = page[head * spec.page.head_bytes :][: spec.page.head_bytes]
            keys[head, i * PAGE : (i + 1) * PAGE] = spec.page.read_ref(part)[0]
    keys = keys[:, :end]
    place = np.arange(end)
    position = np.arange(start, end)[:, None]
    hidden = (place > position) & spec.causal
    if spec.window:
        hidden = hidden | (abs(place - position) >= spec.window)
    if chunk:
        hidden = hidden | (place < position // chunk * chunk)
    queries = q[:, : spec.n_head * spec.head_dim].astype(np.float64)
    queries = queries.reshape(n, spec.n_head, spec.head_dim)
    weights = np.empty((spec.n_head, n, end), np.float32)
    for head in range(spec.n_head):
        score = queries[:, head] @ keys[head // per].T
        if spec.softcap:
            score = spec.softcap * np.tanh(score / spec.softcap)
        if spec.alibi:
            score = score - alibi_slopes(spec.n_head, spec.alibi)[head] * abs(place - position)
        if distances is not None:
            most = spec.reach + PAGE
            row = distances.reshape(spec.n_head, row_values(spec.reach))[head]
            score = score + row[np.clip(place - position, -most, most - 1) + most]
        if rel_logits is not None:
            begin = farthest(spec.rel_extent)
            rows = rel_logits.reshape(n, spec.n_head, -1)[:, head].astype(np.float64)
            at = np.clip(place - position - begin, 0, rows.shape[1] - 1)
            score = score + np.take_along_axis(rows, at, 1)
        score = np.where(hidden, -np.inf, score)
        top = score.max(1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[head])
        p = np.exp(score - top)
        total = p.sum(1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[head] - top)
        weights[head] = p / total
    return weights
