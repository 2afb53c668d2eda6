"""Which objects of a schema have no other keys than it names.

A schema that does not say ``additionalProperties`` allows every key besides those it names. What a
model writes under them is of no use to who asks for an answer, and may go on until its length is
used up. So such objects are closed here, as in llama.cpp's grammars: what is written fulfils the
schema all the same. ``"additionalProperties": true`` leaves one open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.text.schema_limits import Parts

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("enum", "const", "default", "examples", "example")

# What says something of an object's keys, and what leaves none to be closed.
_OF_KEYS = ("properties", "required", "minProperties", "dependentRequired")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")


class ClosedObjects:
    """Those of one schema. An object that several parts describe together (``allOf``, or
    ``properties`` beside ``anyOf``) stays open: each part knows its own keys alone.
    """

    def __init__(self, root: Mapping[str, Any], parts: Parts) -> None:
        self._parts = parts
        self._shared: set[int] = set()  # parts, by identity, that describe an object with others
        for part in _parts_of(root):
            if self._is_shared(part):
                self._share(part)

    def has(self, part: Mapping[str, Any]) -> bool:
        """Whether the objects that a part of the schema describes have its keys alone."""
        names = part.get("properties")
        if not isinstance(names, Mapping) or id(part) in self._shared:
            return False
        if any(key in part for key in _OPEN):
            return False
        required, least = part.get("required", ()), part.get("minProperties", 0)
        if not isinstance(required, list | tuple) or not isinstance(least, int):
            return False
        known = all(isinstance(name, str) and name in names for name in required)
        return known and least <= len(names)

    def _is_shared(self, part: Mapping[str, Any]) -> bool:
        """Whether more than one part describes the same object; alternatives do not."""
        own = any(key in part for key in (*_OF_KEYS, *_OPEN))
        others = sum(key in part for key in ("anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
        together = part.get("allOf")
        return own + others + (len(together) if isinstance(together, list) else 0) > 1

    def _share(self, part: Any) -> None:
        """With all that it has and leads to: its properties may be described together, too."""
        for each in _parts_of(part):
            if id(each) not in self._shared:
                self._shared.add(id(each))
                if isinstance(each.get("$ref"), str):
                    self._share(self._parts.at(each["$ref"]))


def _parts_of(part: Any, *, is_map: bool = False) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas within it; ``is_map``: its keys are names."""
    if isinstance(part, list | tuple):
        for each in part:
            yield from _parts_of(each)
    elif isinstance(part, Mapping):
        if not is_map:
            yield part
        for key, value in part.items():
            if is_map or key not in VALUES:
                yield from _parts_of(value, is_map=not is_map and key in MAPS)
