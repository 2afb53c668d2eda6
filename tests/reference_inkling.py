"""Inkling's halves in float64: relative logits, short convolutions, scored shared experts."""

from __future__ import annotations

import numpy as np

from tests.reference import Array, Layer, gate_of, log_softmax, rms_norm


def convolved(maps: Layer, x: Array, which: str) -> Array:
    """``x`` and its causal convolution, channel by channel."""
    taps = maps.tensor(f"blk.{maps.i}.shortconv_{which}.weight")  # [channels, taps]
    n = taps.shape[1]
    past = np.concatenate([np.zeros((n - 1, x.shape[1])), x])
    return x + sum(past[j : j + len(x)] * taps[:, j] for j in range(n))


def relative(maps: Layer, h: Array) -> Array:
    """Attention, whose queries have a number for each distance."""
    at = maps.at
    n = len(h)
    eps = maps.config.norm_eps

    def tensor(name: str) -> Array:
        return maps.tensor(f"blk.{maps.i}.{name}.weight")

    q = rms_norm(maps.linear(h, "attn_q").reshape(n, at.n_head, -1), tensor("attn_q_norm"), eps)
    k = convolved(maps, maps.linear(h, "attn_k"), "k").reshape(n, at.n_head_kv, -1)
    k = rms_norm(k, tensor("attn_k_norm"), eps).repeat(at.n_head // at.n_head_kv, 1)
    v = convolved(maps, maps.linear(h, "attn_v"), "v").reshape(n, at.n_head_kv, -1)
    v = v.repeat(at.n_head // at.n_head_kv, 1)
    rel_proj = tensor("attn_rel_proj")
    number = maps.linear(h, "attn_r").reshape(n, at.n_head, -1) @ rel_proj  # [n, head, distance]
    score = np.einsum("qhd,khd->hqk", q, k) / at.head_dim
    age = np.arange(n)[:, None] - np.arange(n)
    for query in range(n):
        for key in range(query + 1):
            if age[query, key] < rel_proj.shape[1]:
                score[:, query, key] += number[query, :, age[query, key]]
    if at.q_rope is not None:
        score *= maps.config.ropes[at.q_rope].gains(np.arange(n))[:, None]
    seen = (age >= 0) & (age < at.window) if at.window else age >= 0
    weight = np.exp(log_softmax(np.where(seen, score, -np.inf)))
    y = np.einsum("hqk,khd->qhd", weight, v).reshape(n, -1)
    return convolved(maps, maps.linear(y, "attn_output"), "attn")


def fed(maps: Layer, h: Array) -> Array:
    """The FFN: dense, or experts of which the last ones are always chosen."""
    factor = maps.tensor(f"blk.{maps.i}.ffn_gscale.weight")
    if maps.at.experts is None:
        made = gate_of(maps.linear(h, "ffn_gate"), maps.linear(h, "ffn_up"), "silu")
        return convolved(maps, maps.linear(made, "ffn_down") * factor, "mlp")
    at = maps.at.experts
    scores = maps.linear(h, "ffn_gate_inp")
    p = 1 / (1 + np.exp(-scores))
    rank = p[:, : at.n] + (
        maps.tensor(f"blk.{maps.i}.exp_probs_b.bias").ravel()
        if maps.has("exp_probs_b.bias")
        else 0.0
    )
    out = np.zeros(h.shape)
    for n, x in enumerate(h):
        chosen = [*np.argsort(-rank[n], kind="stable")[: at.n_used], *range(at.n, p.shape[1])]
        weights = p[n][chosen] / p[n][chosen].sum() * at.scale
        for e, weight in zip(chosen, weights, strict=True):
            kind = "exps" if e < at.n else "shexp"
            gate, up, down = (
                maps.tensor(f"blk.{maps.i}.ffn_{name}_{kind}.weight")[e % at.n]
                for name in ("gate", "up", "down")
            )
            out[n] += weight * (gate_of(x @ gate.T, x @ up.T, "silu") @ down.T)
    return convolved(maps, out * factor, "mlp")
