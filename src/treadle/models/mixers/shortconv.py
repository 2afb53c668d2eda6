"""Short convolution over the last few tokens, between two gates (LFM2 and 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``out(c * convolution(b * x))`` of layer ``i``; b, c, x are projections of ``h``."""
    at = f"L{i}.shortconv"
    blk = f"blk.{i}.shortconv"
    bcx = g.linear(f"{at}.in", h, f"{blk}.in_proj")
    y = g.call("gated_convolution", f"{at}.conv", bcx, layer=i, weight=f"{blk}.conv.weight")
    return g.linear(f"{at}.out", y, f"{blk}.out_proj")


def _memory(layer: Layer) -> tuple[StateSpec]:
    assert layer.state is not None
    return (StateSpec("shortconv", (), layer.state.n_values),)


def _sizes(layer: Layer) -> Sizes:
    assert layer.state is not None
    return {"n_bcx": 3 * layer.state.n_channels, "n_conv": layer.state.n_conv}


SHORTCONV = Sublayer(
    label="shortconv",
    before="attn_norm",
    after="post_attention_norm",
    after_sum="",
    build=build,
    rows=(
        *with_bias("attn_norm", "n_embd"),
        *with_bias("shortconv.in_proj", "n_bcx", "n_embd"),
        TensorRow("shortconv.conv.weight", ("n_embd", "n_conv")),
        *with_bias("shortconv.out_proj", "n_embd", "n_embd"),
        TensorRow("post_attention_norm.weight", ("n_embd",), optional=True),  # before the add
    ),
    sizes=_sizes,
    memory=_memory,
)
