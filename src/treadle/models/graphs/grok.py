"""Grok: a decoder whose layers have experts, in Grok-2 in parallel to a dense FFN."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns import CAPPED_EXPERTS, DENSE_EXPERTS
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

SCALE = "attention.output_scale"
CAP = "router_logit_softcapping"
LENGTH = "attention.temperature_length"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config. Raises FileError for a file without experts."""
    config = reading.read(keys, arch)
    _ = keys.integer("expert_count", lo=1)
    cap = keys.number(CAP, 0.0, lo=0.0)

    def layer(i: int, at: Layer) -> Layer:
        assert at.experts is not None
        dense = f"blk.{i}.ffn_up.weight" in keys.gguf.tensors
        experts = replace(at.experts, cap=cap)
        return replace(at, ffn=DENSE_EXPERTS if dense else CAPPED_EXPERTS, experts=experts)

    return replace(
        config,
        attn_scale=keys.number(SCALE, lo=1e-9),
        n_ctx_most=keys.integer(LENGTH, 0, lo=0, hi=1 << 31),
        layers=tuple(layer(i, at) for i, at in enumerate(config.layers)),
    )


GROK = replace(DECODER, read=read)
