"""Gated FFN with a norm after it and none before (OLMo Hybrid's attention layers)."""

from __future__ import annotations

from dataclasses import replace

from treadle.models.ffns.gated import GATED, NORMS_BEFORE
from treadle.models.structure import TensorRow

_NORM = TensorRow("post_ffw_norm.weight", ("n_embd",))
_OTHERS = (row for row in GATED.rows if row not in NORMS_BEFORE and row.name != _NORM.name)
GATED_POST_NORM = replace(GATED, before="", rows=(*_OTHERS, _NORM))
