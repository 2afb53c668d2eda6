"""Llama 4: a decoder most of whose layers attend in chunks of tokens; the others turn nothing, and
their queries grow with their position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.archs import TEMPERATURE_LENGTH, WINDOW
from treadle.models.ffns import WEIGHED_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER
from treadle.models.rope import still

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Experts, Layer
    from treadle.models.keys import ArchMetadata

EARLY = 1  # positions by which queries grow before they pass a multiple
N_WITHOUT_NORM = 128  # experts of the size whose queries and keys have no norm: no key says so


def has_norms(n_expert: int) -> bool:
    """Whether queries and keys that turn have a norm, of a model with so many experts."""
    return n_expert != N_WITHOUT_NORM


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """As a decoder's, and what differs from layer to layer."""
    if not keys.integer(WINDOW, lo=0):
        keys.refuse(
            WINDOW, "is 0: a Llama 4 without chunked attention (MobileLLM) is not supported"
        )
    config = reading.read(keys, arch)
    ropes, tempered = config.ropes[:1], None
    if len(config.ropes) > 1:
        grown = config.ropes[1].temperature
        every = keys.integer(TEMPERATURE_LENGTH, lo=1, hi=1 << 31)
        ropes, tempered = (*ropes, still(grown, every, EARLY)), 1
    norms = has_norms(keys.integer("expert_count", 0, lo=0))

    def layer(at: Layer) -> Layer:
        turns = at.rope is not None
        return replace(
            at,
            chunked=at.window > 0,
            q_rope=None if turns else tempered,
            qk_norm=norms and turns,
            ffn=at.ffn if at.experts is None else WEIGHED_EXPERTS,
            experts=at.experts and _alone(keys, at.experts),
        )

    return replace(config, ropes=ropes, layers=tuple(map(layer, config.layers)))


def _alone(keys: ArchMetadata, experts: Experts) -> Experts:
    """One that weighs nothing: the largest score chooses it, and has weighed what it reads."""
    if experts.n_used != 1:
        key = "expert_used_count"
        keys.refuse(
            key, f"{experts.n_used}: treadle supports one expert per token in this architecture"
        )
    return replace(experts, gating="softmax", norm=True, scale=1.0)


LLAMA4 = replace(DECODER, read=read)
