"""Mixers: how tokens learn of each other, one small file each."""

from treadle.models.mixers.attention import ATTENTION
from treadle.models.structure import Sublayer

MIXERS: dict[str, Sublayer] = {"attention": ATTENTION}
