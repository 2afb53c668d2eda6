"""Keys of FFN activations: layers whose gates are clamped, and files that name their own
activation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.models.archs import GATE_LIMITED

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.keys import ArchMetadata

# Limits of routed experts; of the shared expert and of dense FFNs.
LIMIT = "swiglu_clamp_exp"
SHARED_LIMIT = "swiglu_clamp_shexp"
_LEAST = 1e-6  # smaller limits mean none, as in llama.cpp


def activation_of(keys: ArchMetadata, arch: Arch, i: int, key: str) -> str:
    """Return the name, in ``kernels/activations.py``, of layer ``i``'s activation with the limit to
    which the file's ``key`` clamps its gates; "" without a limit. Raises FileError for a limit that
    is no number from 0 on.
    """
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
    where = "of" if keys.flag(GATE_LIMITED, False) else "to"
    return f"{arch.activation}_{where}_{limit:.9g}" if limit > _LEAST else ""


ACTIVATION = "hidden_activation"
# transformers' names, which llama.cpp's converter writes for ModernBERT.
ACTIVATIONS = {"gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu", "silu": "silu"}


def takes_activation(arch: Arch) -> bool:
    """Return whether files of this architecture may name their activation, because its models
    differ in it.
    """
    return arch.graph == "encoder" or (not arch.gated and arch.activation.startswith("gelu"))


def with_activation(keys: ArchMetadata, arch: Arch) -> Arch:
    """Return the architecture with the activation that the file names, if it may (Granite's
    ModernBERT, GPT-NeoX-20B). Raises UnsupportedError for an unknown name.
    """
    if not (keys.has(ACTIVATION) and takes_activation(arch)):
        return arch
    word = keys.text(ACTIVATION)
    if word not in ACTIVATIONS:
        keys.refuse(ACTIVATION, f"{word!r:.60}: treadle supports {', '.join(ACTIVATIONS)}")
    return replace(arch, activation=ACTIVATIONS[word])
