"""Cross attention: each token attends to all rows of an encoder.

The keys and values of these rows are computed once for each input (``graphs/cross.py``). They are
in pages of their own, in a pool that all layers with this mixer share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.config import PoolSpec
from treadle.models.structure import Sizes, Sublayer, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows

STEM = "cross_attn"
STORED = f"{STEM}_k.", f"{STEM}_v."  # matrices that no plan of the decoder's tokens reads


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``output(attention(h, encoder's rows))`` of layer ``i``: queries are made of ``h``,
    keys and values were stored by ``build_keys``.
    """
    at = f"L{i}.cross"
    q = g.linear(f"{at}.q", h, f"blk.{i}.{STEM}_q")
    y = g.call("cross_attend", at, q, layer=i)
    return g.linear(f"{at}.output", y, f"blk.{i}.{STEM}_output")


def build_keys(g: Ops, i: int, encoded: Rows) -> None:
    """Store keys and values of layer ``i``, computed from an encoder's rows ``encoded``, f32
    ``[N, n_embd]``.
    """
    at = f"L{i}.cross"
    k, v = g.linears(f"{at}.kv", encoded, [f"blk.{i}.{STEM}_k", f"blk.{i}.{STEM}_v"])
    g.call("cross_store", f"{at}.store", k, v, layer=i)


def _sizes(layer: Layer) -> Sizes:
    return {
        "n_cross_q": layer.n_head * layer.head_dim,
        "n_cross_k": layer.n_head_kv * layer.head_dim,
        "n_cross_v": layer.n_head_kv * layer.head_dim_v,
        "n_cross": layer.n_head * layer.head_dim_v,
    }


def _memory(layer: Layer) -> tuple[PoolSpec]:
    sizes = layer.n_head_kv, layer.head_dim, layer.head_dim_v
    return (PoolSpec("kv_cross", (), *sizes, 0, causal=False, n_keys=layer.n_cross),)


CROSS = Sublayer(
    label="cross",
    before=f"{STEM}_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        *with_bias(f"{STEM}_norm", "n_embd"),
        *with_bias(f"{STEM}_q", "n_cross_q", "n_embd"),
        *with_bias(f"{STEM}_k", "n_cross_k", "n_embd"),
        *with_bias(f"{STEM}_v", "n_cross_v", "n_embd"),
        *with_bias(f"{STEM}_output", "n_embd", "n_cross"),
    ),
    sizes=_sizes,
    memory=_memory,
    unread=frozenset({f"{STEM}_rel_b.weight"}),  # the first T5 has it, and no code reads it
)
