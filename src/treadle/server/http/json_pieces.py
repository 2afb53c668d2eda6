"""Parses JSON of very many values without blocking other threads: Python's own parser holds the GIL
until it is done, a second for millions of values.

Here Python code reads objects and arrays, and the C parts of Python's parser read strings and
numbers. Values and errors are those of ``json.loads``; it takes about ten times as long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json import decoder, scanner
from typing import Any

MANY = 200_000  # values, which the C parser reads in about 20 ms


def loads(text: str, parse_constant: Callable[[str], Any]) -> Any:
    """Return the value of a JSON text, as ``json.loads`` does; ``parse_constant`` is called for NaN
    and infinities. A text of over 200,000 values is parsed by Python code, which lets other threads
    run.
    """
    if text.count(",") + text.count("[") + text.count("{") < MANY:
        return json.loads(text, parse_constant=parse_constant)
    made = json.JSONDecoder(parse_constant=parse_constant)
    made.parse_object = decoder.JSONObject  # type: ignore[attr-defined]
    made.parse_array = decoder.JSONArray  # type: ignore[attr-defined]
    made.scan_once = scanner.py_make_scanner(made)  # type: ignore[attr-defined]
    return made.decode(text)
