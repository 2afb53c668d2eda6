"""Mixers: how tokens learn of each other, one small file each."""

from __future__ import annotations

from importlib import import_module

from treadle.models.mixers.attention import ATTENTION, ATTENTION_GATE, ATTENTION_QKV, FUSED, GATE
from treadle.models.structure import Sublayer

LATE = {  # imported when a model has them
    "shortconv": ("shortconv", "SHORTCONV"),
    "mamba2": ("mamba2", "MAMBA2"),
    "attention_mamba2": ("beside", "ATTENTION_MAMBA2"),
    "delta": ("delta", "DELTA"),
    "delta_grouped": ("delta", "DELTA_GROUPED"),
}


class _Mixers(dict[str, Sublayer]):
    def __missing__(self, name: str) -> Sublayer:
        module, constant = LATE[name]
        made: Sublayer = getattr(import_module(f"{__name__}.{module}"), constant)
        self[name] = made
        return made


MIXERS: dict[str, Sublayer] = _Mixers(
    {"attention": ATTENTION, FUSED: ATTENTION_QKV, GATE: ATTENTION_GATE}
)
