"""A.X K2 (SK Telecom): DeepSeek V3.2's layers, with gates of norms and a gate of attention.

llama.cpp has no such architecture. The keys are those of DeepSeek V3.2, and the rank of the gates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.ffns import INPUT_NORM_GATED_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

NORM_RANK = "gated_norm_rank"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the rank of the gates of norms (``Layer.n_norm_rank``)."""
    config = reading.read(keys, arch)
    rank = keys.integer(NORM_RANK, lo=1, hi=SIZE_MAX)

    def layer(at: Layer) -> Layer:
        ffn = INPUT_NORM_GATED_EXPERTS if at.experts is not None else at.ffn
        return replace(at, mixer="latent_ranked_indexed", ffn=ffn, n_norm_rank=rank)

    return replace(config, layers=tuple(map(layer, config.layers)))


AXK2 = replace(DECODER, read=read)
