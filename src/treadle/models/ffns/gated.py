"""The gated feed-forward network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.structure import Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, x: Rows) -> Rows:
    """``x + post_norm(down(act(gate(norm(x))) * up(norm(x))))``."""
    at, blk, fn = f"L{i}.ffn", f"blk.{i}.ffn", g.config.arch.activation
    h = g.norm(f"{at}.norm", x, f"{blk}_norm")
    gate, up = g.linears(f"{at}.gate_up", h, [f"{blk}_gate", f"{blk}_up"])
    h = g.linear(f"{at}.down", g.gated(f"{at}.{fn}", gate, up, fn), f"{blk}_down")
    if g.has(f"blk.{i}.post_ffw_norm.weight"):
        h = g.norm(f"{at}.down.post_norm", h, f"blk.{i}.post_ffw_norm")
    return g.add(x, h)


GATED = Sublayer(
    build=build,
    rows=(
        TensorRow("ffn_norm.weight", ("n_embd",)),
        TensorRow("ffn_gate.weight", ("n_ff", "n_embd")),
        TensorRow("ffn_gate.bias", ("n_ff",), optional=True),
        TensorRow("ffn_up.weight", ("n_ff", "n_embd")),
        TensorRow("ffn_up.bias", ("n_ff",), optional=True),
        TensorRow("ffn_down.weight", ("n_embd", "n_ff")),
        TensorRow("ffn_down.bias", ("n_embd",), optional=True),
        TensorRow("post_ffw_norm.weight", ("n_embd",), optional=True),  # before the add
    ),
    sizes=lambda layer: {"n_ff": layer.n_ff},
)
