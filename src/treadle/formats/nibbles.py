"""Nibbles in a kernel: the order that Q4_0, Q4_1 and their kin share."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.formats.format import Builder, Field, Val


def nibbles(k: Builder, field: Field) -> list[Val]:
    """Codes 0..15: the low nibbles of ``qs``, then the high ones."""
    qs = field("qs")
    return [qs & 15, qs >> 4]


def looked_up(k: Builder, field: Field, table: Sequence[int]) -> list[Val]:
    """The same, as places in a table of 16 numbers."""
    qs = field("qs")
    return [k.lookup(table, v) for v in (qs, qs >> 4)]
