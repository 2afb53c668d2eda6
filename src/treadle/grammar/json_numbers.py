"""Writes JSON whose numbers llguidance reads exactly.

llguidance reads the digits as a whole number, converts it to float64, and multiplies or divides by
a power of ten. Each step rounds, so a number of 17 digits may become its neighbour. Such a number
is written with other digits that are read exactly.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

MOST = 2**64  # bound of the whole number
LARGEST_POWER = 308  # largest power of ten of one multiplication
_NEXT = 3  # neighbouring floats of the whole number that are tried
_PARTS = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:e([+-]?\d+))?")
_MARK = secrets.token_hex(16)  # occurs in no string of a schema
_MARKED = re.compile(rf'"{_MARK}([^"]*)"')


def dump(value: Any) -> str:
    """Return a value as JSON. Numbers without an exact spelling are written as Python does."""
    return _MARKED.sub(r"\1", json.dumps(_marked(value)))


def _marked(value: Any) -> Any:
    """Return a value with each float that needs another spelling replaced by a string: a mark and
    that spelling.
    """
    if isinstance(value, Mapping):
        return {key: _marked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each) for each in value]
    if isinstance(value, float) and (text := spelling(value)) not in (None, repr(value)):
        return f"{_MARK}{text}"
    return value


@lru_cache(4096)
def spelling(x: float) -> str | None:
    """Return digits that llguidance reads as exactly ``x``; None if none were found."""
    if not math.isfinite(x):
        return None
    return next((text for text in _spellings(x) if read(text) == x), None)


def _spellings(x: float) -> Iterator[str]:
    yield repr(x)
    sign = "-" if x < 0 else ""
    exact = Fraction(abs(x))
    first = math.floor(math.log10(abs(x))) - 18 if x else 0  # the power that leaves 19 digits
    for power in range(first, first + 8):
        whole = float(exact / Fraction(10) ** power)
        for step in range(-_NEXT, _NEXT + 1):
            digits = int(whole + step * math.ulp(whole))
            if 0 <= digits < MOST:
                yield f"{sign}{digits}e{power}"


def read(text: str) -> float:
    """Return the float64 that llguidance (serde_json) makes of a number's text; infinity if it is
    too large.
    """
    found = _PARTS.fullmatch(text)
    assert found is not None
    sign = found[1]
    before = found[2]
    behind = found[3] or ""
    power = int(found[4] or 0)
    digits = 0
    for place, digit in enumerate(before + behind):
        if digits * 10 + int(digit) >= MOST:  # digits that do not fit are dropped
            power += max(0, len(before) - place)
            break
        digits = digits * 10 + int(digit)
        power -= place >= len(before)
    value = float(digits)
    while value and power < -LARGEST_POWER:
        value = value / 1e308
        power = power + LARGEST_POWER
    if value and power > LARGEST_POWER:
        return math.inf
    if value:
        value = value * float(f"1e{power}") if power >= 0 else value / float(f"1e{-power}")
    return -value if sign else value
