"""Attention to blocks of keys that an indexer chooses.

Qwen Sparse Attention (2026), with a gate::

    score(block) = sum over heads of max(0, q . k)      k: the mean of the block's keys, normed

Each token sees the blocks with the largest scores, and the keys after the last whole block.

MiniMax Sparse Attention (2026)::

    score(block) = the largest q . k of its keys        for each head of the indexer

For each key head of attention, one head of the indexer chooses blocks; its query heads see these,
and always the last ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from treadle.models.config import PoolSpec, StateSpec
from treadle.models.mixers.attention import ATTENTION, ATTENTION_GATE, build
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Indexer, Layer
    from treadle.models.ops import Ops, Rows


def choose(g: Ops, i: int, h: Rows) -> Rows:
    """Return the keys that each token sees in layer ``i``, as the op ``chosen`` returns them, for
    the layer's normed states ``h``. Blocks are scored by the mean of their keys.
    """
    index = _indexer_of(g.config.layers[i])
    at = f"L{i}.index"
    blk = f"blk.{i}.indexer."
    q = g.linear(f"{at}.q", h, f"{blk}q_proj")
    k = g.linear(f"{at}.k", h, f"{blk}k_proj")
    k = g.call("moving_mean", f"{at}.mean", k, layer=i, n=index.unit)
    k = g.norm(f"{at}.k_norm", k, f"{blk}k_norm")
    q = g.norm(f"{at}.q_norm", q, f"{blk}q_norm", heads=index.n_head)
    return g.call("chosen", at, q, k, layer=i)


def choose_by_head(g: Ops, i: int, h: Rows) -> Rows:
    """Return the keys that each token sees in layer ``i``, for each key head of attention, as the
    op ``chosen`` returns them; ``h``: the layer's normed states. Blocks are scored by their best
    key.
    """
    index = _indexer_of(g.config.layers[i])
    at = f"L{i}.index"
    blk = f"blk.{i}.indexer."
    q = g.linear(f"{at}.q", h, f"{blk}q_proj")
    k = g.linear(f"{at}.k", h, f"{blk}k_proj")
    k = g.norm(f"{at}.k_norm", k, f"{blk}k_norm")
    q = g.norm(f"{at}.q_norm", q, f"{blk}q_norm", heads=index.n_head)
    return g.call("chosen", at, q, k, layer=i)


def _indexer_of(layer: Layer) -> Indexer:
    assert layer.indexer is not None
    return layer.indexer


def _sizes(layer: Layer) -> Sizes:
    index = _indexer_of(layer)
    sizes = {"n_index": index.head_dim, "n_index_q": index.n_head * index.head_dim}
    return {**ATTENTION_GATE.sizes(layer), **sizes}


def _memory(layer: Layer) -> tuple[PoolSpec | StateSpec, ...]:
    index = _indexer_of(layer)
    dims = index.head_dim
    keys = PoolSpec("kv_index", (), 1, dims, dims, 0, latent=True, index=True)
    # of keys whose mean is not complete yet
    last = (StateSpec("index_keys", (), (index.unit - 1) * dims),) if index.pooled else ()
    return *ATTENTION_GATE.memory(layer), keys, *last


INDEXER_ROWS = (
    TensorRow("indexer.q_proj.weight", ("n_index_q", "n_embd")),
    TensorRow("indexer.k_proj.weight", ("n_index", "n_embd")),
    TensorRow("indexer.q_norm.weight", ("n_index",)),
    TensorRow("indexer.k_norm.weight", ("n_index",)),
)


GATE_INDEXED_BLOCKS = replace(
    ATTENTION_GATE,
    build=partial(build, choice=choose),
    rows=(*ATTENTION_GATE.rows, *INDEXER_ROWS),
    sizes=_sizes,
    memory=_memory,
)
ATTENTION_BLOCKS = replace(
    GATE_INDEXED_BLOCKS,
    build=partial(build, choice=choose_by_head),
    rows=(*ATTENTION.rows, *INDEXER_ROWS),
)
