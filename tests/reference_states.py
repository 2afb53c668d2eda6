"""Mixers beside attention in float64 and plain numpy: what the compiled ones must agree with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference import Array, Layer, activate, attended, rms_norm
from tests.reference_inkling import relative
from tests.reference_latent import latent


def convolved(u: Array, weight: Array) -> Array:
    """Each column of ``u [n_tokens, k]`` with its row of ``weight [k, taps]``, zeros before it."""
    taps = weight.shape[1]
    past = np.concatenate([np.zeros((taps - 1, u.shape[1])), u])
    return np.asarray(sum(past[j : j + len(u)] * weight[:, j] for j in range(taps)))


def shortconv(maps: Layer, h: Array) -> Array:
    b, c, x = np.split(maps.linear(h, "shortconv.in_proj"), 3, axis=-1)
    weight = maps.tensor(f"blk.{maps.i}.shortconv.conv.weight")
    return maps.linear(c * convolved(b * x, weight), "shortconv.out_proj")


def rates_of(maps: Layer, x: Array) -> tuple[Array, Array]:
    """Steps of each head, and what its state is multiplied by: ``[n_tokens, n_head]``."""
    dt = np.logaddexp(0, x + maps.tensor(f"blk.{maps.i}.ssm_dt.bias"))
    return dt, np.exp(dt * maps.tensor(f"blk.{maps.i}.ssm_a").ravel())


def mamba2(maps: Layer, h: Array) -> Array:
    s = maps.at.state
    blk = f"blk.{maps.i}.ssm"
    assert s is not None
    z, xbc, dt = np.split(maps.linear(h, "ssm_in"), [s.n_inner, s.n_inner + s.n_channels], axis=-1)
    xbc = convolved(xbc, maps.tensor(f"{blk}_conv1d.weight"))
    if maps.has("ssm_conv1d.bias"):
        xbc = xbc + maps.tensor(f"{blk}_conv1d.bias")
    x, b, c = np.split(activate(xbc, "silu"), [s.n_inner, s.n_inner + s.n_keys], axis=-1)
    x = x.reshape(len(h), s.n_head, -1)
    d = maps.tensor(f"{blk}_d").reshape(-1, 1)
    b, c = (np.repeat(a.reshape(len(h), s.n_group, -1), s.n_head // s.n_group, 1) for a in (b, c))
    dt, decay = rates_of(maps, dt)
    state = np.zeros((s.n_head, s.head_dim, s.n_state))
    out = np.zeros_like(x)
    for t in range(len(h)):
        state = state * decay[t][:, None, None]
        state += (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None]
        out[t] = (state @ c[t][:, :, None])[:, :, 0] + d * x[t]
    y = out.reshape(z.shape) * activate(z, "silu")
    if maps.has("ssm_norm.weight"):
        y = y.reshape(len(h), s.n_group, -1)
        y = rms_norm(y, maps.tensor(f"{blk}_norm.weight"), s.norm_eps)
    return maps.linear(y.reshape(z.shape), "ssm_out")


def mamba1(maps: Layer, h: Array) -> Array:
    s = maps.at.state
    blk = f"blk.{maps.i}.ssm"
    assert s is not None
    x, z = np.split(maps.linear(h, "ssm_in"), 2, axis=-1)
    x = convolved(x, maps.tensor(f"{blk}_conv1d.weight"))
    if maps.has("ssm_conv1d.bias"):
        x = x + maps.tensor(f"{blk}_conv1d.bias")
    x = activate(x, "silu")
    parts = np.split(maps.linear(x, "ssm_x"), [s.n_rank, s.n_rank + s.n_state], axis=-1)
    for i, name in enumerate(("dt", "b", "c")):
        if maps.has(f"ssm_{name}_norm.weight"):
            weight = maps.tensor(f"{blk}_{name}_norm.weight")
            parts[i] = rms_norm(parts[i], weight, s.norm_eps)
        elif s.normed:
            parts[i] = rms_norm(parts[i], np.ones(1), s.norm_eps)
    dt, b, c = parts
    dt = maps.linear(dt, "ssm_dt") + maps.tensor(f"{blk}_dt.bias") * (not maps.has("ssm_dt.bias"))
    dt = np.logaddexp(0, dt)
    a = maps.tensor(f"{blk}_a")
    d = maps.tensor(f"{blk}_d")
    state = np.zeros((s.n_inner, s.n_state))
    out = np.zeros_like(x)
    for t in range(len(h)):
        state = state * np.exp(dt[t][:, None] * a) + (dt[t] * x[t])[:, None] * b[t]
        out[t] = state @ c[t] + d * x[t]
    return maps.linear(out * activate(z, "silu"), "ssm_out")


def delta(maps: Layer, h: Array) -> Array:
    s = maps.at.state
    blk = f"blk.{maps.i}.ssm"
    assert s is not None
    shape = (len(h), s.n_group, -1)
    share = s.n_head // s.n_group
    if maps.at.mixer == "delta_signed":
        parts = [maps.tensor(f"{blk}_conv1d_{x}.weight") for x in "qkv"]
        qkv = np.concatenate(
            [h @ maps.tensor(f"blk.{maps.i}.attn_{x}.weight").T for x in "qkv"], -1
        )
        qkv = convolved(qkv, np.concatenate(parts))
    else:
        qkv = convolved(maps.linear(h, "attn_qkv"), maps.tensor(f"{blk}_conv1d.weight"))
    q, k, v = np.split(activate(qkv, "silu"), [s.n_keys, 2 * s.n_keys], axis=-1)
    q, k = (
        a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)
        for a in (q.reshape(shape), k.reshape(shape))
    )
    if maps.at.mixer == "delta_grouped":
        both = np.split(maps.linear(h, "ssm_ba").reshape(shape), 2, axis=-1)
        beta, alpha = (a.reshape(len(h), -1) for a in both)
        q, k = (np.repeat(a, share, axis=1) for a in (q, k))
    else:
        beta = maps.linear(h, "ssm_beta")
        alpha = maps.linear(h, "ssm_alpha")
        signed = maps.at.mixer in ("delta_signed", "delta_sigmoid")
        q, k = (np.repeat(a, share, 1) if signed else np.tile(a, (1, share, 1)) for a in (q, k))
    q = q / np.sqrt(s.n_state)
    v = v.reshape(len(h), s.n_head, -1)
    beta = s.beta_most / (1 + np.exp(-beta))
    decay = rates_of(maps, alpha)[1]
    state = np.zeros((s.n_head, s.n_state, s.head_dim))
    out = np.zeros_like(v)
    for t in range(len(h)):
        state = state * decay[t][:, None, None]
        wrong = beta[t][:, None] * (v[t] - np.einsum("hn,hnp->hp", k[t], state))
        state = state + k[t][:, :, None] * wrong[:, None]
        out[t] = np.einsum("hn,hnp->hp", q[t], state)
    y = rms_norm(out, maps.tensor(f"{blk}_norm.weight"), s.norm_eps)
    z = maps.linear(h, "attn_gate").reshape(y.shape)
    gate = 2 / (1 + np.exp(-z)) if maps.at.mixer == "delta_sigmoid" else activate(z, "silu")
    return maps.linear((y * gate).reshape(len(h), -1), "ssm_out")


def kda(maps: Layer, h: Array) -> Array:
    s = maps.at.state
    blk = f"blk.{maps.i}.ssm"
    assert s is not None

    def heads(x: Array) -> Array:
        return x.reshape(len(h), s.n_head, -1)

    q, k, v = (
        activate(
            convolved(
                maps.linear(h, f"attn_{name}"),
                maps.tensor(f"{blk}_conv1d_{name}.weight").reshape(s.n_inner, s.n_conv),
            ),
            "silu",
        )
        for name in "qkv"
    )
    q, k = (heads(x) / np.sqrt((heads(x) ** 2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q / np.sqrt(s.n_state)
    v = heads(v)
    decay = maps.linear(h, "ssm_f_a")
    low = maps.at.mixer != "kda_bounded"
    decay = maps.linear(decay, "ssm_f_b") if low else decay
    decay = heads(decay + maps.tensor(f"{blk}_dt.bias"))
    a = maps.tensor(f"{blk}_a").reshape(-1, 1) * (-1 if s.floor and low else 1)
    decay = np.exp(s.floor / (1 + np.exp(-a * decay)) if s.floor else a * np.logaddexp(0, decay))
    beta = s.beta_most / (1 + np.exp(-maps.linear(h, "ssm_beta")))
    state = np.zeros((s.n_head, s.n_state, s.head_dim))
    out = np.zeros_like(v)
    for t in range(len(h)):
        state = state * decay[t][:, :, None]
        wrong = beta[t][:, None] * (v[t] - np.einsum("hn,hnp->hp", k[t], state))
        state = state + k[t][:, :, None] * wrong[:, None]
        out[t] = np.einsum("hn,hnp->hp", q[t], state)
    y = rms_norm(out, maps.tensor(f"{blk}_norm.weight"), s.norm_eps)
    whole = maps.at.mixer == "kda_whole"
    gate = maps.linear(h, "ssm_g" if whole else "ssm_g_a")
    gate = heads(maps.linear(gate, "ssm_g_b") if low and not whole else gate)
    return maps.linear((y / (1 + np.exp(-gate))).reshape(len(h), -1), "attn_output")


MIXED: dict[str, Callable[[Layer, Array], Array]] = {
    "shortconv": shortconv,
    "mamba2": mamba2,
    "attention_mamba2": lambda maps, h: attended(maps, h) + mamba2(maps, h),
    "mamba1": mamba1,
    "linear": lambda maps, h: maps.linear(h, "attn_output"),
    "delta": delta,
    "delta_signed": delta,
    "delta_grouped": delta,
    "attention_relative": relative,
    "kda": kda,
    "kda_signed": kda,
    "kda_bounded": kda,
    "kda_floored": kda,
    "kda_whole": kda,
    "latent": latent,
    "latent_ranked_indexed": latent,
    "latent_norm_gated": latent,
    "delta_sigmoid": delta,
    "latent_q": latent,
    "latent_kv_b": latent,
    "latent_q_kv_b": latent,
    "latent_wide": latent,
    "latent_wide_q": latent,
    "latent_wide_kv_b": latent,
    "latent_wide_q_kv_b": latent,
    "latent_indexed": latent,
    "latent_pooled": latent,
    "latent_index_shared": latent,
}
