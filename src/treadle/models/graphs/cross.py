"""Decoders with cross attention, and the keys and values of the encoder's rows that they attend to.

::

    x = embed(ids) + position
    x = layer(x)                         attention, cross attention, FFN: models/layer.py
    logits = linear(norm(x))

    keys and values of each layer = products of the encoder's rows      CROSS_KEYS, once per input
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from treadle.models.graphs.decoder import DECODER, build
from treadle.models.mixers import MIXERS
from treadle.models.mixers.cross import CROSS, build_keys

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sublayer

ENCODED = "encoded"  # the encoder's rows that a run of CROSS_KEYS is given


def thirds_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's three sublayers: attention, cross attention and FFN."""
    from treadle.models.ffns import FFNS

    return MIXERS[layer.mixer], CROSS, FFNS[layer.ffn]


def _keys(g: Ops) -> Rows:
    """Store all layers' keys and values of the encoder's rows, f32 ``[N, n_embd]``, which the host
    writes to the input ENCODED; return these rows.
    """
    encoded = g.given(ENCODED, g.config.n_embd)
    for i in range(g.config.n_layer):
        build_keys(g, i, encoded)
    return encoded


def _read(keys: ArchMetadata, arch: Arch) -> NoReturn:
    raise AssertionError("read by speech/read.py")


CROSS_DECODER = replace(
    DECODER,
    build=lambda g: build(g, thirds_of),
    outputs={"logits": DECODER.outputs["logits"], "states": DECODER.outputs["states"]},
    sublayers=thirds_of,
    read=_read,
)
CROSS_KEYS = replace(
    CROSS_DECODER,
    build=_keys,
    outputs={"keys": lambda g, x: None},
)
