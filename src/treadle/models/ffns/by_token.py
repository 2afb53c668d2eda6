"""Experts that a table chooses by the token; the router's scores only weigh them (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import EXPERTS
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer


def _sizes(layer: Layer) -> Sizes:
    assert layer.experts is not None
    return {**EXPERTS.sizes(layer), "n_used": layer.experts.n_used}


EXPERTS_BY_TOKEN = replace(
    EXPERTS,
    rows=(
        *(row for row in EXPERTS.rows if row.name != "exp_probs_b.bias"),
        TensorRow("ffn_gate_tid2eid.weight", ("n_vocab", "n_used")),
    ),
    sizes=_sizes,
    unread=EXPERTS.unread | {"exp_probs_b.bias"},  # llama.cpp's converter leaves it out
)
