"""OLMo Hybrid: recurrent layers have norms before their sublayers, attention layers after them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns import POST_NORM
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.kinds import ATTENTION_STEM
from treadle.models.mixers.mamba2 import state_of

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

SIGNED = "ssm.negative_eigenvalues"  # treadle's own key
_EPS = 1e-5  # of the norm after the recurrence's heads; independent of other norms


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config: attention layers have norms after their sublayers, recurrent ones
    before, and ``Recurrence.beta_most`` is the largest beta of the delta rule.
    """
    config = reading.read(keys, arch)
    most = 2.0 if keys.flag(SIGNED, True) else 1.0

    def own(layer: Layer) -> Layer:
        state = replace(state_of(layer), norm_eps=_EPS, beta_most=most)
        return replace(layer, state=state, ffn=POST_NORM if layer.n_head_kv else layer.ffn)

    return replace(config, layers=tuple(map(own, config.layers)), ffn_norm=ATTENTION_STEM)


OLMO_HYBRID = replace(DECODER, read=read)
