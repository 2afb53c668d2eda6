"""FFNs whose gates, and what these let through, have a limit, in some layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.keys import Keys

# Of the experts that a token chooses; of the shared one, and of FFNs without experts.
LIMIT, SHARED_LIMIT = "swiglu_clamp_exp", "swiglu_clamp_shexp"
_LEAST = 1e-6  # llama.cpp takes smaller ones for none


def activation_of(keys: Keys, arch: Arch, i: int, key: str) -> str:
    """Of layer ``i`` a name in ``kernels.activation.ACTIVATIONS``, or "" without a limit there."""
    found = keys.get(key)
    if found is None:
        return ""
    n_block = keys.integer("block_count")
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        found = [keys.number(key, lo=0.0)] * n_block
    if len(found) != n_block:
        keys.fail(key, f"has {len(found)} entries", f"{n_block}, one per layer")
    limit = float(found[i]) if isinstance(found[i], (int, float, np.floating)) else math.nan
    if not 0.0 <= limit < math.inf:
        keys.fail(key, f"holds {found[i]!r:.60}", "numbers from 0")
    return f"{arch.activation}_to_{limit:.9g}" if limit > _LEAST else ""
