"""Attention over the keys and values of all tokens before, or of a window of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.pools import PoolSpec
from treadle.models.structure import Sizes, Sublayer, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, x: Rows) -> Rows:
    """``x + post_norm(output(attention(norm(x))))``."""
    layer, at, blk = g.config.layers[i], f"L{i}.attn", f"blk.{i}.attn"
    h = g.norm(f"{at}.norm", x, f"{blk}_norm")
    q, k, v = g.linears(f"{at}.qkv", h, [f"{blk}_q", f"{blk}_k", f"{blk}_v"])
    if g.has(f"{blk}_q_norm.weight"):
        q = g.norm(f"{at}.q_norm", q, f"{blk}_q_norm", heads=layer.n_head)
        k = g.norm(f"{at}.k_norm", k, f"{blk}_k_norm", heads=layer.n_head_kv)
    q, k = g.rope(f"{at}.rope", q, layer.rope), g.rope(f"{at}.rope", k, layer.rope)
    h = g.linear(f"{at}.output", g.attend(at, i, q, k, v), f"{blk}_output")
    if g.has(f"blk.{i}.post_attention_norm.weight"):
        h = g.norm(f"{at}.output.post_norm", h, f"blk.{i}.post_attention_norm")
    return g.add(x, h)


def _sizes(layer: Layer) -> Sizes:
    return {
        "head_dim": layer.head_dim,
        "n_q": layer.n_head * layer.head_dim,
        "n_k": layer.n_head_kv * layer.head_dim,
        "n_v": layer.n_head_kv * layer.head_dim_v,
        "n_attn": layer.n_head * layer.head_dim_v,
    }


def _memory(layer: Layer) -> PoolSpec:
    return PoolSpec(
        "kv_local" if layer.window else "kv_global",
        (),
        layer.n_head_kv,
        layer.head_dim,
        layer.head_dim_v,
        layer.window,
        layer.causal,
    )


ATTENTION = Sublayer(
    build=build,
    rows=(
        TensorRow("attn_norm.weight", ("n_embd",)),
        TensorRow("attn_q.weight", ("n_q", "n_embd")),
        TensorRow("attn_q.bias", ("n_q",), optional=True),
        TensorRow("attn_k.weight", ("n_k", "n_embd")),
        TensorRow("attn_k.bias", ("n_k",), optional=True),
        TensorRow("attn_v.weight", ("n_v", "n_embd")),
        TensorRow("attn_v.bias", ("n_v",), optional=True),
        TensorRow("attn_q_norm.weight", ("head_dim",), optional=True),  # per head, before rope
        TensorRow("attn_k_norm.weight", ("head_dim",), optional=True),
        TensorRow("attn_output.weight", ("n_embd", "n_attn")),
        TensorRow("attn_output.bias", ("n_embd",), optional=True),
        TensorRow("post_attention_norm.weight", ("n_embd",), optional=True),  # before the add
    ),
    sizes=_sizes,
    memory=_memory,
)
