"""What files leave unsaid, and the sizes of the model tell."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.keys import SIZE_MAX
from treadle.models.archs import ALIBI
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.reading import read
from treadle.models.keys import N_LAYER_MAX, Keys

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config

_ALIBI_LAYERS = 40  # of Baichuan 13B; the 7B has 32


def _minicpm(keys: Keys, arch: Arch) -> Config:
    """Files of 2024, and those of MiniCPM 3, lack the three scales. All these models have the
    same ones.
    """
    n_layer = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    keys.defaults = {**keys.defaults, **minicpm_scales(n_layer, n_embd)}
    return read(keys, arch)


def minicpm_scales(n_layer: int, n_embd: int) -> dict[str, float]:
    """Of embeddings, of what a layer adds, and by which logits are divided."""
    return {
        "embedding_scale": 12.0,
        "residual_scale": 1.4 / math.sqrt(n_layer),
        "logit_scale": n_embd / 256.0,
    }


def _baichuan(keys: Keys, arch: Arch) -> Config:
    """The 13B has no rope: scores fall with distance."""
    if keys.integer("block_count", lo=1, hi=N_LAYER_MAX) == _ALIBI_LAYERS:
        keys.defaults = {**keys.defaults, ALIBI: 8.0}
        arch = replace(arch, rope="none")
    return read(keys, arch)


MINICPM = replace(DECODER, read=_minicpm)
BAICHUAN = replace(DECODER, read=_baichuan)
