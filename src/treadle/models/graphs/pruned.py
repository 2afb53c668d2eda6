"""A pruned decoder (Nemotron 49B to 253B): some layers have no attention, no FFN, or neither."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config. A layer with query heads and no key heads has one matrix instead
    of attention; a layer without heads has no mixer.
    """
    config = reading.read(keys, arch)
    heads = keys.per_layer("attention.head_count", config.n_layer, lo=0)
    layers = (
        replace(at, mixer=at.mixer if n else "") for at, n in zip(config.layers, heads, strict=True)
    )
    return replace(config, layers=tuple(layers))


THINNED = replace(DECODER, read=read)
