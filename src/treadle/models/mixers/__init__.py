"""Mixers: how tokens learn of each other, one small file each."""

from treadle.models.mixers.attention import ATTENTION, ATTENTION_QKV, FUSED
from treadle.models.structure import Sublayer

MIXERS: dict[str, Sublayer] = {"attention": ATTENTION, FUSED: ATTENTION_QKV}
