"""RWKV-7's layers in float64 and plain numpy."""

from __future__ import annotations

import numpy as np

from tests.reference import Array, Kept, Layer, activate, normed


def shifted(h: Array) -> Array:
    """Each token's predecessor; zeros before the first."""
    return np.concatenate([np.zeros((1, h.shape[1])), h[:-1]])


def sigmoid(x: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def wkv(maps: Layer, h: Array, kept: Kept) -> Array:
    """``kept``: under -1 the first layer's values."""
    s = maps.at.state
    blk = f"blk.{maps.i}.time_mix"
    assert s is not None
    lerp = maps.tensor(f"{blk}_lerp_fused.weight").reshape(-1, 1, h.shape[1])
    r, w, k, v, a, *g = (h + (shifted(h) - h) * each for each in lerp)

    def vector(name: str) -> Array:
        return maps.tensor(f"{blk}_{name}.weight")

    def narrow(x: Array, name: str) -> Array:
        return x @ vector(f"{name}1").T @ vector(f"{name}2").T

    def heads(x: Array) -> Array:
        return x.reshape(len(h), s.n_head, -1)

    r, k, own = (
        maps.linear(x, f"time_mix_{n}")
        for x, n in zip((r, k, v), ("receptance", "key", "value"), strict=True)
    )
    w = np.tanh(w @ vector("w1").T) @ vector("w2").T + vector("w0")
    decay = np.exp(-0.606531 * sigmoid(w))
    rate = sigmoid(narrow(a, "a") + vector("a0"))
    first = kept.setdefault(-1, (own, own))[0]
    if maps.i:
        share = sigmoid(narrow(v, "v") + vector("v0"))
        own = (1 - share) * own + share * first
    away = heads(k * vector("k_k"))
    away = away / np.maximum(np.sqrt((away**2).sum(-1, keepdims=True)), 1e-12)
    k = k * (1 + (rate - 1) * vector("k_a"))
    r, k, v, decay, rate = (heads(x) for x in (r, k, own, decay, rate))
    # [value, key]
    state = np.zeros((s.n_head, s.head_dim, s.n_state))
    out = np.zeros_like(v)
    for t in range(len(h)):
        turn = -away[t][:, :, None] * (away[t] * rate[t])[:, None]
        state = state * decay[t][:, None] + state @ turn + v[t][:, :, None] * k[t][:, None]
        out[t] = (state @ r[t][:, :, None])[:, :, 0]
    if maps.has("time_mix_ln.weight"):
        out = out - out.mean(-1, keepdims=True)
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 64e-5)
        out = heads(out.reshape(h.shape) * vector("ln") + maps.tensor(f"{blk}_ln.bias"))
    out = out + (r * k * vector("r_k").reshape(s.n_head, -1)).sum(-1, keepdims=True) * v
    y = out.reshape(h.shape)
    if maps.has("time_mix_g1.weight"):
        y = y * (sigmoid(g[0] @ vector("g1").T) @ vector("g2").T)
    return maps.linear(y, "time_mix_output")


def channel_mix(maps: Layer, x: Array) -> Array:
    """Of states that are not yet normed."""
    blk = f"blk.{maps.i}"
    h = normed(x, maps.tensor(f"{blk}.attn_norm_2.weight"), maps.config)
    h = h + maps.tensor(f"{blk}.attn_norm_2.bias")
    h = h + (shifted(h) - h) * maps.tensor(f"{blk}.channel_mix_lerp_k.weight").ravel()
    h = activate(maps.linear(h, "channel_mix_key"), maps.config.arch.activation)
    return maps.linear(h, "channel_mix_value")
