"""Hyper-connections and n-grams of Qwen 3.8 Flash Next, in float64 and plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tests.reference import Array, Layer, Tensors, activate, attended, mixture, rms_norm
from treadle.models.config import Config


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def mixed_streams(config: Config, x: Array, ids: Sequence[int], tensor: Tensors) -> Array:
    """The mix of the streams behind all layers, of embeddings ``x [n_tokens, n_embd]``."""
    from tests.reference_states import MIXED

    hyper = config.layers[0].hyper
    assert hyper is not None
    streams = np.repeat(x[:, None], hyper.n, axis=1)
    if not hyper.n_rank:
        return independent_streams(config, streams, tensor)
    for i in range(config.n_layer):
        maps = Layer(config, i, tensor)
        if maps.at.ngrams:
            streams = streams + ngrams(maps, streams, ids)
        for name, half in (("attn", MIXED.get(maps.at.mixer, attended)), ("ffn", mixture)):
            h, normed = mix(config, streams, partial(stem, tensor, f"blk.{i}.hc_{name}"))
            weights = normed @ stem(tensor, f"blk.{i}.hc_{name}", "inject").T
            weights = 2 * sigmoid(weights / hyper.n)
            streams = streams + weights[:, :, None] * half(maps, h)[:, None]
    return mix(config, streams, partial(stem, tensor, "output_hc"))[0]


def independent_streams(config: Config, streams: Array, tensor: Tensors) -> Array:
    """The normed sum of the streams after all layers of Hunyuan 4."""
    from tests.reference import gated
    from tests.reference_latent import latent

    hyper = config.layers[0].hyper
    assert hyper is not None
    n = hyper.n

    def weights(before: str) -> Array:
        flat = streams.reshape(len(streams), -1)
        mix = rms_norm(flat, np.ones(1), config.norm_eps) @ stem(tensor, before, "fn").T
        scale = stem(tensor, before, "scale").repeat(n)
        return sigmoid(mix * scale + stem(tensor, before, "base"))

    for i in range(config.n_layer):
        maps = Layer(config, i, tensor)
        for name, half in (("attn", latent), ("ffn", gated)):
            w = weights(f"blk.{i}.hc_{name}")
            h = ((w[:, :n] + hyper.eps)[:, :, None] * streams).sum(1)
            h = half(maps, maps.norm(h, f"{name}_norm"))
            added = hyper.magnitude * w[:, n:] + hyper.eps
            streams = streams + added[:, :, None] * h[:, None]
    h = ((weights("output_hc") + hyper.eps)[:, :, None] * streams).sum(1)
    return rms_norm(h, tensor("output_norm.weight"), config.norm_eps)


def stem(tensor: Tensors, before: str, name: str) -> Array:
    return tensor(f"{before}_{name}.weight")


def norm(config: Config, streams: Array, weight: Array) -> Array:
    """Each stream with weights of its own."""
    return rms_norm(streams, weight.reshape(streams.shape[1:]), config.norm_eps)


def mix(config: Config, streams: Array, tensor: object) -> tuple[Array, Array]:
    """What a half reads, and the normed streams side by side."""
    assert callable(tensor)
    n = streams.shape[1]
    normed = norm(config, streams, tensor("norm"))
    flat = normed.reshape(len(streams), -1)
    gate = activate(flat @ tensor("down").T / n, "silu") @ tensor("up").T
    return (sigmoid(gate).reshape(normed.shape) * normed).mean(1), flat


def ngrams(maps: Layer, streams: Array, ids: Sequence[int]) -> Array:
    """What the layer adds to the streams."""
    grams = maps.at.ngrams
    assert grams is not None
    config = maps.config
    table = maps.tensor("per_layer_token_embd.weight")
    embd = np.stack([table[rows_of(maps, ids, t)].ravel() for t in range(len(ids))])
    blk = f"blk.{maps.i}.ple"
    key = norm(
        config,
        maps.linear(embd, "ple_key").reshape(streams.shape),
        maps.tensor(f"{blk}_norm_key.weight"),
    )
    query = norm(config, streams, maps.tensor(f"{blk}_norm_query.weight"))
    score = (key * query).sum(-1) / np.sqrt(config.n_embd)
    score = np.sqrt(np.maximum(np.abs(score), 1e-6)) * np.sign(score)
    value = sigmoid(score)[:, :, None] * maps.linear(embd, "ple_value")[:, None]
    u = norm(config, value, maps.tensor(f"{blk}_norm_conv.weight")).reshape(len(ids), -1)
    taps = maps.tensor(f"{blk}_conv1d.weight")
    past = np.concatenate([np.zeros((grams.n_before, u.shape[1])), u])
    made = sum(past[j * grams.n :][: len(u)] * taps[:, j] for j in range(grams.n_conv))
    return value + activate(np.asarray(made), "silu").reshape(value.shape)


def rows_of(maps: Layer, ids: Sequence[int], t: int) -> list[int]:
    """The table's rows of token ``t``."""
    grams = maps.at.ngrams
    assert grams is not None
    seen = [ids[t]]
    for back in range(1, grams.n):
        own = ids[t - back] if back <= t else grams.end
        seen.append(grams.end if grams.end in (own, *seen[1:]) else own)
    found = []
    mixed = seen[0] * grams.multipliers[0]
    for n in range(2, grams.n + 1):
        mixed ^= seen[n - 1] * grams.multipliers[n - 1]
        for h in range((n - 2) * grams.heads, (n - 1) * grams.heads):
            found.append(mixed % grams.sizes[h] + grams.offsets[h])
    return found
