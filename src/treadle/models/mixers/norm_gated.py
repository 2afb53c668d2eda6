"""Mixers with gates of all norms, by a rank (GigaChat 3.5, 2026): latent attention whose result
has a gate for each value, and a gated delta net.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.models.mixers.delta import DELTA
from treadle.models.mixers.gated_latent import GATE
from treadle.models.mixers.latent import LATENT
from treadle.models.structure import TensorRow, gates_of, with_gates, with_rows

_NORMS = "attn_norm", "post_attention_norm"
_GATED = with_gates(replace(with_rows(LATENT, GATE), after="post_attention_norm"), *_NORMS)
LATENT_NORM_GATED = replace(
    _GATED,
    rows=(
        *_GATED.rows,
        TensorRow("post_attention_norm.weight", ("n_embd",)),
        *gates_of("attn_q_a_norm", "n_q_rank"),
        *gates_of("attn_kv_a_norm", "n_kv_rank"),
    ),
)
DELTA_SIGMOID = with_gates(DELTA, *_NORMS)
