"""RWKV's channel mix: an FFN without a gate, on a token mixed with the previous token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.structure import Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``value(act(key(x)))``: ``key`` and ``value`` are matrices of layer ``i``, x is ``h``
    mixed with the previous token's ``h``, which is kept as the second part of the layer's state.
    """
    at = f"L{i}.ffn"
    blk = f"blk.{i}.channel_mix"
    fn = g.config.arch.activation
    weight = f"{blk}_lerp_k"
    x = g.call("token_shift", f"{at}.shift", h, layer=i, weight=weight, n=1, part=1)
    x = g.activate(f"{at}.{fn}", g.linear(f"{at}.key", x, f"{blk}_key"), fn)
    return g.linear(f"{at}.value", x, f"{blk}_value")


CHANNEL_MIX = Sublayer(
    label="ffn",
    before="attn_norm_2",
    after="",
    after_sum="",
    build=build,
    rows=(
        TensorRow("attn_norm_2.weight", ("n_embd",)),
        TensorRow("attn_norm_2.bias", ("n_embd",)),
        TensorRow("channel_mix_lerp_k.weight", ("n_embd",)),
        TensorRow("channel_mix_key.weight", ("n_ff", "n_embd")),
        TensorRow("channel_mix_value.weight", ("n_embd", "n_ff")),
    ),
    sizes=lambda layer: {"n_ff": layer.n_ff},
)
