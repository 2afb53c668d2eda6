"""Talkie: norms without weights, and after each layer the normed embeddings again, times a factor.

::

    e = norm(embed(ids))
    x = e
    for each layer: x = layer(x) + factor * e
    logits = linear(norm(x))

Queries and keys are normed after the rope, and queries have a factor for each head. Without weights
this equals a norm before the rope. The original model rotates in the opposite direction; GGUF files
account for it by the sign of half of the rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, halves_of
from treadle.models.layer import build_layer
from treadle.models.structure import Sublayer, TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

EMBD_SKIP = "embd_skip"  # GGUF's layer_output_scale, which scales a layer's sum elsewhere


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with norms of queries and keys."""
    config = reading.read(keys, arch)
    return replace(config, layers=tuple(replace(at, qk_norm=True) for at in config.layers))


def build(g: Ops) -> Rows:
    """Build a decoder's layers, each followed by the sum with the embeddings; return the states
    after the last.
    """
    embd = g.embed("token_embd", "token_embd", g.config.embd_scale)
    x = g.norm("token_embd_norm", embd, "")
    for i in g.config.stage_layers:
        x = build_layer(g, i, g.layer(i, x), *halves_of(g.config.layers[i]))
        factor = f"blk.{i}.{EMBD_SKIP}.weight"
        x = g.add(x, g.call("normed_times", f"L{i}.skip", embd, factor=factor))
        x = g.steer(f"L{i}.control", x, layer=i)
    return g.layer(g.config.stage_layers.stop, x)


SKIP = built_by_graph("skip", (TensorRow(f"{EMBD_SKIP}.weight", ("one",)),))


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and the tensor of its factor of the embeddings."""
    return *halves_of(layer), SKIP


# No "stream": layers of later stages would need the embeddings.
TALKIE = replace(
    DECODER,
    build=build,
    outputs=UNSTAGED_OUTPUTS,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), SKIP),
)
