"""Kimi K3: each sublayer also reads states from between earlier layers (attention residuals).

::

    x = embed(ids); blocks = []
    for each layer:
        h = mix(blocks, x)
        every n-th layer, the first one included:
            blocks += x; x = mixer(norm(h))             the sum begins again
        the others:
            x = x + mixer(norm(h))
        x = x + ffn(norm(mix(blocks, x)))
    logits = linear(norm(mix(blocks, x)))

``mix`` is a weighted sum of the states in ``blocks`` and ``x``; a token's weights are the softmax
of their scores. Mixers are Kimi Delta Attention, or latent attention without rope, each with a gate
for every value. Experts have a smaller width than the states, and activations are SiTU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.kernels.activations import situ_name
from treadle.models.ffns import ROUTED_EXPERTS
from treadle.models.graphs import kimi
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, first, halves_of
from treadle.models.graphs.kinds import LATENT
from treadle.models.keys import N_LAYER_MAX
from treadle.models.layer import normed_for
from treadle.models.structure import Sublayer, TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

BLOCK = "attn_res.block_size"  # layers of a block; the states before each block are kept
EXPERT_WIDTH = "expert_latent_length"
BOUND = "activation.situ_beta"  # of gates
BOUND_UP = "activation.situ_linear_beta"  # of what is gated; 0 or less: none
MOST_KEPT = 64
_WIDE = "latent_wide"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the layers of a block, the width of experts and the bounds of
    activations. Raises UnsupportedError for more than MOST_KEPT blocks.
    """
    config = kimi.read(keys, arch)
    attn_res_block_size = keys.integer(BLOCK, lo=1, hi=N_LAYER_MAX)
    if -(-config.n_layer // attn_res_block_size) > MOST_KEPT:
        what = f"treadle supports up to {MOST_KEPT} blocks of layers"
        keys.refuse(BLOCK, f"is {attn_res_block_size} for {config.n_layer} layers: {what}")
    n_latent = keys.integer(EXPERT_WIDTH, 0, lo=0, hi=SIZE_MAX)
    bounds = keys.number(BOUND, lo=1e-3, hi=1e6), keys.number(BOUND_UP, lo=-1e6, hi=1e6)
    activation = situ_name(bounds[0], max(0.0, bounds[1]))
    layers: list[Layer] = []
    for at in config.layers:
        experts = at.experts and replace(at.experts, n_latent=n_latent, activation=activation)
        ffn = ROUTED_EXPERTS if n_latent and at.ffn == "experts" else at.ffn
        mixer = at.mixer
        if mixer.startswith(LATENT):
            mixer = f"{_WIDE}{mixer.removeprefix(LATENT)}"
        layers.append(replace(at, mixer=mixer, ffn=ffn, experts=experts, activation=activation))
    return replace(
        config, layers=tuple(layers), parallel=False, attn_res_block_size=attn_res_block_size
    )


# -- the data flow --------------------------------------------------------------------------------


def build(g: Ops) -> Rows:
    """Build the layers; return ``mix(blocks, x)``: the weighted sum of the states before each block
    of layers and those after the last layer.
    """
    every = g.config.attn_res_block_size
    n_kept = -(-g.config.n_layer // every)
    x = first(g)
    kept: list[Rows] = []  # the blocks' states after each of its states was added
    for i in g.config.stage_layers:
        x = g.layer(i, x)
        mixer, ffn = halves_of(g.config.layers[i])
        h = _mixed(g, f"L{i}.{mixer.label}.residuals", x, kept, f"blk.{i}.attn_res_score")
        begins = i % every == 0
        if begins:
            kept.append(g.call("concatenated", f"L{i}.kept", x, *kept[-1:], at=len(kept), n=n_kept))
        h = mixer.build(g, i, normed_for(g, i, h, mixer))
        x = h if begins else g.add(x, h)
        h = _mixed(g, f"L{i}.{ffn.label}.residuals", x, kept, f"blk.{i}.ffn_res_score")
        x = g.add(x, ffn.build(g, i, normed_for(g, i, h, ffn)))
        x = g.steer(f"L{i}.control", x, layer=i)
    return _mixed(
        g, "output_residuals", g.layer(g.config.stage_layers.stop, x), kept, "output_res_score"
    )


def _mixed(g: Ops, label: str, x: Rows, kept: list[Rows], weight: str) -> Rows:
    """Return ``mix``: the weighted sum of the kept states before earlier blocks and of ``x``.
    ``kept``: one entry for each block so far, the last of which has the states of all of them;
    ``weight``: stem of the vector whose products with the states are the scores.
    """
    return g.call("attention_residual", label, x, *kept[-1:], n=len(kept), weight=weight)


SCORES = built_by_graph(
    "residuals",
    (
        TensorRow("attn_res_score.weight", ("n_embd",)),
        TensorRow("ffn_res_score.weight", ("n_embd",)),
    ),
)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and the vectors that score kept states before each."""
    return *halves_of(layer), SCORES


# No "stream": layers of later stages would need the states before earlier blocks.
KIMI_K3 = replace(
    DECODER,
    build=build,
    outputs=UNSTAGED_OUTPUTS,
    rows=(*DECODER.rows, TensorRow("output_res_score.weight", ("n_embd",))),
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), SCORES),
)
