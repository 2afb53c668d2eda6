"""DSpark of DeepSeek V4 (2026): a drafter of blocks whose layers are those of its target, on
several streams of states.

::

    h = norm(fc(the means of the target's streams before some layers, side by side))
    the row of each layer = norm(kv(h))              of each token that the target ran

    x = [embed(the text's last token, then the mask)] * n
    x = layer(x)                     attention to the last of those rows, and to all of the block
    logits = linear(norm(sum pre x)) + w2 w1[the token before]

Its layers have no units of compressed keys and no tables of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.drafters.dflash import (
    BLOCK_ROWS,
    DFLASH,
    KEYS,
    MARKOV,
    block_sizes,
    markov,
    read_layers,
    with_traits,
)
from treadle.models.drafters.target import FEATURES, build_nothing
from treadle.models.graphs import compressed
from treadle.models.graphs.compressed import RATIOS, TOKEN_LAYERS, UNIT_BASE
from treadle.models.graphs.streams import manifold
from treadle.models.graphs.streams.manifold import MANIFOLD

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows


def logits(g: Ops, x: Rows) -> None:
    """Declare the output "logits": the logits of a block's rows. ``x`` is not used."""
    manifold.logits(g, manifold.build(g))


def keys(g: Ops, x: Rows) -> None:
    """Store each layer's rows (key and value of all heads), computed from the target's states
    (input FEATURES: the means of its streams before several layers, side by side). ``x`` is not
    used.
    """
    assert g.config.draft is not None
    n_features = len(g.config.draft.layers) * g.config.n_target
    h = g.linear("fc", g.given(FEATURES, n_features), "fc")
    h = g.norm("enc.output_norm", h, "enc.output_norm")
    for i in range(g.config.n_layer):
        kv = g.linear(f"L{i}.attn.kv", h, f"blk.{i}.attn_kv")
        g.call("rows_stored", f"L{i}.attn.store", kv, layer=i, norm=f"blk.{i}.attn_kv_a_norm")


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the drafter's config. Raises UnsupportedError for layers with units of compressed
    keys, and for layers without a router (without experts, or with a table that chooses them).
    """
    n_layer = keys.integer("block_count", lo=1)
    keys.values = {RATIOS: [0] * n_layer, UNIT_BASE: 10000.0, **keys.values}
    found = read_layers(keys)
    config = compressed.read(keys, arch)
    for i, layer in enumerate(config.layers):
        if layer.compressed is None or layer.compressed.unit:
            keys.refuse(RATIOS, f"layer {i} of a drafter has units: treadle supports only 0")
        if layer.experts is None or layer.experts.by_token:
            keys.refuse(TOKEN_LAYERS, "treadle supports only drafters with routers")
    layers = tuple(replace(layer, causal=False) for layer in config.layers)
    return with_traits(keys, replace(config, layers=layers), found)


_MIX = tuple(row for row in MANIFOLD.rows if row.name.startswith("output_hc"))
DSPARK_STREAMS = replace(
    MANIFOLD,
    build=build_nothing,
    outputs={"logits": logits, KEYS: keys, MARKOV: markov},
    rows=(*BLOCK_ROWS, *_MIX),
    sizes=lambda config: {**MANIFOLD.sizes(config), **block_sizes(config)},
    read=read,
    apart=DFLASH.apart,
)
