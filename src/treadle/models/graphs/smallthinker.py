"""SmallThinker: a decoder whose routers read a layer's input: before attention, without a norm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, first, halves_of
from treadle.models.layer import build_layer

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows


def build(g: Ops) -> Rows:
    """Build a decoder whose layers begin with the router; return the last layer's states."""
    x = first(g)
    for i in g.config.stage_layers:
        x = g.layer(i, x)
        scores = g.linear(f"L{i}.ffn.router", x, f"blk.{i}.ffn_gate_inp")
        mixer, ffn = halves_of(g.config.layers[i])
        x = build_layer(g, i, x, mixer, replace(ffn, build=partial(_apply_experts, scores=scores)))
        x = g.steer(f"L{i}.control", x, layer=i)
    return g.layer(g.config.stage_layers.stop, x)


def _apply_experts(g: Ops, i: int, h: Rows, scores: Rows) -> Rows:
    return g.call("experts", f"L{i}.ffn", h, scores, layer=i)


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config. Raises FileError for a file without experts."""
    keys.integer("expert_count", lo=1)
    return reading.read(keys, arch)


EARLY = replace(DECODER, build=build, read=read)
