"""JSON schemas that llguidance interprets differently from the standard, or that would crash it.

It runs in this process: a stack overflow or an integer overflow there ends the server.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import inf, lcm, nextafter
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from treadle.base.validate import is_number
from treadle.grammar.json_numbers import spelling
from treadle.grammar.rule_graph import components

MAX_DEPTH = 1000  # levels with references followed; llguidance's stack ends at some 2,100
MAX_REMAINDERS = 100_000  # states of numbers that are multiples of something: some 2 s
# llguidance's bounds of whole numbers have 64 bits. It negates them, so -(2**63) ends the process;
# this is the next float64.
LOWEST = -(2**63) + 1024
HIGHEST = 2**63 - 1
HIGHEST_FLOAT = 2**63 - 1024  # bound of non-integers: llguidance cannot make a regex of more
FLOAT_MAX = sys.float_info.max
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_BOUNDS = (_LOWER, _UPPER)
NUMBERS = (*_LOWER, *_UPPER, "multipleOf")  # keywords of numbers
LENGTHS = ("minLength", "maxLength")
COUNTS = (*LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties")
LONGEST = 2**32 - 1  # characters that a regular expression's repetition can count
_STEP = 1e-12  # by which exclusive bounds are moved
_CLASS = re.compile(r"\\.|\[\^", re.S)


class ReferencedSchemas:
    """Resolves the references (``$ref``) in a schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._own = str(root.get("$id", ""))
        self._by_id: dict[str, Any] = {self._own: root}
        self._by_anchor: dict[str, Any] = {}
        self._find(root)

    def _find(self, part: Any) -> None:
        if isinstance(part, Mapping):
            if isinstance(part.get("$id"), str):
                self._by_id[urldefrag(urljoin(self._own, part["$id"])).url] = part
            if isinstance(part.get("$anchor"), str):
                self._by_anchor[part["$anchor"]] = part
            for value in part.values():
                self._find(value)
        elif isinstance(part, list | tuple):
            for value in part:
                self._find(value)

    def leads(self, ref: str) -> bool:
        """Whether a reference points to a part of this schema. References by anchor count as valid:
        llguidance checks them.
        """
        address, fragment = urldefrag(urljoin(self._own, ref))
        if address not in self._by_id:
            return False
        return address != self._own or not fragment.startswith("/") or self.at(ref) is not None

    def at(self, ref: str) -> Any:
        """Return the part that a reference points to, or None."""
        address, fragment = urldefrag(urljoin(self._own, ref))
        at = self._by_id.get(address)
        if not fragment.startswith("/"):
            return self._by_anchor.get(fragment) if fragment else at
        for part in unquote(fragment)[1:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and part.isdecimal() and int(part) < len(at):
                at = at[int(part)]
            elif isinstance(at, Mapping) and part in at:
                at = at[part]
            else:
                return None
        return at

    def depth(self) -> int:
        """Return an upper bound of the schema's nesting depth with each reference followed once, as
        llguidance does. For parts that refer to each other the depths are added up.
        """
        levels: dict[str, int] = {}
        edges: dict[str, list[str]] = {}
        waiting = [""]
        while waiting:
            name = waiting.pop()
            if name not in edges:
                root = self._by_id[self._own] if not name else self.at(name)
                levels[name], edges[name] = _levels(root)
                waiting += edges[name]
        deepest: dict[str, int] = {}
        for part in components(edges):
            own = set(part)
            behind = [deepest[to] for name in part for to in edges[name] if to not in own]
            depth = sum(levels[name] for name in part) + max(behind, default=0)
            deepest |= dict.fromkeys(part, depth)
        return deepest[""]


def _levels(part: Any) -> tuple[int, list[str]]:
    """Return the depth of a part, and the references in it. Definitions are skipped: only
    references enter them.
    """
    deepest = 0
    refs = []
    waiting = [(part, 1)]
    while waiting:
        value, level = waiting.pop()
        inner: Any = ()
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                refs.append(value["$ref"])
            inner = [each for key, each in value.items() if key not in ("$defs", "definitions")]
        elif isinstance(value, list | tuple):
            inner = value
        else:
            continue
        deepest = max(deepest, level)
        waiting += [(each, level + 1) for each in inner]
    return deepest, refs


class Numbers:
    """Checks the numbers of one schema."""

    def __init__(self) -> None:
        self._n_remainders = 1  # of all multipleOf together: parts of allOf limit one number

    def fault(self, key: str, value: Any) -> str:
        """Return the reason why the keyword ``key`` with the number ``value`` (or values with
        numbers) cannot be enforced, or "".
        """
        if key in ("const", "enum"):
            wrong = next((str(n)[:40] for n in _numbers(value) if not _is_exact(n)), "")
            return f"has {wrong}, which cannot be written exactly" if wrong else ""
        if key in COUNTS:
            return _count_fault(key, value)
        if not is_number(value):
            return ""
        if (key in _LOWER and value > HIGHEST) or (key in _UPPER and value < LOWEST):
            return f"cannot be enforced: numbers range from {LOWEST} to {HIGHEST}"
        return self._multiple_fault(value) if key == "multipleOf" else ""

    def _multiple_fault(self, value: float) -> str:
        if abs(value) > FLOAT_MAX:
            return "cannot be enforced: too large for a float64"
        digits = Decimal(repr(float(value))).normalize().as_tuple().digits  # without trailing zeros
        n = lcm(self._n_remainders, int("".join(map(str, digits))) or 1)
        if n > MAX_REMAINDERS:
            return (
                f"cannot be enforced: all multipleOf together have {n} remainders (at most "
                f"{MAX_REMAINDERS})"
            )
        self._n_remainders = n
        return ""


def _count_fault(key: str, value: Any) -> str:
    """Return the reason why a count of characters, items or properties cannot be
    enforced, or "".
    """
    if not is_number(value) or value < 0 or value % 1:
        return "is not a count: expected a whole number, 0 or more"
    most = LONGEST if key in LENGTHS else HIGHEST
    return "" if value <= most else f"cannot be enforced: at most {most}"


def within(key: str, value: Any, kind: Any = None) -> Any:
    """Return a keyword's number so that llguidance reads it exactly. Bounds are clipped to
    llguidance's range, and rounded inwards to a float64, because llguidance may round either way.
    Counts become int: llguidance refuses 5.0. ``kind``: the type of the bounded value.
    """
    if key in COUNTS:
        return int(value)
    if not is_number(value) or key not in (*_LOWER, *_UPPER):
        return value
    if key in _LOWER and value < LOWEST:
        return LOWEST
    highest = HIGHEST if _is_whole(kind) else HIGHEST_FLOAT
    if key in _UPPER and value > highest:
        return highest
    if not isinstance(value, int) or not -HIGHEST < value < HIGHEST:
        return value
    read = float(value)
    if key in _LOWER and read < value:
        read = nextafter(read, inf)
    elif key in _UPPER and read > value:
        read = nextafter(read, -inf)
    return int(read)


def move_exclusive(schema: dict[str, Any]) -> None:
    """Move exclusive bounds that are whole numbers inwards by ``_STEP``, in place, if the bounds
    are less than 1 apart: llguidance would otherwise allow the bounds themselves.
    """
    lows, highs = ([schema[k] for k in keys if is_number(schema.get(k))] for keys in _BOUNDS)
    if not lows or not highs or not 0 < min(highs) - max(lows) < 1:
        return
    for key, step in (("exclusiveMinimum", _STEP), ("exclusiveMaximum", -_STEP)):
        if is_number(schema.get(key)) and schema[key] == int(schema[key]):
            schema[key] += step


def _is_whole(kind: Any) -> bool:
    """Whether a type, or list of types, allows whole numbers only."""
    return (
        "number" not in kind and "integer" in kind if isinstance(kind, list) else kind == "integer"
    )


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers in a value, at any depth."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each)
    elif is_number(value):
        yield value


def _is_exact(n: int | float) -> bool:
    """Whether llguidance reads a number without rounding."""
    try:
        read = float(n)
    except OverflowError:
        return False
    if read == -(2**63):
        return False
    if isinstance(n, float):
        return spelling(n) is not None
    if abs(n) <= 2**63:
        return int(min(read, HIGHEST)) == n
    return Decimal(repr(read)) == n


def without_nul(pattern: str) -> str:
    """Return a pattern whose negated classes ``[^...]`` exclude NUL too. If a class allows all
    control characters, llguidance also allows their escapes, and with these escaped quotes and
    backslashes, which the class may exclude.
    """
    return _CLASS.sub(lambda m: rf"{m[0]}\x00" if m[0] == "[^" else m[0], pattern)
