"""Latent attention with sinks and a gate of each value before the output (Hunyuan 4, 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.indexed import LATENT_INDEX_SHARED, LATENT_INDEXED
from treadle.models.mixers.latent import LATENT
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.structure import Sublayer

_GATE = TensorRow("attn_gate.weight", ("n_attn", "n_embd"))
_SINKS = TensorRow("attn_sinks.weight", ("n_head",))


def _gated(of: Sublayer) -> Sublayer:
    rows = tuple(_GATE if row.name == _GATE.name else row for row in of.rows)
    return replace(of, rows=(*rows, _SINKS))


LATENT_GATED = _gated(LATENT)
LATENT_GATED_INDEXED = _gated(LATENT_INDEXED)
LATENT_GATED_SHARED = _gated(LATENT_INDEX_SHARED)
