"""GroveMoE: a decoder with experts, of which groups of neighbours share an additional small
expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.ffns import GROVE_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

PER = "experts_per_group"
WIDTH = "expert_chunk_feed_forward_length"
SCALE = "expert_group_scale"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the sizes of the small experts that neighbours share. Raises
    FileError for a file without experts.
    """
    config = reading.read(keys, arch)
    n = keys.integer("expert_count", lo=1)
    per = keys.integer(PER, lo=1, hi=n)
    if n % per:
        keys.fail(PER, f"{per} does not divide {n} experts")
    width = keys.integer(WIDTH, config.layers[0].head_dim, lo=1, hi=SIZE_MAX)
    scale = keys.number(SCALE, lo=0.0)

    def layer(at: Layer) -> Layer:
        assert at.experts is not None
        experts = replace(at.experts, per_chunk=per, n_ff_chunk=width, chunk_scale=scale)
        return replace(at, ffn=GROVE_EXPERTS, experts=experts)

    return replace(config, layers=tuple(map(layer, config.layers)))


GROVE = replace(DECODER, read=read)
