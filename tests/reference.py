"""A forward pass in float64 and plain numpy: what every faster path must agree with.

It reads the same ``Config`` and tensors as the compiled decoder and shares no other code with it:
no cache, no pages, no tiles; every token attends to all the tokens before it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from treadle.files.gguf import GGUF
from treadle.models.config import Config

Array = npt.NDArray[np.float64]
Sublayer = Callable[[Config, int, Array, Callable[[str], Array]], Array]


def forward(
    gguf: GGUF,
    config: Config,
    ids: Sequence[int],
    mix: Sublayer | None = None,
    feed: Sublayer | None = None,
) -> Array:
    """Logits [n_tokens, n_vocab] of one sequence that starts at position 0; ``mix`` and ``feed``
    in place of attention and gated FFN.
    """
    h = states(gguf, config, ids, mix, feed)
    logits = h @ tensor_of(gguf)("token_embd.weight" if config.tied else "output.weight").T
    return softcap(logits, config.logit_softcap)


def states(
    gguf: GGUF,
    config: Config,
    ids: Sequence[int],
    mix: Sublayer | None = None,
    feed: Sublayer | None = None,
) -> Array:
    """The last layer's normed states [n_tokens, n_embd]."""
    tensor = tensor_of(gguf)
    x = tensor("token_embd.weight")[np.asarray(ids)] * config.embd_scale
    for i in range(config.n_layer):
        x = (mix or mixed)(config, i, x, tensor)
        x = (feed or fed)(config, i, x, tensor)
    return rms_norm(x, tensor("output_norm.weight"), config.norm_eps)


def tensor_of(gguf: GGUF) -> Callable[[str], Array]:
    """A file's tensors by name."""
    return lambda name: gguf.tensors[name].dequantize().astype(np.float64)


def kl_divergence(reference: Array, logits: Array) -> float:
    """Mean over positions of KL(reference || logits), both [n_tokens, n_vocab], in nats."""
    p, q = log_softmax(reference), log_softmax(logits)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


def log_softmax(x: npt.NDArray[np.floating]) -> Array:
    """Of the last axis, in float64."""
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap); x itself where cap is 0."""
    return cap * np.tanh(x / cap) if cap else x


def activate(x: Array, activation: str) -> Array:
    """silu, or gelu by its tanh approximation."""
    if activation == "silu":
        return np.asarray(x / (1.0 + np.exp(-x)))
    return np.asarray(0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))))


def rope(x: Array, inv_freq: Array, factor: float, kind: str) -> Array:
    """Turn the first dims of each head by position * inv_freq; x [n_tokens, n_head, head_dim]."""
    angle = np.arange(len(x))[:, None, None] * inv_freq  # [n_tokens, 1, dims / 2]
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    half = len(inv_freq)
    first = slice(0, 2 * half, 2) if kind == "norm" else slice(0, half)
    second = slice(1, 2 * half, 2) if kind == "norm" else slice(half, 2 * half)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attention(q: Array, k: Array, v: Array, scale: float, cap: float, window: int) -> Array:
    """Causal attention.

    q [n_tokens, n_head, head_dim], k [n_tokens, n_head_kv, head_dim],
    v [n_tokens, n_head_kv, head_dim_v] -> [n_tokens, n_head, head_dim_v].
    """
    n_group = q.shape[1] // k.shape[1]  # query heads that share a key head
    k, v = np.repeat(k, n_group, axis=1), np.repeat(v, n_group, axis=1)
    score = softcap(np.einsum("qhd,khd->hqk", q, k) * scale, cap)
    age = np.arange(len(q))[:, None] - np.arange(len(k))  # [query, key], tokens ago
    seen = (age >= 0) & (age < window) if window else age >= 0
    weight = np.exp(log_softmax(np.where(seen, score, -np.inf)))
    return np.asarray(np.einsum("hqk,khd->qhd", weight, v))


class Layer:
    """One layer's linear maps and norms."""

    def __init__(self, config: Config, i: int, tensor: Callable[[str], Array]) -> None:
        self.config, self.i, self.tensor = config, i, tensor

    def linear(self, x: Array, stem: str) -> Array:
        """With its bias, if the file has one."""
        y = x @ self.tensor(f"blk.{self.i}.{stem}.weight").T
        biased = f"{stem}.bias" in self.config.optional
        return y + self.tensor(f"blk.{self.i}.{stem}.bias") if biased else y

    def norm(self, x: Array, stem: str, *, optional: bool = False) -> Array:
        """An optional norm that the file lacks is the identity."""
        if optional and f"{stem}.weight" not in self.config.optional:
            return x
        return rms_norm(x, self.tensor(f"blk.{self.i}.{stem}.weight"), self.config.norm_eps)


def mixed(config: Config, i: int, x: Array, tensor: Callable[[str], Array]) -> Array:
    """x [n_tokens, n_embd] through the attention of layer i."""

    def heads(x: Array, n_head: int) -> Array:
        return x.reshape(len(x), n_head, -1)

    maps, layer = Layer(config, i, tensor), config.layers[i]
    linear, norm = maps.linear, maps.norm
    inv_freq, factor = config.ropes[layer.rope].frequencies()
    h = norm(x, "attn_norm")
    q = norm(heads(linear(h, "attn_q"), layer.n_head), "attn_q_norm", optional=True)
    k = norm(heads(linear(h, "attn_k"), layer.n_head_kv), "attn_k_norm", optional=True)
    v = heads(linear(h, "attn_v"), layer.n_head_kv)
    q = rope(q, inv_freq, factor, config.arch.rope)
    k = rope(k, inv_freq, factor, config.arch.rope)
    a = attention(q, k, v, config.attn_scale, config.attn_softcap, layer.window)
    return x + norm(
        linear(a.reshape(len(x), -1), "attn_output"), "post_attention_norm", optional=True
    )


def fed(config: Config, i: int, x: Array, tensor: Callable[[str], Array]) -> Array:
    """x [n_tokens, n_embd] through the gated FFN of layer i."""
    maps = Layer(config, i, tensor)
    h = maps.norm(x, "ffn_norm")
    gate = activate(maps.linear(h, "ffn_gate"), config.arch.activation)
    h = maps.linear(gate * maps.linear(h, "ffn_up"), "ffn_down")
    return x + maps.norm(h, "post_ffw_norm", optional=True)
