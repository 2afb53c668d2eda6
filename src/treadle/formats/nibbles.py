"""Nibbles in a kernel: the order that Q4_0, Q4_1 and their kin share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.jit.values import Builder, Val


def unpack_nibbles(k: Builder, packed: Val) -> Val:
    """``u8 * 16`` to ``u8 * 32``: the low nibbles, then the high ones."""
    return k.concat(packed & 15, packed >> 4)
