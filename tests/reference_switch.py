"""Granite Switch in float64: adapters for each token, as llama.cpp's graph chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tests.reference import Layer
    from treadle.models.config import Switch

Array = npt.NDArray[np.float64]


class Switched:
    """A file's tensors by name, with the adapters of one text's tokens."""

    def __init__(self, tensor: Callable[[str], Array], switch: Switch, ids: Sequence[int]) -> None:
        self.tensor = tensor
        self.adapters = chosen(switch, ids)
        instead = dict(zip(switch.tokens, switch.substitutes, strict=True))
        self.substituted = [instead.get(token, token) for token in ids]

    def __call__(self, name: str) -> Array:
        return self.tensor(name)


def chosen(switch: Switch, ids: Sequence[int]) -> list[int]:
    """The adapter of each token: by attention to all tokens before it, in float32."""
    first = switch.n + 1 - len(switch.tokens)
    numbers = {token: first + i for i, token in enumerate(switch.tokens)}
    found: list[int] = []
    for n in range(1, len(ids) + 1):
        seen = ids[:n]
        if switch.latest:
            last = [numbers[token] for token in seen if token in numbers]
            found.append(last[-1] if last else 0)
            continue
        keys = np.array([switch.gain if token in numbers else -switch.gain for token in seen])
        values = np.array([numbers.get(token, 0) for token in seen], np.float32)
        weights = np.exp((keys - keys.max()).astype(np.float32))
        weights = weights * np.float32(1.0 / weights.astype(np.float64).sum())
        mean = float(min(max(weights @ values, 0.0), switch.n))
        found.append(int(np.floor(mean + 0.5)))
    return found


def added(maps: Layer, x: Array, stem: str, rows: slice | None) -> Array | float:
    """What the tokens' adapters add to ``linear(x)``."""
    tensor: Any = maps.tensor
    if stem == "attn_qkv":
        at = maps.at
        n_q = at.n_head * at.head_dim
        assert rows is not None
        parts = {0: "attn_q", n_q: "attn_k", n_q + at.n_head_kv * at.head_dim: "attn_v"}
        stem = parts[int(rows.start)]
    a, b = (tensor(f"blk.{maps.i}.{stem}_lora_{side}.weight") for side in "ab")
    each = [b[which] @ (a[which] @ row) for which, row in zip(tensor.adapters, x, strict=True)]
    return np.array(each)
