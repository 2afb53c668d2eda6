"""Single values that callers hand in, checked where they enter: whole numbers, flags, lists."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import numpy as np

from treadle.errors import TreadleError


def integer(name: str, value: object) -> int:
    """``value``, which must be a whole number; numpy's are as good as Python's."""
    try:
        if isinstance(value, bool):  # an int to Python, and a slip here
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TreadleError(f"{name}={value!r:.40}: expected an integer") from None


def ranged(name: str, value: object, least: int, most: float = inf) -> int:
    """``value``, which must be a whole number from ``least`` on, up to ``most``."""
    number = integer(name, value)
    if not least <= number <= most:
        expected = f"at least {least}" if most == inf else f"{least} to {most}"
        raise TreadleError(f"{name}={number}: expected {expected}")
    return number


def positive(name: str, value: object, most: float = inf) -> int:
    """``value``, which must be a whole number from 1 on, up to ``most``."""
    return ranged(name, value, 1, most)


def flag(name: str, value: object) -> bool:
    """``value``, which must be true or false: "false" is true to Python."""
    if not is_flag(value):
        raise TreadleError(f"{name}={value!r:.40}: expected True or False")
    return bool(value)


def is_flag(value: object) -> bool:
    """Whether it is True or False, or as good as that."""
    return isinstance(value, bool | int | np.bool_ | np.integer) and value in (0, 1)


def iterated(name: str, values: Any, expected: str = "a list") -> Iterator[Any]:
    """What ``values`` has, one by one. Text and bytes are no lists: they were not meant so."""
    try:
        if isinstance(values, (str, bytes, bytearray, Mapping)):
            raise TypeError
        return iter(values)  # numpy's arrays without an axis have the method, and it raises
    except TypeError:
        raise TreadleError(f"{name}: expected {expected}, found {type(values).__name__}") from None


def listed(name: str, values: Any, expected: str = "a list") -> list[Any]:
    """``values`` as a list; see ``iterated``."""
    return list(iterated(name, values, expected))


def token_ids(values: Any) -> list[int]:
    """``values`` as a list of token ids."""
    made = listed("token ids", values)
    if all(type(value) is int for value in made):  # a prompt may have 100,000 of them
        return made
    return [integer("a token id", value) for value in made]
