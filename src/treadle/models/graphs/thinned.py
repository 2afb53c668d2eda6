"""A decoder that was made smaller: some layers have lost their attention, their FFN, or both."""

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
    """Heads without keys are those of one matrix in place of attention; no heads, of nothing."""
    config = reading.read(keys, arch)
    heads = keys.per_layer("attention.head_count", config.n_layer, lo=0)
    layers = (
        replace(at, mixer=at.mixer if n else "") for at, n in zip(config.layers, heads, strict=True)
    )
    return replace(config, layers=tuple(layers))


THINNED = replace(DECODER, read=read)
