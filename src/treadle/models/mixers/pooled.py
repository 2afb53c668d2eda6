"""Latent attention to units of keys that a lightning indexer chooses (GLM-5.3-Flash, 2026)::

    unit = sum_t softmax_t(gate(h_t) + bias_t) norm(k(h_t))     over the unit's tokens t
    score(unit) = sum over heads of w max(0, q . unit)          q: a product of the query rank
                                                                w: the token's weight of each head

Each token sees the keys of the units with the largest scores, and those after the last whole unit.
Some layers have no indexer, and see the keys that the last indexer before them has chosen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from treadle.models.config import PoolSpec, StateSpec
from treadle.models.mixers.compressed import SUMS
from treadle.models.mixers.indexed import INDEXER_ROWS, LATENT_INDEXED
from treadle.models.mixers.latent import LATENT, build
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Indexer, Layer
    from treadle.models.ops import Ops, Rows


def choose(g: Ops, i: int, h: Rows, rank: Rows) -> Rows:
    """Return the keys that each token sees in layer ``i``, as the op ``units_chosen`` returns them;
    later layers may share them. ``h``: the layer's normed states; ``rank``: the normed query rank,
    the low-rank values of which queries are made, f32 ``[N, n_q_rank]``.
    """
    index = _indexer_of(g.config.layers[i])
    at = f"L{i}.index"
    blk = f"blk.{i}.indexer"

    def make(g: Ops) -> Rows:
        q = g.linear(f"{at}.q", rank, f"{blk}.attn_q_b")
        names = [f"{blk}.attn_k", f"{blk}_compressor_gate", f"{blk}.proj"]
        k, gate, weights = g.linears(f"{at}.k_weights", h, names)
        k = g.norm(f"{at}.k_norm", k, f"{blk}.k_norm", centred=True, eps=index.norm_eps)
        given = {"layer": i, "stem": f"{blk}_compressor", "index": True}
        g.call("units_stored", f"{at}.units", k, gate, **given)
        return g.call("units_chosen", at, q, weights, layer=i)

    return g.once(at, make)


def _indexer_of(layer: Layer) -> Indexer:
    assert layer.indexer is not None
    return layer.indexer


def _sizes(layer: Layer) -> Sizes:
    return {**LATENT_INDEXED.sizes(layer), "n_unit": _indexer_of(layer).unit}


def _memory(layer: Layer) -> tuple[PoolSpec | StateSpec, ...]:
    index = _indexer_of(layer)
    dims = index.head_dim
    units = PoolSpec("kv_index", (), 1, dims, dims, 0, latent=True, index=True, unit=index.unit)
    return *LATENT.memory(layer), units, StateSpec("unit_sums", (), SUMS * dims)


LATENT_POOLED = replace(
    LATENT,
    build=partial(build, choice=choose),
    rows=(
        *LATENT.rows,
        *INDEXER_ROWS,
        TensorRow("indexer_compressor_gate.weight", ("n_index", "n_embd")),
        TensorRow("indexer_compressor_ape.weight", ("n_unit", "n_index")),
    ),
    sizes=_sizes,
    memory=_memory,
)
