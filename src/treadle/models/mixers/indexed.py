"""Latent attention to the keys that a lightning indexer chooses (DeepSeek-V3.2, 2025)::

    score(key) = sum over heads of w max(0, q . k)      q: a product of the query rank
                                                        w: the token's weight of each head

Each token sees the keys with the largest scores. Some layers have no indexer, and see the keys that
the last indexer before them has chosen (GLM-5.2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.models.config import PoolSpec
from treadle.models.mixers.latent import LATENT, build
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Indexer, Layer
    from treadle.models.ops import Ops, Rows


def choose(g: Ops, i: int, h: Rows, rank: Rows) -> Rows:
    """Return the keys that each token sees in layer ``i``, as the op ``chosen`` returns them; later
    layers may share them. ``h``: the layer's normed states; ``rank``: the normed query rank, the
    low-rank values of which queries are made, f32 ``[N, n_q_rank]``.
    """
    index = _indexer_of(g.config.layers[i])
    at = f"L{i}.index"
    blk = f"blk.{i}.indexer."

    def make(g: Ops) -> Rows:
        q = g.linear(f"{at}.q", rank, f"{blk}attn_q_b")
        k, weights = g.linears(f"{at}.k_weights", h, [f"{blk}attn_k", f"{blk}proj"])
        k = g.norm(f"{at}.k_norm", k, f"{blk}k_norm", centred=True, eps=index.norm_eps)
        return g.call("chosen", at, q, k, weights, layer=i)

    return g.once(at, make)


def shared(g: Ops, i: int, h: Rows, rank: Rows) -> Rows:
    """Return the keys that each token sees in layer ``i``: those that ``choose`` has returned for
    an earlier layer (``Layer.chosen_by``), as the op ``chosen`` returns them. ``h`` and ``rank``
    are not used. Raises UnsupportedError if that layer is in another pipeline stage.
    """
    of = g.config.layers[i].chosen_by

    def missing(g: Ops) -> Rows:
        raise UnsupportedError(
            f"L{i}: its keys are chosen in layer {of}, which is in another stage: cut the model "
            "before a layer with an indexer"
        )

    return g.once(f"L{of}.index", missing)


def _indexer_of(layer: Layer) -> Indexer:
    assert layer.indexer is not None
    return layer.indexer


def _sizes(layer: Layer) -> Sizes:
    index = _indexer_of(layer)
    return {
        **LATENT.sizes(layer),
        "n_index_head": index.n_head,
        "n_index": index.head_dim,
        "n_index_q": index.n_head * index.head_dim,
    }


def _memory(layer: Layer) -> tuple[PoolSpec, ...]:
    dims = _indexer_of(layer).head_dim
    (rows,) = LATENT.memory(layer)
    assert isinstance(rows, PoolSpec)
    return rows, PoolSpec("kv_index", (), 1, dims, dims, 0, latent=True, index=True)


INDEXER_ROWS = (
    TensorRow("indexer.attn_q_b.weight", ("n_index_q", "n_q_rank")),
    TensorRow("indexer.attn_k.weight", ("n_index", "n_embd")),
    TensorRow("indexer.k_norm.weight", ("n_index",)),
    TensorRow("indexer.k_norm.bias", ("n_index",)),
    TensorRow("indexer.proj.weight", ("n_index_head", "n_embd")),
)
LATENT_INDEXED = replace(
    LATENT,
    build=partial(build, choice=choose),
    rows=(*LATENT.rows, *INDEXER_ROWS),
    sizes=_sizes,
    memory=_memory,
)
LATENT_INDEX_SHARED = replace(LATENT, build=partial(build, choice=shared))
