"""The choice of keys in sparse attention, in float64 and plain numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.reference import Array, Layer, rms_norm, rope

Choice = npt.NDArray[np.bool_]
# The last choices by layer, with the tensors that they were made of: later layers may share one.
_made: dict[int, tuple[object, Choice]] = {}


def chosen_keys(maps: Layer, h: Array, rank: Array) -> Choice:
    """The keys that each query sees, [query, key]; ``rank``: what its queries are made of."""
    at = maps.at
    index = at.indexer
    assert index is not None
    if at.chosen_by >= 0:
        source, seen = _made[at.chosen_by]
        assert source is maps.tensor
        return seen
    q = maps.linear(rank, "indexer.attn_q_b").reshape(len(h), index.n_head, -1)
    k = maps.linear(h, "indexer.attn_k")
    k = k - k.mean(-1, keepdims=True)
    k = k / np.sqrt((k**2).mean(-1, keepdims=True) + index.norm_eps)
    blk = f"blk.{maps.i}.indexer"
    k = k * maps.tensor(f"{blk}.k_norm.weight") + maps.tensor(f"{blk}.k_norm.bias")
    if index.pooled:
        seen = pooled(maps, h, q, k)
        _made[maps.i] = maps.tensor, seen
        return seen
    assert at.rope is not None
    inv_freq, factor = maps.config.ropes[at.rope].frequencies(maps.config.n_ctx_train)
    n = 2 * len(inv_freq)
    part = slice(index.first, index.first + n)
    for x in (q, k[:, None]):
        x[..., part] = rope(x[..., part], inv_freq, factor, index.rope)
    scores = np.maximum(np.einsum("qhd,kd->qhk", q, k), 0)
    scores = np.einsum("qhk,qh->qk", scores, maps.linear(h, "indexer.proj"))
    seen = best(scores, index.top)
    _made[maps.i] = maps.tensor, seen
    return seen


def pooled(maps: Layer, h: Array, q: Array, k: Array) -> Choice:
    """The keys that each query sees where units compete, each by a weighted mean of its keys."""
    index = maps.at.indexer
    assert index is not None
    n = len(h) // index.unit
    gate = maps.linear(h, "indexer_compressor_gate")[: n * index.unit]
    gate = gate.reshape(n, index.unit, -1)
    gate = gate + maps.tensor(f"blk.{maps.i}.indexer_compressor_ape.weight")
    p = np.exp(gate - gate.max(1, keepdims=True)) if n else gate
    keys = k[: n * index.unit].reshape(n, index.unit, -1)
    units = (p * keys).sum(1) / p.sum(1)
    scores = np.maximum(np.einsum("qhd,kd->qhk", q, units), 0)
    scores = np.einsum("qhk,qh->qk", scores, maps.linear(h, "indexer.proj"))
    seen = np.zeros((len(h), len(h)), bool)
    for i, row in enumerate(scores):
        whole = (i + 1) // index.unit
        for unit in [*np.argsort(-row[:whole], kind="stable")[: index.top], whole]:
            seen[i, unit * index.unit : (unit + 1) * index.unit] = True
    return seen


def best(scores: Array, top: int) -> Choice:
    """The ``top`` largest of those that each query sees; the first of equal ones."""
    seen = np.zeros(scores.shape, bool)
    for i, row in enumerate(scores):
        seen[i, np.argsort(-row[: i + 1], kind="stable")[:top]] = True
    return seen


def chosen_blocks(maps: Layer, h: Array) -> Choice:
    """The keys that each query sees where whole blocks compete, [query, key]."""
    at = maps.at
    index = at.indexer
    assert index is not None
    assert at.rope is not None
    inv_freq, factor = maps.config.ropes[at.rope].frequencies(maps.config.n_ctx_train)
    part = slice(0, 2 * len(inv_freq))
    blk = f"blk.{maps.i}.indexer"

    def placed(x: Array, name: str, every: int) -> Array:
        x = rms_norm(x, maps.tensor(f"{blk}.{name}_norm.weight"), maps.config.norm_eps)
        spread = np.zeros((len(x) * every, *x.shape[1:]))
        spread[::every] = x  # at the position where a block begins
        spread[..., part] = rope(spread[..., part], inv_freq, factor, index.rope)
        return spread[::every]

    q = placed(maps.linear(h, "indexer.q_proj").reshape(len(h), index.n_head, -1), "q", 1)
    n = len(h) // index.unit
    k = maps.linear(h, "indexer.k_proj")[: n * index.unit]
    k = placed(k.reshape(n, index.unit, -1).mean(1)[:, None], "k", index.unit)[:, 0]
    scores = np.maximum(np.einsum("qhd,kd->qhk", q, k), 0).sum(1)
    seen = np.zeros((len(h), len(h)), bool)
    for i, row in enumerate(scores):
        whole = (i + 1) // index.unit
        best_ = np.argsort(-row[:whole], kind="stable")[: index.top]
        for block in [*best_, whole]:
            seen[i, block * index.unit : (block + 1) * index.unit] = True
    return seen


def chosen_by_head(maps: Layer, h: Array) -> Choice:
    """The keys that each query sees where each head of the indexer chooses blocks for a key head,
    [n_head, query, key].
    """
    at = maps.at
    index = at.indexer
    assert index is not None
    assert at.rope is not None
    inv_freq, factor = maps.config.ropes[at.rope].frequencies(maps.config.n_ctx_train)
    part = slice(0, 2 * len(inv_freq))

    def placed(name: str) -> Array:
        x = maps.linear(h, f"indexer.{name}_proj").reshape(len(h), -1, index.head_dim)
        weight = maps.tensor(f"blk.{maps.i}.indexer.{name}_norm.weight")
        x = rms_norm(x, weight, maps.config.norm_eps)
        x[..., part] = rope(x[..., part], inv_freq, factor, index.rope)
        return x

    scores = np.einsum("qhd,kd->hqk", placed("q"), placed("k")[:, 0])
    n = len(h)
    seen = np.zeros((index.n_head, n, n), bool)
    for head, rows in enumerate(scores):
        for i, row in enumerate(rows):
            own = i // index.unit
            blocks = [row[b * index.unit : (b + 1) * index.unit] for b in range(own + 1)]
            blocks[own] = row[own * index.unit : i + 1]
            tops = np.array([block.max() for block in blocks])
            tops[max(0, own + 1 - index.local) :] = np.inf
            for b in np.argsort(-tops, kind="stable")[: index.top]:
                seen[head, i, b * index.unit : (b + 1) * index.unit] = True
    return seen.repeat(at.n_head // index.n_head, 0)
