"""Gated FFN."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ops import TensorSlice
from treadle.models.structure import Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows, TensorName


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``down(act(gate(h)) * up(h))``, with the matrices of layer ``i``."""
    return feed(g, i, h, f"L{i}.ffn")


def feed(g: Ops, i: int, h: Rows, at: str) -> Rows:
    """Return ``down(act(gate(h)) * up(h))``, with the matrices of layer ``i``. ``at``: prefix of
    the labels of its steps.
    """
    layer = g.config.layers[i]
    blk = f"blk.{i}.ffn"
    fn = layer.activation or g.config.arch.activation
    names: list[TensorName] = [f"{blk}_gate", f"{blk}_up"]
    if layer.ffn in (FUSED, FUSED_UP_FIRST):
        firsts = (layer.n_ff, 0) if layer.ffn == FUSED_UP_FIRST else (0, layer.n_ff)
        names = [TensorSlice(f"{blk}_up", first, layer.n_ff) for first in firsts]
    gate, up = g.linears(f"{at}.gate_up", h, names)
    h = g.gated(f"{at}.{fn}", gate, up, fn)
    if g.has(f"{blk}_sub_norm.weight"):
        h = g.norm(f"{at}.sub_norm", h, f"{blk}_sub_norm", centred=g.config.centred)
    return g.linear(f"{at}.down", h, f"{blk}_down")


FUSED = "gated_up"  # ffn_up has the rows of the gate, then those of up
FUSED_UP_FIRST = "gated_up_first"  # ffn_up has the rows of up, then those of the gate
NORMS_BEFORE = with_bias("ffn_norm", "n_embd")
NORMS_AFTER = (
    TensorRow("post_ffw_norm.weight", ("n_embd",), optional=True),  # before the add
    *with_bias("layer_output_norm", "n_embd", optional=True),  # after the add
    TensorRow("layer_output_scale.weight", ("one",), optional=True),  # of the layer's last sum
)
DOWN_AND_NORMS = (*with_bias("ffn_down", "n_embd", "n_ff"), *NORMS_AFTER)
GATED = Sublayer(
    label="ffn",
    before="ffn_norm",
    after="post_ffw_norm",
    after_sum="layer_output_norm",
    build=build,
    rows=(
        *NORMS_BEFORE,
        *with_bias("ffn_gate", "n_ff", "n_embd"),
        *with_bias("ffn_up", "n_ff", "n_embd"),
        TensorRow("ffn_sub_norm.weight", ("n_ff",), optional=True),  # before ffn_down
        *DOWN_AND_NORMS,
    ),
    sizes=lambda layer: {"n_ff": layer.n_ff},
)
GATED_FUSED = replace(
    GATED,
    rows=(
        *NORMS_BEFORE,
        *with_bias("ffn_up", "n_gate_up", "n_embd"),
        *DOWN_AND_NORMS,
    ),
    sizes=lambda layer: {"n_ff": layer.n_ff, "n_gate_up": 2 * layer.n_ff},
)
