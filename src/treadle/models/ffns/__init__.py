"""FFNs: what each token makes of itself, one small file each."""

from treadle.models.ffns.experts import EXPERTS, EXPERTS_FUSED
from treadle.models.ffns.experts import FUSED as FUSED_EXPERTS
from treadle.models.ffns.gated import FUSED, GATED, GATED_FUSED
from treadle.models.ffns.plain import PLAIN
from treadle.models.structure import Sublayer

FFNS: dict[str, Sublayer] = {
    "gated": GATED,
    FUSED: GATED_FUSED,
    "plain": PLAIN,
    "experts": EXPERTS,
    FUSED_EXPERTS: EXPERTS_FUSED,
}
