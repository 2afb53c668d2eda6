"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): a token caches one row that all heads
share; each head's keys and values are linear maps of it.

The key map (``k_b``) is applied to the query instead, and the value map (``v_b``) to attention's
result. So heads attend to the rows themselves, and keys and values are never computed. Files with
both maps in one matrix (``kv_b``) are computed in the same way, from the two parts of each head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.models.config import PoolSpec
from treadle.models.layer import GATE_UP, gated_norm
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Latent, Layer
    from treadle.models.ops import Ops, Rows


Choice = Callable[["Ops", int, "Rows", "Rows"], "Rows"]


def build(
    g: Ops,
    i: int,
    h: Rows,
    *,
    whole: str = "",
    choice: Choice | None = None,
    ranked: bool = False,
) -> Rows:
    """Return ``output(v_b(attention(k_b(q), rows)))`` of layer ``i``; if the file has a gate, the
    input of ``output`` is multiplied by its sigmoid, one factor for each head or each value.

    whole: name, after ``attn_``, of the matrix with both maps; "" if they are two matrices.
    choice: ``choice(g, i, h, rank)`` returns the keys that each token sees, as the op ``chosen``
        does; ``rank``: the normed query rank. None: all keys.
    ranked: the gate is made of the query rank, before its norm; else of ``h``.
    """
    layer = g.config.layers[i]
    at = f"L{i}.attn"
    blk = f"blk.{i}.attn"
    first = "q_a" if _latent_of(layer).n_q_rank else "q"
    seen: tuple[Rows, ...] = ()
    names = [f"{blk}_{first}", f"{blk}_kv_a_mqa"]
    has_gate = g.has(f"{blk}_gate.weight")
    own = [f"{blk}_gate"] if has_gate and not ranked else []
    has_row_gate = g.has(f"{blk}_kv_a_norm{GATE_UP}.weight")
    if has_row_gate:  # the row is normed here, in a buffer of its own
        q, *gate = g.linears(f"{at}.{first}_gate", h, [names[0], *own])
        kv = _normed_row(g, i, g.linear(f"{at}.kv_a", h, names[1]))
    else:
        q, kv, *gate = g.linears(f"{at}.{first}_kv_a", h, names + own)
    if g.has(f"{blk}_k_norm.weight"):  # of the part of a row that turns, in place
        sizes = _latent_of(layer)
        part = g.columns(kv, sizes.n_kv_rank, sizes.n_rope)
        norm = {"weight": f"{blk}_k_norm.weight", "eps": sizes.norm_eps}
        g.call("columns_norm", f"{at}.k_norm", part, **norm)
    if ranked:
        gate = [g.linear(f"{at}.gate_rows", q, f"{blk}_gate")]
    if first == "q_a":
        q = g.norm(f"{at}.q_a_norm", q, f"{blk}_q_a_norm", eps=_latent_of(layer).norm_eps)
        q = gated_norm(g, f"{at}.q_a_norm", q, f"{blk}_q_a_norm", _widening(g, q.width))
        seen = () if choice is None else (choice(g, i, h, q),)
        q = g.linear(f"{at}.q_b", q, f"{blk}_q_b")
    if layer.q_rope is not None:
        q = g.call("tempered", f"{at}.temper", q, table=layer.q_rope)
    of: dict[str, Any] = {"whole": f"{blk}_{whole}"} if whole else {}
    if g.has(f"{blk}_sinks.weight"):
        of["sinks"] = f"{blk}_sinks"
    of["normed"] = has_row_gate
    y = g.call("latent", at, q, kv, *seen, layer=i, weight=f"{blk}_k_b", **of)
    y = g.call("by_head", f"{at}.v_b", y, weight=f"{blk}_v_b", heads=layer.n_head)
    if has_gate:
        y = g.call("sigmoid_gate", f"{at}.gate", y, *gate)
    return g.linear(f"{at}.output", y, f"{blk}_output")


