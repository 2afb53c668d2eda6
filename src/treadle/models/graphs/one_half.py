"""Nemotron-H: a decoder whose layers have one sublayer each: an FFN if the layer has an FFN width,
else a mixer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from treadle.models.ffns import FFNS
from treadle.models.ffns.gated import NORMS_BEFORE
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, build
from treadle.models.mixers import MIXERS
from treadle.models.structure import Sublayer, with_bias

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config; a layer with an FFN has no mixer, even if the file gives it
    heads.
    """
    config = reading.read(keys, arch)
    layers = (replace(at, mixer="" if at.ffn else at.mixer) for at in config.layers)
    return replace(config, layers=tuple(layers))


def half_of(layer: Layer) -> tuple[Sublayer]:
    """Return the only sublayer of a layer."""
    return (MIXERS[layer.mixer] if layer.mixer else _with_attn_norm(layer.ffn),)


@cache
def _with_attn_norm(name: str) -> Sublayer:
    """Return the FFN ``name`` with the input norm that mixers have, ``attn_norm``."""
    ffn = FFNS[name]
    rows = (row for row in ffn.rows if row not in NORMS_BEFORE)
    return replace(ffn, before="attn_norm", rows=(*with_bias("attn_norm", "n_embd"), *rows))


HALVES = replace(DECODER, build=lambda g: build(g, half_of), sublayers=half_of, read=read)
