"""Architectures whose files omit or misstate values that follow from sizes or from the
architecture.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import ALIBI
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.reading import read
from treadle.models.keys import N_LAYER_MAX, ArchMetadata

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config

_ALIBI_LAYERS = 40  # of Baichuan 13B; the 7B has 32
# Phi-3.5-MoE multiplies cos and sin by the second. llama.cpp's converter writes the first, the
# result of Phi 3's formula for contexts of 131072 and 4096 tokens.
_PHI3_FACTOR = math.sqrt(1.0 + math.log(131072 / 4096) / math.log(4096))
_PHIMOE_FACTOR = 1.243163121016122


def _minicpm(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a MiniCPM. Files of 2024, and those of MiniCPM 3, lack three scales;
    they get those of ``minicpm_scales``.
    """
    n_layer = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    keys.defaults = {**keys.defaults, **minicpm_scales(n_layer, n_embd)}
    return read(keys, arch)


def minicpm_scales(n_layer: int, n_embd: int) -> dict[str, float]:
    """Return MiniCPM's scales of embeddings and residuals, and its divisor of logits
    (``logit_scale``), by the names of the keys that lack them.
    """
    return {
        "embedding_scale": 12.0,
        "residual_scale": 1.4 / math.sqrt(n_layer),
        "logit_scale": n_embd / 256.0,
    }


def _baichuan(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a Baichuan: the 13B, known by its 40 layers, has ALiBi instead of
    rope.
    """
    if keys.integer("block_count", lo=1, hi=N_LAYER_MAX) == _ALIBI_LAYERS:
        keys.defaults = {**keys.defaults, ALIBI: 8.0}
        arch = replace(arch, rope="none")
    return read(keys, arch)


def _jais(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a Jais: scores are divided by head_dim, not by its square root."""
    config = read(keys, arch)
    return replace(config, attn_scale=1.0 / config.layers[0].head_dim)


def _qwen(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a first-generation Qwen, whose key of the FFN's width counts the rows of
    gate and up together. Raises FileError if it is odd.
    """
    config = read(keys, arch)
    layers = []
    for layer in config.layers:
        if layer.n_ff % 2:
            keys.fail("feed_forward_length", f"is {layer.n_ff}", "an even number")
        layers.append(replace(layer, n_ff=layer.n_ff // 2))
    return replace(config, layers=tuple(layers))


def _phimoe(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a PhiMoE. Phi-3.5-MoE, the only one with long rope factors, gets its own
    factor of cosines and sines (``Rope.attn_factor``): files have the one of Phi 3.
    """
    config = read(keys, arch)
    rope = config.ropes[0]
    if rope.long_factors and math.isclose(rope.attn_factor, _PHI3_FACTOR, rel_tol=1e-6):
        config = replace(config, ropes=(replace(rope, attn_factor=_PHIMOE_FACTOR),))
    return config


MINICPM = replace(DECODER, read=_minicpm)
BAICHUAN = replace(DECODER, read=_baichuan)
JAIS = replace(DECODER, read=_jais)
QWEN = replace(DECODER, read=_qwen)
PHIMOE = replace(DECODER, read=_phimoe)
