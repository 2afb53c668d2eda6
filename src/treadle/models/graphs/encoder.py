"""The encoder: a decoder's layers whose tokens see each other both ways, and no logits.

A text's tokens are all in one run.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.models.archs import Arch
from treadle.models.config import Config
from treadle.models.graphs.decoder import DECODER, embedding, states
from treadle.models.graphs.reading import read_config
from treadle.models.keys import Keys
from treadle.models.structure import TensorRow, with_bias


def read(keys: Keys, arch: Arch) -> Config:
    """As a decoder's; a window reaches half of the key's number to each side."""
    config = read_config(keys, arch)
    layers = (
        replace(at, causal=False, window=at.window // 2 + 1 if at.window else 0)
        for at in config.layers
    )
    return replace(config, layers=tuple(layers))


ENCODER = replace(
    DECODER,
    outputs={"embedding": embedding, "states": states},
    rows=(
        *DECODER.rows,
        TensorRow("token_types.weight", ("n_types", "n_embd"), optional=True),  # the first for all
        *with_bias("token_embd_norm", "n_embd", optional=True),
    ),
    read=read,
)