def _widening(g: Ops, rank: int) -> float:
    """Return ``sqrt(n_embd / rank)``, by which GigaChat multiplies normed values of low rank."""
    return float((g.config.n_embd / rank) ** 0.5)


def _normed_row(g: Ops, i: int, kv: Rows) -> Rows:
    """Return the latent rows ``kv``, f32 ``[N, n_kv_rank + n_rope]``, with the first ``n_kv_rank``
    values normed and multiplied by the norm's gate, in place.
    """
    sizes = _latent_of(g.config.layers[i])
    at = f"L{i}.attn.kv_a_norm"
    weight = f"blk.{i}.attn_kv_a_norm"
    part = g.columns(kv, 0, sizes.n_kv_rank)
    part = g.call("columns_norm", at, part, weight=f"{weight}.weight", eps=sizes.norm_eps)
    gated_norm(g, at, part, weight, _widening(g, sizes.n_kv_rank))
    return kv


def _latent_of(layer: Layer) -> Latent:
    assert layer.latent is not None
    return layer.latent


def _sizes(layer: Layer) -> Sizes:
    sizes = _latent_of(layer)
    return {
        "n_head": layer.n_head,
        "n_q_rank": sizes.n_q_rank,
        "n_kv_rank": sizes.n_kv_rank,
        "n_q": layer.n_head * sizes.n_q,
        "n_kv": layer.n_head * (sizes.n_nope + sizes.n_v),
        "n_row": layer.head_dim,
        "n_rope": sizes.n_rope,
        "n_nope": sizes.n_nope,
        "n_v": sizes.n_v,
        "n_attn": layer.n_head * sizes.n_v,
    }


def _memory(layer: Layer) -> tuple[PoolSpec]:
    sizes = layer.n_head_kv, layer.head_dim, layer.head_dim_v
    return (PoolSpec("kv_latent", (), *sizes, layer.window, layer.causal, latent=True),)


_BEFORE = with_bias("attn_norm", "n_embd")
_QUERIES = (
    *with_bias("attn_q_a", "n_q_rank", "n_embd"),
    TensorRow("attn_q_a_norm.weight", ("n_q_rank",)),
    TensorRow("attn_q_b.weight", ("n_q", "n_q_rank")),
)
_QUERIES_AT_ONCE = (TensorRow("attn_q.weight", ("n_q", "n_embd")),)
_ROW = (
    *with_bias("attn_kv_a_mqa", "n_row", "n_embd"),
    TensorRow("attn_kv_a_norm.weight", ("n_kv_rank",)),
    TensorRow("attn_k_norm.weight", ("n_rope",), optional=True),  # before the rope
)
_MAPS = (
    TensorRow("attn_k_b.weight", ("n_head", "n_kv_rank", "n_nope")),
    TensorRow("attn_v_b.weight", ("n_head", "n_v", "n_kv_rank")),
)
_WHOLE = (TensorRow("attn_kv_b.weight", ("n_kv", "n_kv_rank")),)
_OUTPUT = (
    TensorRow("attn_gate.weight", ("n_head", "n_embd"), optional=True),
    *with_bias("attn_output", "n_embd", "n_attn"),
)
LATENT = Sublayer(
    label="attn",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(*_BEFORE, *_QUERIES, *_ROW, *_MAPS, *_OUTPUT),
    sizes=_sizes,
    memory=_memory,
)
LATENT_Q = replace(LATENT, rows=(*_BEFORE, *_QUERIES_AT_ONCE, *_ROW, *_MAPS, *_OUTPUT))
LATENT_KV_B = replace(
    LATENT,
    build=partial(build, whole="kv_b"),
    rows=(*_BEFORE, *_QUERIES, *_ROW, *_WHOLE, *_OUTPUT),
    unread=frozenset(row.name for row in _MAPS),  # some files have them in addition
)
LATENT_Q_KV_B = replace(LATENT_KV_B, rows=(*_BEFORE, *_QUERIES_AT_ONCE, *_ROW, *_WHOLE, *_OUTPUT))
