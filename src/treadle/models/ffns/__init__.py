"""FFNs: what each token makes of itself, one small file each."""

from __future__ import annotations

from treadle.models.ffns.gated import FUSED, GATED, GATED_FUSED
from treadle.models.ffns.plain import PLAIN
from treadle.models.structure import Sublayers

FUSED_EXPERTS = "experts_gate_up"  # of each, the rows of its gate and those of up are one matrix

FFNS = Sublayers(
    __name__,
    {"gated": GATED, FUSED: GATED_FUSED, "plain": PLAIN},
    late={"experts": "experts.EXPERTS", FUSED_EXPERTS: "experts.EXPERTS_FUSED"},
)
