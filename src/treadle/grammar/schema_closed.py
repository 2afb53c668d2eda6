"""Closes objects of a schema: they may have only the keys that the schema names.

A schema without ``additionalProperties`` allows every other key. Such keys are of no use to the
caller, and a model may write them until the length limit. So these objects are closed, as in
llama.cpp's grammars; the output still satisfies the schema. ``"additionalProperties": true`` leaves
an object open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.grammar.llguidance_limits import ReferencedSchemas

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("enum", "const", "default", "examples", "example")

# Keywords about an object's keys, and keywords with which an object is not closed.
_OF_KEYS = ("properties", "required", "minProperties", "dependentRequired")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")

_NOTES = ("type", "title", "description", "$comment", "examples")  # irrelevant in ``propertyNames``


def without_property_names(
    schema: Mapping[str, Any], parts: ReferencedSchemas
) -> Mapping[str, Any]:
    """Return an object's schema with ``propertyNames``, which llguidance lacks, replaced by other
    keywords if possible. zod writes it for each ``record``: names are any strings, or some listed
    ones.
    """
    if "propertyNames" not in schema:
        return schema
    names = _names_of(schema["propertyNames"], parts)
    others = dict(schema)
    del others["propertyNames"]
    if names is None or names.keys() <= {"type"}:
        return schema if names is None else others
    if "patternProperties" in schema or "unevaluatedProperties" in schema:
        return schema
    known = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    required = schema.get("required", [])
    if not isinstance(known, Mapping) or not isinstance(required, list | tuple):
        return schema
    if "pattern" in names and not known and not required:
        return {**others, "patternProperties": {names["pattern"]: rest}} | _CLOSED
    allowed = names.get("enum", [names.get("const")])
    if "pattern" in names or any(name not in allowed for name in required):
        return schema
    own = {n: known.get(n, rest) for n in allowed if n in known or rest is not False}
    return {**others, "properties": own} | _CLOSED


_CLOSED = {"additionalProperties": False}


def _names_of(names: Any, parts: ReferencedSchemas) -> Mapping[str, Any] | None:
    """Return the requirement of ``propertyNames``: {}, only a ``pattern``, or only ``enum`` or
    ``const`` of strings; None for any other.
    """
    for _ in range(8):  # follows references
        if isinstance(names, Mapping) and names.keys() == {"$ref"}:
            ref = names["$ref"]
            names = parts.at(ref) if isinstance(ref, str) and parts.leads(ref) else None
    if names is True:
        return {}
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return None
    said = {key: value for key, value in names.items() if key not in _NOTES}
    texts = said.get("enum", [said["const"]] if "const" in said else [])
    fine = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
    return said if fine and [*said] in ([], ["enum"], ["const"], ["pattern"]) else None


class ClosedObjects:
    """Decides which objects of a schema are closed. An object that several parts describe together
    (``allOf``, or ``properties`` with ``anyOf``) stays open: each part knows only its own keys.
    """

    def __init__(self, root: Mapping[str, Any], parts: ReferencedSchemas) -> None:
        self._parts = parts
        self._shared: set[int] = set()  # ids of parts that describe an object together
        for part in _parts_of(root):
            if self._is_shared(part):
                self._share(part)

    def has(self, part: Mapping[str, Any]) -> bool:
        """Whether the objects that this part of the schema describes are closed."""
        names = part.get("properties")
        if not isinstance(names, Mapping) or id(part) in self._shared:
            return False
        if any(key in part for key in _OPEN):
            return False
        required = part.get("required", ())
        least = part.get("minProperties", 0)
        if not isinstance(required, list | tuple) or not isinstance(least, int):
            return False
        known = all(isinstance(name, str) and name in names for name in required)
        return known and least <= len(names)

    def _is_shared(self, part: Mapping[str, Any]) -> bool:
        """Whether this part and others in it describe the same object together; mere alternatives
        do not.
        """
        own = any(key in part for key in (*_OF_KEYS, *_OPEN))
        others = sum(key in part for key in ("anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
        together = part.get("allOf")
        return own + others + (len(together) if isinstance(together, list) else 0) > 1

    def _share(self, part: Any) -> None:
        """Mark a part, and all parts that it contains or refers to, as shared: their properties may
        be shared too.
        """
        for each in _parts_of(part):
            if id(each) not in self._shared:
                self._shared.add(id(each))
                if isinstance(each.get("$ref"), str):
                    self._share(self._parts.at(each["$ref"]))


def _parts_of(part: Any, *, is_map: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas inside it. ``is_map``: its keys are names of properties or
    definitions.
    """
    if isinstance(part, list | tuple):
        for each in part:
            yield from _parts_of(each)
    elif isinstance(part, Mapping):
        if not is_map:
            yield part
        for key, value in part.items():
            if is_map or key not in VALUES:
                yield from _parts_of(value, is_map=not is_map and key in MAPS)
