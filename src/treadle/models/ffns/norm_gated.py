"""Experts with a gate after the norm of their input (A.X K2)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import EXPERTS
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer


def _sizes(layer: Layer) -> Sizes:
    return {**EXPERTS.sizes(layer), "n_norm_rank": layer.n_norm_rank}


EXPERTS_NORM_GATED = replace(
    EXPERTS,
    rows=(
        *EXPERTS.rows,
        TensorRow("ffn_norm_gate_down.weight", ("n_norm_rank", "n_embd")),
        TensorRow("ffn_norm_gate_up.weight", ("n_embd", "n_norm_rank")),
    ),
    sizes=_sizes,
)
