"""Latent attention in float64 and plain numpy, as its paper has it: keys and values of every head
are made, where the compiled one never makes any.
"""

from __future__ import annotations

import numpy as np

from tests.reference import Array, Layer, attention, gated_norm, rms_norm, rope
from tests.reference_indexer import chosen_keys


def latent(maps: Layer, h: Array) -> Array:
    config = maps.config
    at = maps.at
    sizes = at.latent
    blk = f"blk.{maps.i}.attn"
    assert sizes is not None

    def widened(y: Array, stem: str) -> Array:
        if at.mixer != "latent_norm_gated":
            return y
        y = gated_norm(config, y, maps.tensor, f"blk.{maps.i}.{stem}")
        return np.asarray(y * np.sqrt(config.n_embd / y.shape[-1]))

    rank = h
    of_gate = h
    if sizes.n_q_rank:
        q = maps.linear(h, "attn_q_a")
        of_gate = q if at.mixer.startswith("latent_ranked") else h
        q = rms_norm(q, maps.tensor(f"{blk}_q_a_norm.weight"), sizes.norm_eps)
        q = widened(q, "attn_q_a_norm")
        rank = q
        q = maps.linear(q, "attn_q_b")
    else:
        q = maps.linear(h, "attn_q")
    row, turned = np.split(maps.linear(h, "attn_kv_a_mqa"), [sizes.n_kv_rank], axis=-1)
    if maps.has("attn_k_norm.weight"):
        turned = rms_norm(turned, maps.tensor(f"{blk}_k_norm.weight"), sizes.norm_eps)
    row = rms_norm(row, maps.tensor(f"{blk}_kv_a_norm.weight"), sizes.norm_eps)
    row = widened(row, "attn_kv_a_norm")
    if at.mixer.endswith("_kv_b"):
        both = maps.linear(row, "attn_kv_b").reshape(len(h), at.n_head, -1)
        k, v = np.split(both, [sizes.n_nope], axis=-1)
    else:
        k = np.einsum("tr,hrn->thn", row, maps.tensor(f"{blk}_k_b.weight"))
        v = np.einsum("tr,hvr->thv", row, maps.tensor(f"{blk}_v_b.weight"))
    q_plain, q_turned = np.split(q.reshape(len(h), at.n_head, -1), [sizes.n_nope], axis=-1)
    turned = turned[:, None]
    if at.rope is not None:
        inv_freq, factor = config.ropes[at.rope].frequencies(config.n_ctx_train)
        q_turned, turned = (rope(x, inv_freq, factor, config.arch.rope) for x in (q_turned, turned))
    turned = np.repeat(turned, at.n_head, axis=1)
    q = np.concatenate([q_plain, q_turned], -1)
    k = np.concatenate([k, turned], -1)
    if at.q_rope is not None:
        q = q * config.ropes[at.q_rope].gains(np.arange(len(h)))[:, None, None]
    chosen = chosen_keys(maps, h, rank) if at.indexer else None
    ranked = at.mixer.startswith("latent_ranked")
    gated = at.mixer.startswith("latent_gated")
    sinks = maps.tensor(f"{blk}_sinks.weight") if gated else None
    scale = sizes.scale or config.attn_scale
    y = attention(q, k, v, scale, 0.0, at.window, sinks, chosen=chosen)
    if maps.has("attn_gate.weight") or gated or ranked or at.mixer == "latent_norm_gated":
        gate = maps.linear(of_gate, "attn_gate").reshape(len(h), at.n_head, -1)
        y = y / (1 + np.exp(-gate))
    return maps.linear(y.reshape(len(h), -1), "attn_output")
