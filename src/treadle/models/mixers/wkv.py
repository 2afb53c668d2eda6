"""WKV-7 (Peng and others, 2025), RWKV-7's recurrence: each token removes from the state along one
direction and adds along another. The token is mixed with the previous one first, and its values are
mixed with those of the first layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.mixers.mamba2 import state_of
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows

N_MIXED = 5  # mixtures of a token and the previous one; a gate needs one more


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``output(gate * (norm(y) + bonus))`` of layer ``i`` for its normed input ``h``. y is
    the WKV state applied to each token's receptance r (its query); the gate is 1 if the file has
    none; the bonus is computed from the token's r, key and value.
    """
    at = f"L{i}.wkv"
    blk = f"blk.{i}.time_mix"
    n = h.width
    n_mixed = N_MIXED + g.has(f"{blk}_g1.weight")
    both = g.call("token_shift", f"{at}.shift", h, layer=i, weight=f"{blk}_lerp_fused", n=n_mixed)
    xr, xw, xk, xv, xa, *xg = (g.columns(both, n * j, n) for j in range(n_mixed))
    r, k, v = (
        g.linear(f"{at}.{name}", x, f"{blk}_{name}")
        for name, x in (("receptance", xr), ("key", xk), ("value", xv))
    )
    first = g.once("first_values", lambda g: v)
    mixed = () if first is v else (first, _narrow(g, i, "v", xv))
    w = _narrow(g, i, "w", xw, "tanh")
    a = _narrow(g, i, "a", xa)
    rows = g.call("wkv_keys", f"{at}.keys", w, a, k, v, *mixed, layer=i, stem=blk)
    y = g.call("wkv", f"{at}.scan", r, rows, layer=i)
    gate = (_narrow(g, i, "g", x, "sigmoid") for x in xg)
    y = g.call("wkv_out", f"{at}.gate", y, r, rows, *gate, layer=i, stem=blk)
    return g.linear(f"{at}.output", y, f"{blk}_output")


def _narrow(g: Ops, i: int, name: str, x: Rows, fn: str = "") -> Rows:
    """Return ``B fn(A x)``, a product of low rank, for layer ``i``. The matrices are
    ``time_mix_{name}1`` (A) and ``time_mix_{name}2`` (B); ``fn``: an activation, "" for none.
    """
    at = f"L{i}.wkv.{name}"
    blk = f"blk.{i}.time_mix_{name}"
    x = g.linear(f"{at}1", x, f"{blk}1")
    x = g.activate(f"{at}.{fn}", x, fn) if fn else x
    return g.linear(f"{at}2", x, f"{blk}2")


def _sizes(layer: Layer) -> Sizes:
    state = state_of(layer)
    names = ("n_w_rank", "n_a_rank", "n_v_rank", "n_g_rank")
    ranks = dict(zip(names, state.ranks, strict=True))
    return {**ranks, "one": 1, "n_mixed": N_MIXED + (state.ranks[-1] > 0)}


def _pair(name: str, *, optional: bool = False) -> tuple[TensorRow, TensorRow]:
    rank = f"n_{name}_rank"
    stem = f"time_mix_{name}"
    return (
        TensorRow(f"{stem}1.weight", (rank, "n_embd"), optional),
        TensorRow(f"{stem}2.weight", ("n_embd", rank), optional),
    )


def _vectors(*names: str) -> tuple[TensorRow, ...]:
    return tuple(TensorRow(f"time_mix_{name}.weight", ("n_embd",)) for name in names)


VALUES = (*_vectors("v0"), *_pair("v"))  # mix in the first layer's values
WKV_FIRST = Sublayer(
    label="wkv",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        *with_bias("attn_norm", "n_embd"),
        TensorRow("time_mix_lerp_fused.weight", ("n_mixed", "one", "one", "n_embd")),
        *(
            TensorRow(f"time_mix_{name}.weight", ("n_embd", "n_embd"))
            for name in ("receptance", "key", "value", "output")
        ),
        *_vectors("w0", "a0", "k_k", "k_a", "r_k"),
        *_pair("w"),
        *_pair("a"),
        *_pair("g", optional=True),
        *with_bias("time_mix_ln", "n_embd", optional=True),
    ),
    sizes=_sizes,
    memory=lambda layer: (StateSpec("wkv", (), state_of(layer).n_values),),
    unread=frozenset(row.name for row in VALUES),
)
WKV = replace(WKV_FIRST, rows=(*WKV_FIRST.rows, *VALUES), unread=frozenset())
