"""Formatting of a file's metadata for people and for JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping

from treadle.cli.ui.table import shorten

SHOWN = 8  # elements of an array


def described(value: object) -> object:
    """Convert a metadata value for JSON; an array to its type, length and first elements."""
    from treadle.files.gguf import GGUFArray

    if isinstance(value, GGUFArray):
        first = [described(value[i]) for i in range(min(SHOWN, len(value)))]
        return {"type": value.type.name.lower(), "length": len(value), "first": first}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    return value


def written(value: object) -> str:
    """Format a metadata value on one line."""
    if isinstance(value, Mapping):
        first = ", ".join(shorten(json.dumps(v, ensure_ascii=False), 24) for v in value["first"])
        dots = ", …" if value["length"] > len(value["first"]) else ""
        return f"{value['length']} × {value['type']}: [{first}{dots}]"
    if isinstance(value, float):
        return shortest(value)
    return shorten(str(value), 200)


def shortest(value: float) -> str:
    """Format a number with the fewest digits that identify it as f32, if it is one: Python would
    show f64's digits.
    """
    import numpy as np

    with np.errstate(over="ignore"):  # a number beyond f32
        narrow = np.float32(value)
    return str(narrow) if float(narrow) == value else str(value)
