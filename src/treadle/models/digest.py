"""Digest of a configuration, for the keys of what is stored of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from treadle.jit.cache import hex_digest


def digest_of(value: Any) -> str:
    """Return a hash of dataclasses, containers, arrays and plain values, equal in every process for
    equal values. Raises TypeError for a value of an unknown type.
    """
    return hex_digest("\n".join(_described(value)).encode())


def _described(value: Any) -> Iterator[str]:
    """Yield strings that describe ``value`` and all values within it; they are equal in every
    process for equal values. Raises TypeError for a value of an unknown type.
    """
    if is_dataclass(value):
        yield type(value).__name__
        for each in fields(value):
            yield from _described(getattr(value, each.name))
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}"
        for item in value:
            yield from _described(item)
    elif isinstance(value, (set, frozenset)):
        yield f"{{{len(value)}"
        yield from sorted("\n".join(_described(item)) for item in value)
    elif isinstance(value, Mapping):
        yield f"<{len(value)}"
        for item in value.items():
            yield from _described(item)
    elif isinstance(value, np.ndarray):
        digest = hex_digest(np.ascontiguousarray(value).data)
        yield f"{value.dtype.str}{value.shape}{digest}"
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield repr(value)
    else:
        raise TypeError(type(value).__name__)
