"""Finds parts of a schema that explicitly allow no value.

llguidance drops an optional property, or an alternative, that allows no value. But it refuses the
whole schema if a reference points to such a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.grammar.llguidance_limits import ReferencedSchemas

_BOUNDS = {  # keywords of minimum and maximum, by the types that they limit
    ("integer", "number"): ("minimum", "maximum"),
    ("string",): ("minLength", "maxLength"),
    ("array",): ("minItems", "maxItems"),
    ("object",): ("minProperties", "maxProperties"),
}


class ImpossibleParts:
    """Decides which parts of one schema allow no value."""

    def __init__(self, parts: ReferencedSchemas) -> None:
        self._parts = parts
        self._known: dict[str, bool] = {}  # by reference

    def at(self, ref: str) -> bool:
        """Whether the part that a reference points to allows no value."""
        if ref not in self._known:
            self._known[ref] = False  # for a recursive part: llguidance detects that
            self._known[ref] = self.is_never(self._parts.at(ref))
        return self._known[ref]

    def is_never(self, schema: Any) -> bool:
        """Return whether ``schema`` plainly allows no value: it is false, has an empty enum, a
        minimum above its maximum, or parts that make it so. False if that is not obvious.
        """
        if not isinstance(schema, Mapping):
            return schema is False
        ref = schema.get("$ref")
        kind = schema.get("type")
        if schema.get("enum") == [] or (isinstance(ref, str) and self.at(ref)):
            return True
        if any(kind in kinds and _crossed(schema, *pair) for kinds, pair in _BOUNDS.items()):
            return True
        for key, enough in (("allOf", any), ("anyOf", all), ("oneOf", all)):
            each = schema.get(key)
            if isinstance(each, list) and each and enough(map(self.is_never, each)):
                return True
        names = schema.get("required")
        properties = schema.get("properties")
        if kind != "object" or not isinstance(names, list) or not isinstance(properties, Mapping):
            return False
        return any(self.is_never(value) for name, value in properties.items() if name in names)


def _crossed(schema: Mapping[str, Any], least: str, most: str) -> bool:
    low = schema.get(least)
    high = schema.get(most)
    return isinstance(low, int | float) and isinstance(high, int | float) and low > high
