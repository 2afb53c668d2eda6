"""NanoChat: norms without weights, and rope in the opposite direction.

Queries and keys are normed after the rope. Without weights this equals a norm before it, since
rotation preserves lengths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.rope import Rope

_LATER = "lambda"  # in tensor names of later versions: factors that mix streams


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config. Raises UnsupportedError for a later version of NanoChat."""
    if name := next((name for name in keys.gguf.tensors if _LATER in name), ""):
        what = (
            "belongs to a later NanoChat with different layers: treadle supports the 2025 version"
        )
        raise UnsupportedError(f"{keys.gguf.path}: {name}: {what}")
    config = reading.read(keys, arch)
    layers = tuple(replace(layer, qk_norm=True) for layer in config.layers)
    return replace(config, layers=layers, ropes=tuple(map(_backwards, config.ropes)))


def _backwards(rope: Rope) -> Rope:
    """Return ``rope`` with negated frequencies, so that it turns in the opposite direction, and
    without a factor of cosines and sines: the norms after the rope would cancel it.
    """
    short = rope.factors or (1.0,) * (rope.dims // 2)
    long = rope.long_factors
    return replace(
        rope,
        factors=tuple(-factor for factor in short),
        long_factors=long and tuple(-factor for factor in long),
        attn_factor=rope.attn_factor / rope.frequencies()[1],
    )


NANOCHAT = replace(DECODER, read=read)
