"""Llama 4: a decoder with chunked attention in most layers; the others have no rope, and queries
scaled by a temperature that grows with position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.archs import TEMPERATURE_LENGTH, WINDOW
from treadle.models.ffns import WEIGHED_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.rope import scale_only

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Experts, Layer
    from treadle.models.keys import ArchMetadata

EARLY = 1  # positions by which the temperature grows early
N_WITHOUT_NORM = 128  # experts of the size without q/k norms, for which there is no key


def has_norms(n_expert: int) -> bool:
    """Return whether queries and keys have a norm in layers with rope, in a model of ``n_expert``
    experts: files have no key for it, but the model without these norms is the only one with
    N_WITHOUT_NORM experts.
    """
    return n_expert != N_WITHOUT_NORM


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with chunked attention, query temperature and norms in the layers
    that have them. Raises UnsupportedError for files without a window.
    """
    if not keys.integer(WINDOW, lo=0):
        keys.refuse(
            WINDOW, "is 0: a Llama 4 without chunked attention (MobileLLM) is not supported"
        )
    config = reading.read(keys, arch)
    ropes = config.ropes[:1]
    tempered = None
    if len(config.ropes) > 1:
        grown = config.ropes[1].temperature
        every = keys.integer(TEMPERATURE_LENGTH, lo=1, hi=1 << 31)
        ropes = (*ropes, scale_only(grown, every, EARLY))
        tempered = 1
    norms = has_norms(keys.integer("expert_count", 0, lo=0))

    def layer(at: Layer) -> Layer:
        turns = at.rope is not None
        return replace(
            at,
            chunked=at.window > 0,
            q_rope=None if turns else tempered,
            qk_norm=norms and turns,
            ffn=at.ffn if at.experts is None else WEIGHED_EXPERTS,
            experts=at.experts and _unweighted_experts(keys, at.experts),
        )

    return replace(config, ropes=ropes, layers=tuple(map(layer, config.layers)))


def _unweighted_experts(keys: ArchMetadata, experts: Experts) -> Experts:
    """Return ``experts`` with routing settings that give the chosen expert the weight 1: its score
    scales its input, not its result. Raises UnsupportedError for several experts per token.
    """
    if experts.n_used != 1:
        key = "expert_used_count"
        keys.refuse(
            key, f"{experts.n_used}: treadle supports one expert per token in this architecture"
        )
    return replace(experts, gating="softmax", norm=True, scale=1.0)


LLAMA4 = replace(DECODER, read=read)
