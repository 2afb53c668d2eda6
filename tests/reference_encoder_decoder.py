"""T5's forward pass in float64, from the tensors of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tests.reference import activate, rms_norm, tensor_of
from treadle.files.gguf import GGUF
from treadle.models.config import Config

Array = npt.NDArray[np.float64]
Tensors = Callable[[str], Array]
REACH = 128


def bucket(distance: int, n_buckets: int, *, causal: bool) -> int:
    """The bucket of key - query as T5's paper has it: half of a side are single distances, the
    others grow to ``REACH``.
    """
    side = n_buckets if causal else n_buckets // 2
    first = side if not causal and distance > 0 else 0
    n = max(-distance, 0) if causal else abs(distance)
    exact = side // 2
    if n < exact:
        return first + n
    share = np.float32(np.log(np.float32(n) / np.float32(exact))) / np.float32(
        math.log(REACH / exact)
    )
    return first + min(exact + int(share * np.float32(side - exact)), side - 1)


def biases(matrix: Array, n: int, *, causal: bool) -> Array:
    """Biases by head, query and key, ``[n_head, n, n]``."""
    of = np.array([bucket(d, len(matrix), causal=causal) for d in range(1 - n, n)])
    place = np.arange(n)
    return np.moveaxis(matrix[of[place - place[:, None] + n - 1]], 2, 0)


def attended(q: Array, k: Array, v: Array, n_head: int, added: Array | float) -> Array:
    """Attention of ``[n, n_head * dims]``; scores are not divided by the root of ``dims``."""

    def by_head(x: Array, n: int) -> Array:
        return np.moveaxis(x.reshape(len(x), n, -1), 1, 0)

    dims = q.shape[1] // n_head
    n_kv = k.shape[1] // dims
    keys, values = (np.repeat(by_head(x, n_kv), n_head // n_kv, 0) for x in (k, v))
    scores = by_head(q, n_head) @ keys.swapaxes(1, 2) + added
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights = weights / weights.sum(2, keepdims=True)
    return np.asarray(np.moveaxis(weights @ values, 0, 1).reshape(len(q), -1))


def fed(x: Array, at: str, tensor: Tensors, config: Config) -> Array:
    up = x @ tensor(f"{at}.ffn_up.weight").T
    if config.arch.gated:
        h = activate(x @ tensor(f"{at}.ffn_gate.weight").T, "gelu") * up
    else:
        h = np.maximum(up, 0.0)
    return np.asarray(h @ tensor(f"{at}.ffn_down.weight").T)


def layers(
    x: Array, prefix: str, config: Config, tensor: Tensors, has: Callable[[str], bool], rows: Array
) -> Array:
    """The states after all layers and the last norm. ``rows``: those of the encoder, for the
    decoder.
    """
    causal = not prefix
    future = np.triu(np.full((len(x), len(x)), -np.inf), 1) if causal else 0.0
    for i, layer in enumerate(config.layers):
        at = f"{prefix}blk.{i}"

        def norm(x: Array, name: str, at: str = at) -> Array:
            return rms_norm(x, tensor(f"{at}.{name}.weight"), config.norm_eps)

        def product(x: Array, name: str, at: str = at) -> Array:
            return x @ tensor(f"{at}.{name}.weight").T

        own = f"{at}.attn_rel_b.weight"
        added = biases(
            tensor(own if has(own) else f"{prefix}blk.0.attn_rel_b.weight"), len(x), causal=causal
        )
        h = norm(x, "attn_norm")
        q, k, v = (product(h, f"attn_{one}") for one in "qkv")
        x = x + product(attended(q, k, v, layer.n_head, added + future), "attn_output")
        if causal:
            h = norm(x, "cross_attn_norm")
            q = product(h, "cross_attn_q")
            k, v = (product(rows, f"cross_attn_{one}") for one in "kv")
            x = x + product(attended(q, k, v, layer.n_head, 0.0), "cross_attn_output")
        x = x + fed(norm(x, "ffn_norm"), at, tensor, config)
    return rms_norm(x, tensor(f"{prefix}output_norm.weight"), config.norm_eps)


def logits(gguf: GGUF, config: Config, source: Sequence[int], ids: Sequence[int]) -> Array:
    """The logits after each of the decoder's ids, ``[n_ids, n_vocab]``."""
    tensor = tensor_of(gguf)
    assert config.encoder is not None

    def has(name: str) -> bool:
        return name in gguf.tensors

    table = tensor("token_embd.weight")
    nothing = np.empty((0, 0))
    rows = layers(table[list(source)], "enc.", config.encoder, tensor, has, nothing)
    states = layers(table[list(ids)], "", config, tensor, has, rows)
    head = tensor("output.weight") if has("output.weight") else table
    return states * config.logit_scale @ head.T
