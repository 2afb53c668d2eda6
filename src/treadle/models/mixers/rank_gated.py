"""Latent attention to chosen keys (A.X K2, 2026), with two gates: one for each value of its result,
made of the query rank before its norm, and one after the norm of its input.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from treadle.models.mixers.indexed import LATENT_INDEXED, choose
from treadle.models.mixers.latent import build
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.structure import Sizes


def _sizes(layer: Layer) -> Sizes:
    return {**LATENT_INDEXED.sizes(layer), "n_norm_rank": layer.n_norm_rank}


LATENT_RANKED_INDEXED = replace(
    LATENT_INDEXED,
    build=partial(build, choice=choose, ranked=True),
    rows=(
        *(row for row in LATENT_INDEXED.rows if row.name != "attn_gate.weight"),
        TensorRow("attn_gate.weight", ("n_attn", "n_q_rank")),
        TensorRow("attn_norm_gate_down.weight", ("n_norm_rank", "n_embd")),
        TensorRow("attn_norm_gate_up.weight", ("n_embd", "n_norm_rank")),
    ),
    sizes=_sizes,
)
