"""What files leave unsaid, and the sizes of the model tell."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.keys import SIZE_MAX
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.reading import read
from treadle.models.keys import N_LAYER_MAX, Keys

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config

_ALIBI_LAYERS = 40  # of Baichuan 13B; the 7B has 32


def _minicpm(keys: Keys, arch: Arch) -> Config:
    """Files of 2024 lack the three scales. All models of that time have the same ones."""
    n_layer = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    scales = {
        "embedding_scale": 12.0,
        "residual_scale": 1.4 / math.sqrt(n_layer),
        "logit_scale": n_embd / 256.0,
    }
    keys.defaults = {**keys.defaults, **scales}
    return read(keys, arch)


def _baichuan(keys: Keys, arch: Arch) -> Config:
    """Raises UnsupportedError for the 13B, whose positions are biases of scores."""
    if keys.integer("block_count", lo=1, hi=N_LAYER_MAX) == _ALIBI_LAYERS:
        keys.refuse(
            "block_count",
            f"{_ALIBI_LAYERS} layers: this is Baichuan 13B, where scores fall with distance "
            "(ALiBi); treadle has the 7B, which has a rope",
        )
    return read(keys, arch)


MINICPM = replace(DECODER, read=_minicpm)
BAICHUAN = replace(DECODER, read=_baichuan)
