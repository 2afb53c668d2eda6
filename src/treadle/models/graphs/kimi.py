"""Kimi Linear and Ling 3: latent attention in some layers, a recurrent state in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.latent import KV_RANK, VALUE

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config. The length of a cached value is taken from the key of the rank
    (``attention.kv_lora_rank``): llama.cpp's converter writes the checkpoint's unused head_dim as
    the length.
    """
    keys.values = {**keys.values, VALUE: keys.integer(KV_RANK, lo=1, hi=SIZE_MAX)}
    return reading.read(keys, arch)


KIMI = replace(DECODER, read=read)
