"""MiniMax M3: a decoder whose layers with experts attend to blocks of keys that an indexer
chooses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import Indexer
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP, MOST_HEADS
from treadle.models.mixers.names import BLOCKS

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

BLOCK_SIZE = "attention.indexer.block_size"
LOCAL = "attention.indexer.local_blocks"
MOST_UNIT = 4096


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with an indexer in each layer that has experts."""
    config = reading.read(keys, arch)
    layers = [
        replace(at, mixer=BLOCKS, indexer=_read_indexer(keys, config, at)) if at.experts else at
        for at in config.layers
    ]
    return replace(config, layers=tuple(layers))


def _read_indexer(keys: ArchMetadata, config: Config, at: Layer) -> Indexer:
    n_head = keys.integer(INDEX_HEADS, lo=1, hi=MOST_HEADS)
    if n_head != at.n_head_kv:
        keys.refuse(INDEX_HEADS, f"is {n_head}: treadle supports one for each of {at.n_head_kv}")
    top = keys.integer(INDEX_TOP, lo=1, hi=SIZE_MAX)
    turned = config.ropes[0].dims if config.ropes else 1
    return Indexer(
        n_head=n_head,
        head_dim=keys.integer(INDEX_DIM, lo=turned, hi=SIZE_MAX),
        top=top,
        rope=config.arch.rope,
        norm_eps=config.norm_eps,
        unit=keys.integer(BLOCK_SIZE, lo=1, hi=MOST_UNIT),
        local=keys.integer(LOCAL, lo=0, hi=top),
        apart=True,
    )


BLOCKS_GRAPH = replace(DECODER, read=read)
