"""Latent attention with a gate for each value of its result (Kimi K3, 2026), and with sinks as well
(Hunyuan 4, 2026).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.indexed import LATENT_INDEX_SHARED, LATENT_INDEXED
from treadle.models.mixers.latent import LATENT, LATENT_KV_B, LATENT_Q, LATENT_Q_KV_B
from treadle.models.structure import TensorRow, with_rows

if TYPE_CHECKING:
    from treadle.models.structure import Sublayer

GATE = TensorRow("attn_gate.weight", ("n_attn", "n_embd"))
_SINKS = TensorRow("attn_sinks.weight", ("n_head",))


def _gated(of: Sublayer) -> Sublayer:
    wide = with_rows(of, GATE)
    return replace(wide, rows=(*wide.rows, _SINKS))


LATENT_GATED = _gated(LATENT)
LATENT_GATED_INDEXED = _gated(LATENT_INDEXED)
LATENT_GATED_SHARED = _gated(LATENT_INDEX_SHARED)
_MAYBE = replace(GATE, optional=True)
LATENT_WIDE = with_rows(LATENT, _MAYBE)
LATENT_WIDE_Q = with_rows(LATENT_Q, _MAYBE)
LATENT_WIDE_KV_B = with_rows(LATENT_KV_B, _MAYBE)
LATENT_WIDE_Q_KV_B = with_rows(LATENT_Q_KV_B, _MAYBE)
