"""Attention over the keys and values of all tokens so far, or of a window of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import PoolSpec
from treadle.models.mixers.names import (
    FUSED,
    GATE,
    GATE_INDEXED,
    HEAD_NORMS,
    KEYS_ALONE,
    SIGMOID_FUSED,
    SINKS_FUSED,
    SOFTPLUS,
    SOFTPLUS_HEADS,
)
from treadle.models.ops import TensorSlice
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows, TensorName


Choice = Callable[["Ops", int, "Rows"], "Rows"]


def build(g: Ops, i: int, h: Rows, *, choice: Choice | None = None) -> Rows:
    """Return ``output(attention(h))`` of layer ``i``. If the layer has a gate, attention's result
    is multiplied by the gate's sigmoid or softplus. ``choice``: ``choice(g, i, h)`` returns the
    keys that each token attends to, as the op ``chosen`` does; None: all.
    """
    layer = g.config.layers[i]
    at = f"L{i}.attn"
    blk = f"blk.{i}.attn"
    q, k, v, gate = _products(g, i, h)
    if limit := g.config.clamp:
        q = g.call("clamped", f"{at}.q_clamp", q, limit=limit)
        k = g.call("clamped", f"{at}.k_clamp", k, limit=limit) if k else None
        v = g.call("clamped", f"{at}.v_clamp", v, limit=limit) if v else None
    if layer.mixer in (GATE, GATE_INDEXED):
        q, gate = g.halves(f"{at}.halves", q, layer.n_head)

    if layer.qk_norm and k is not None:
        gains = {"gains": f"{blk}_q_gain.weight"} if g.has(f"{blk}_q_gain.weight") else {}
        q = g.call("normed_heads", f"{at}.q_norm", q, heads=layer.n_head, **gains)
        k = g.call("normed_heads", f"{at}.k_norm", k, heads=layer.n_head_kv)
    q_table = layer.rope if layer.q_rope is None else layer.q_rope
    if layer.rope is None and q_table is not None:
        q = g.call("tempered", f"{at}.temper", q, table=q_table)
        q_table = None

    def normed(x: Rows, name: str, heads: int) -> Rows:
        if not g.has(f"{blk}_{name}_norm.weight"):
            return x
        heads = 1 if layer.wide_norm else heads
        centred = g.config.centred
        own = layer.mixer == HEAD_NORMS
        weight = f"{blk}_{name}_norm"
        return g.norm(f"{at}.{name}_norm", x, weight, heads=heads, centred=centred, own=own)

    def turned(x: Rows, table: int | None) -> Rows:
        return x if table is None else g.rope(f"{at}.rope", x, table)

    def placed(x: Rows, name: str, heads: int, table: int | None) -> Rows:
        if g.config.arch.norm_last:
            return normed(turned(x, table), name, heads)
        return turned(normed(x, name, heads), table)

    q = placed(q, "q", layer.n_head, q_table)
    k = placed(k, "k", layer.n_head_kv, layer.rope) if k else None
    v = g.norm(f"{at}.v_norm", v, "", heads=layer.n_head_kv) if v and layer.v_norm else v
    sinks = f"{blk}_sinks" if g.has(f"{blk}_sinks.weight") else ""
    chosen = choice(g, i, h) if choice else None
    y = g.attend(at, i, q, k, v, sinks=sinks, distances=_distances(g, i), chosen=chosen)
    if (gain := g.config.value_scale) != 1.0:
        y = g.call("multiplied", f"{at}.value_scale", y, gain=gain)
    if gate is not None:
        word = "softplus_gate" if layer.mixer in (SOFTPLUS, SOFTPLUS_HEADS) else "sigmoid_gate"
        y = g.call(word, f"{at}.gate", y, gate)
    if g.has(f"{blk}_sub_norm.weight"):
        y = g.norm(f"{at}.sub_norm", y, f"{blk}_sub_norm", centred=g.config.centred)
    return g.linear(f"{at}.output", y, f"{blk}_output")


def _distances(g: Ops, i: int) -> str:
    """Return the stem of the matrix of the relative bias that layer ``i`` uses: its own, else the
    first layer's; "" if the model has none.
    """
    names = (f"blk.{j}.attn_rel_b" for j in (i, 0) if g.config.n_buckets)
    return next((name for name in names if g.has(f"{name}.weight")), "")


def _products(g: Ops, i: int, h: Rows) -> tuple[Rows, Rows | None, Rows | None, Rows | None]:
    """Return queries, keys, values and gate of layer ``i``. Keys and values are None if the layer
    reads another layer's; the gate is None if no matrix computes it alone. In layers of the kind
    KEYS_ALONE, values are the keys before norm and rope.
    """
    layer = g.config.layers[i]
    at = f"L{i}.attn"
    stem = f"blk.{i}.attn_"
    if layer.kv_from != i:
        return g.linear(f"{at}.q", h, f"{stem}q"), None, None, None
    names = _matrices(layer, stem)
    if layer.mixer == KEYS_ALONE:
        q, k = g.linears(f"{at}.qk", h, names[:2])
        return q, k, k, None
    if g.has(f"{stem}gate.weight"):
        q, k, v, gate = g.linears(f"{at}.qkv_gate", h, [*names, f"{stem}gate"])
        return q, k, v, gate
    q, k, v = g.linears(f"{at}.qkv", h, names)
    return q, k, v, None


def _matrices(layer: Layer, stem: str) -> list[TensorName]:
    """Return the names of the layer's three matrices of queries, keys and values; slices of one
    matrix if they are fused. ``stem``: ``blk.N.attn_``, with which all these names begin.
    """
    if layer.mixer not in (FUSED, SINKS_FUSED, SIGMOID_FUSED):
        return [stem + name for name in "qkv"]
    sizes = _sizes(layer)
    q = sizes["n_q"]
    k = sizes["n_k"]
    v = sizes["n_v"]
    return [TensorSlice(f"{stem}qkv", at, n) for at, n in ((0, q), (q, k), (q + k, v))]


def _sizes(layer: Layer) -> Sizes:
    n_q = layer.n_head * layer.head_dim
    n_k = layer.n_head_kv * layer.head_dim
    n_v = layer.n_head_kv * layer.head_dim_v
    return {
        "n_q": n_q,
        "n_q_gate": 2 * n_q,
        "n_k": n_k,
        "n_v": n_v,
        "n_qkv": n_q + n_k + n_v,
        "q_norm": n_q if layer.wide_norm else layer.head_dim,
        "k_norm": n_k if layer.wide_norm else layer.head_dim,
        "n_head": layer.n_head,
        "n_head_kv": layer.n_head_kv,
        "head_dim": layer.head_dim,
        "n_attn": layer.n_head * layer.head_dim_v,
    }


def _memory(layer: Layer) -> tuple[PoolSpec]:
    pool = PoolSpec(
        "kv_local" if layer.window else "kv_global",
        (),
        layer.n_head_kv,
        layer.head_dim,
        layer.head_dim_v,
        layer.window,
        layer.causal,
        chunked=layer.chunked,
    )
    return (pool,)


_BEFORE = with_bias("attn_norm", "n_embd")
_KV = (
    *with_bias("attn_k", "n_k", "n_embd"),
    *with_bias("attn_v", "n_v", "n_embd"),
)
_AFTER = (
    *with_bias("attn_q_norm", "q_norm", optional=True),
    *with_bias("attn_k_norm", "k_norm", optional=True),
    TensorRow("attn_q_gain.weight", ("n_head", "one"), optional=True),  # of norms without weights
    TensorRow("attn_sinks.weight", ("n_head",), optional=True),
    TensorRow("attn_sub_norm.weight", ("n_attn",), optional=True),  # before attn_output
    TensorRow("attn_gate.weight", ("n_attn", "n_embd"), optional=True),  # of the output
    *with_bias("attn_output", "n_embd", "n_attn"),
    TensorRow("post_attention_norm.weight", ("n_embd",), optional=True),  # before the add
    *with_bias("attn_output_norm", "n_embd", optional=True),  # after the add
    *with_bias("attn_norm_2", "n_embd", optional=True),  # after another add
)
ATTENTION = Sublayer(
    label="attn",
    before="attn_norm",
    after="post_attention_norm",
    after_sum="attn_output_norm",
    after_second_sum="attn_norm_2",
    build=build,
    rows=(*_BEFORE, *with_bias("attn_q", "n_q", "n_embd"), *_KV, *_AFTER),
    sizes=_sizes,
    memory=_memory,
)
ATTENTION_QKV = replace(
    ATTENTION, rows=(*_BEFORE, *with_bias("attn_qkv", "n_qkv", "n_embd"), *_AFTER)
)
ATTENTION_GATE = replace(
    ATTENTION,
    rows=(*_BEFORE, *with_bias("attn_q", "n_q_gate", "n_embd"), *_KV, *_AFTER),
)
ATTENTION_KEYS = replace(
    ATTENTION,
    rows=tuple(row for row in ATTENTION.rows if not row.name.startswith("attn_v.")),
)
ATTENTION_SHARED = replace(
    ATTENTION,
    rows=(
        *_BEFORE,
        *with_bias("attn_q", "n_q", "n_embd"),
        *(row for row in _AFTER if not row.name.startswith("attn_k_norm.")),
    ),
    # Checkpoints have them although they are unused, and llama.cpp's converter keeps them.
    unread=frozenset({"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}),
)
ATTENTION_HEAD_NORMS = replace(
    ATTENTION,
    rows=(
        *_BEFORE,
        *with_bias("attn_q", "n_q", "n_embd"),
        *_KV,
        TensorRow("attn_q_norm.weight", ("n_head", "head_dim")),
        TensorRow("attn_k_norm.weight", ("n_head_kv", "head_dim")),
        *(row for row in _AFTER if not row.name.startswith(("attn_q_norm.", "attn_k_norm."))),
    ),
)
