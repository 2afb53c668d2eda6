"""FFNs with gates after norms: experts with one after the norm of their input (A.X K2); experts and
dense FFNs with one after the norm of their input, and one after that of their result (GigaChat
3.5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import EXPERTS
from treadle.models.ffns.gated import GATED
from treadle.models.structure import Sizes, TensorRow, with_gates

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
_NORMS = "ffn_norm", "post_ffw_norm"
GATED_NORMS_GATED = with_gates(GATED, *_NORMS)
EXPERTS_NORMS_GATED = with_gates(EXPERTS, *_NORMS)
