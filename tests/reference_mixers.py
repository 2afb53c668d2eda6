"""How some architectures choose and weigh experts, in float64 and plain numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def sparse_mixer(scores: Array, n_used: int, jitter: float) -> tuple[npt.NDArray[np.intp], Array]:
    """SparseMixer without noise (arXiv 2409.12136): a token's experts, one after the other. Each
    weighs its share of a softmax over those left that are near it.
    """
    left = scores.copy()
    chosen = []
    weights = []
    for _ in range(n_used):
        best = int(left.argmax())
        top = left[best]
        near = top - left <= 2 * jitter * np.maximum(np.abs(left), top)
        powers = np.exp(left[near] - top)
        chosen.append(best)
        weights.append(1 / powers.sum())
        left[best] = -np.inf
    return np.array(chosen), np.array(weights)
