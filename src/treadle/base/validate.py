"""Checks of single arguments: integers, flags, lists."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import numpy as np

from treadle.errors import TreadleError


def integer(name: str, value: object) -> int:
    """Return ``value`` as an int; numpy's integers are accepted. Raises TreadleError."""
    try:
        if isinstance(value, bool):  # an int to Python, but a mistake here
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TreadleError(f"{name}={value!r:.40}: expected an integer") from None


def ranged(name: str, value: object, least: int, most: float = inf) -> int:
    """Return ``value`` as an int from ``least`` to ``most``. Raises TreadleError."""
    number = integer(name, value)
    if not least <= number <= most:
        expected = f"at least {least}" if most == inf else f"{least} to {most}"
        raise TreadleError(f"{name}={number}: expected {expected}")
    return number


def positive(name: str, value: object, most: float = inf) -> int:
    """Return ``value`` as an int from 1 to ``most``. Raises TreadleError."""
    return ranged(name, value, 1, most)


def flag(name: str, value: object) -> bool:
    """Return ``value`` as a bool. Raises TreadleError, also for strings such as "false"."""
    if not is_flag(value):
        raise TreadleError(f"{name}={value!r:.40}: expected True or False")
    return bool(value)


def is_flag(value: object) -> bool:
    """Whether it is True or False, or an integer 0 or 1."""
    return isinstance(value, bool | int | np.bool_ | np.integer) and value in (0, 1)


def iterated(name: str, values: Any, expected: str = "a list") -> Iterator[Any]:
    """Iterate over ``values``. Raises TreadleError for text, bytes and mappings."""
    try:
        if isinstance(values, (str, bytes, bytearray, Mapping)):
            raise TypeError
        return iter(values)  # numpy's 0-d arrays have the method, and it raises
    except TypeError:
        raise TreadleError(f"{name}: expected {expected}, found {type(values).__name__}") from None


def listed(name: str, values: Any, expected: str = "a list") -> list[Any]:
    """Return ``values`` as a list; see ``iterated``."""
    return list(iterated(name, values, expected))


def token_ids(values: Any) -> list[int]:
    """Return ``values`` as a list of token ids."""
    made = listed("token ids", values)
    if all(type(value) is int for value in made):  # fast path: a prompt may have 100,000 ids
        return made
    return [integer("a token id", value) for value in made]
