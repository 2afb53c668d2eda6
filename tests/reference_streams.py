"""What Gemma 3n has around a layer, in float64 and plain numpy: streams, and a sparse gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import Array, Kept, Layer, Tensors, attended, gate_of
from tests.reference_gemma import own_part
from treadle.models.config import Config


def joined(config: Config, x: Array, ids: Sequence[int], tensor: Tensors) -> Array:
    """The mean of the streams behind all layers, of scaled embeddings ``x [n_tokens, n_embd]``."""
    more = [x @ w.T for w in tensor("altup_proj.weight")]
    streams = np.stack([x, *(as_large(y, x) for y in more)])
    kept: Kept = {}
    for i in range(config.n_layer):
        streams = layer(Layer(config, i, tensor), streams, ids, kept)
    pairs = zip(streams[1:], tensor("altup_unembd_proj.weight"), strict=True)
    more = [as_large(stream @ w.T, streams[0]) for stream, w in pairs]
    return np.asarray(np.mean([streams[0], *more], axis=0))


def layer(maps: Layer, streams: Array, ids: Sequence[int], kept: Kept) -> Array:
    n = len(streams)
    coefs = maps.linear(router(maps, streams[0]), "altup_predict_coef")
    predicted = streams.copy()
    for i in range(n):
        for j in range(n):
            predicted[i] += coefs[:, i * n + j, None] * streams[j]
    x = predicted[0]
    h = maps.norm(x, "attn_norm")
    low = maps.linear(maps.linear(h, "laurel_l"), "laurel_r")
    mixed = maps.norm(attended(maps, h, kept), "post_attention_norm")
    y = (x + mixed + h + maps.norm(low, "laurel_post_norm")) / np.sqrt(2)
    h = maps.norm(y, "ffn_norm")
    gate = maps.linear(h, "ffn_gate")
    up = maps.linear(h, "ffn_up")
    if maps.at.ffn == "gated_sparse":
        spread = np.sqrt(np.mean((gate - gate.mean(-1, keepdims=True)) ** 2, -1, keepdims=True))
        gate = np.maximum(gate - gate.mean(-1, keepdims=True) - maps.at.cut * spread, 0.0)
    fed = maps.linear(gate_of(gate, up, maps.config.arch.activation), "ffn_down")
    y = y + maps.norm(fed, "post_ffw_norm")
    coefs = 1 + maps.linear(router(maps, y), "altup_correct_coef")
    made = np.stack([p + coefs[:, i, None] * (y - x) for i, p in enumerate(predicted)])
    scaled = made[0] * maps.tensor(f"blk.{maps.i}.altup_correct_scale.weight")
    made[1:] += own_part(maps, scaled, ids)
    return made


def router(maps: Layer, x: Array) -> Array:
    """What it says of states, [n_tokens, n_streams]."""
    h = maps.norm(x, "altup_router_norm") / x.shape[-1]
    return np.asarray(np.tanh(maps.linear(h, "altup_router")))


def as_large(y: Array, x: Array) -> Array:
    """``y`` with the mean square of ``x``."""
    size, own = (np.mean(v * v, axis=-1, keepdims=True) for v in (x, y))
    return np.asarray(y * np.sqrt(size / np.maximum(own, 1e-5)))
