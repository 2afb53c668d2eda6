"""FFNs: what each token makes of itself, one small file each."""

from treadle.models.ffns.gated import GATED
from treadle.models.structure import Sublayer

FFNS: dict[str, Sublayer] = {"gated": GATED}
