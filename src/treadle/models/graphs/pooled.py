"""GLM-5.3-Flash: streams of hidden states, and Kimi Delta Attention in most layers. The others have
latent attention without rope, to units of keys that an indexer chooses.

Its MTP layer has such attention, on a single stream, and reads the normed mean of the target's
streams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import Indexer
from treadle.models.graphs import reading
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP, MOST_HEADS, NORM_EPS
from treadle.models.graphs.kinds import INDEXER_TYPES, Q_RANK, has_indexer
from treadle.models.graphs.streams.manifold import MANIFOLD, read_hyper
from treadle.models.mixers.names import INDEX_SHARED, POOLED
from treadle.models.structure import last_with_keys

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

UNIT = "attention.indexer.kpool"
TAIL = "attention.indexer.kpool_select_tail"
LEAST_UNIT = 2
MOST_UNIT = 4096


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with streams of states, and indexers that choose units of keys."""
    config = reading.read(keys, arch)
    hyper = read_hyper(keys, config.n_embd)
    index = _read_indexer(keys)
    layers: list[Layer] = []
    chooser = -1
    for i, at in enumerate(config.layers):
        latent = at.latent and replace(at.latent, norm_eps=config.norm_eps)
        at = replace(at, hyper=hyper, latent=latent)
        if at.n_head_kv and has_indexer(keys, i):
            at = replace(at, mixer=POOLED, indexer=index)
            chooser = i
        elif at.n_head_kv:
            if not i or not layers[-1].n_head_kv:  # layers with a state do not pass choices on
                keys.fail(INDEXER_TYPES, f"layer {i} has no indexer", "one, or one just before it")
            at = replace(at, mixer=INDEX_SHARED, indexer=index, chosen_by=chooser)
        layers.append(at)
    return replace(config, layers=tuple(layers), parallel=False, n_streams=hyper.n)


def _read_indexer(keys: ArchMetadata) -> Indexer:
    """Return the sizes of an indexer that chooses units of keys. Raises FileError for sizes out of
    range, UnsupportedError for units that are no power of two, or queries that do not always see
    the last keys.
    """
    keys.integer(Q_RANK, lo=1, hi=SIZE_MAX)  # of which its queries are made
    unit = keys.integer(UNIT, lo=LEAST_UNIT, hi=MOST_UNIT)
    if unit & (unit - 1):
        keys.refuse(UNIT, f"is {unit}: treadle supports powers of two")
    top = keys.integer(INDEX_TOP, lo=unit, hi=SIZE_MAX)
    if top % unit:
        keys.fail(INDEX_TOP, f"is {top}", f"a multiple of {unit}")
    if not keys.flag(TAIL, True):
        keys.refuse(TAIL, "is false: treadle supports only queries that see the last keys")
    return Indexer(
        n_head=keys.integer(INDEX_HEADS, lo=1, hi=MOST_HEADS),
        head_dim=keys.integer(INDEX_DIM, lo=1, hi=SIZE_MAX),
        top=top // unit,
        rope="none",
        norm_eps=NORM_EPS,
        unit=unit,
        pooled=True,
    )


def mtp_layer(config: Config) -> Layer:
    """Return the record of an MTP layer of the model ``config``: it has its own indexer, and one
    stream of states.
    """
    last = config.layers[-1]
    return replace(
        last_with_keys(config),
        mixer=POOLED,
        chosen_by=-1,
        hyper=None,
        ffn=last.ffn,
        n_ff=last.n_ff,
        experts=last.experts,
        activation=last.activation,
    )


POOLED_GRAPH = replace(
    MANIFOLD,
    read=read,
    mtp_layer=mtp_layer,
    rows=tuple(row for row in MANIFOLD.rows if not row.name.startswith("output_hc")),
)
