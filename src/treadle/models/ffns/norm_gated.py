"""FFNs whose norms have gates: experts with one of the norm of their input (A.X K2); experts and
dense FFNs with one of that norm, and one of the norm of their result (GigaChat 3.5).
"""

from __future__ import annotations

from treadle.models.ffns.experts import EXPERTS
from treadle.models.ffns.gated import GATED
from treadle.models.structure import DOWN_FIRST, with_gates

EXPERTS_INPUT_NORM_GATED = with_gates(EXPERTS, "ffn_norm", order=DOWN_FIRST)
_NORMS = "ffn_norm", "post_ffw_norm"
GATED_BOTH_NORMS_GATED = with_gates(GATED, *_NORMS)
EXPERTS_BOTH_NORMS_GATED = with_gates(EXPERTS, *_NORMS)
