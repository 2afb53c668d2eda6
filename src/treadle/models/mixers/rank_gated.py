"""Latent attention to chosen keys (A.X K2, 2026), with two gates: one for each value of its result,
made of the query rank before its norm, and one after the norm of its input.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from treadle.models.mixers.indexed import LATENT_INDEXED, choose
from treadle.models.mixers.latent import build
from treadle.models.structure import DOWN_FIRST, TensorRow, with_gates, with_rows

LATENT_RANKED_INDEXED = replace(
    with_gates(
        with_rows(LATENT_INDEXED, TensorRow("attn_gate.weight", ("n_attn", "n_q_rank"))),
        "attn_norm",
        order=DOWN_FIRST,
    ),
    build=partial(build, choice=choose, ranked=True),
)
