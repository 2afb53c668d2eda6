"""JSON-schema check of values: types, sizes, names and choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.base.validate import is_number
from treadle.chat.tools.schemas import properties_of
from treadle.grammar.llguidance_limits import ReferencedSchemas

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_SIZES = (("Length", str), ("Items", list), ("Properties", dict))


def fulfils(value: Any, schema: Any, parts: ReferencedSchemas) -> bool:
    """Whether a value satisfies a schema; keywords that are not checked here count as satisfied.
    ``parts`` resolves references.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    ref = schema.get("$ref")
    if isinstance(ref, str) and not fulfils(value, parts.at(ref), parts):
        return False
    kinds = schema.get("type")
    if kinds is not None and not any(
        _is_of(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        return False
    if "const" in schema and not _is_same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_is_same(value, each) for each in schema["enum"]):
        return False
    for key in ("anyOf", "oneOf"):
        several = schema.get(key)
        if several and not any(fulfils(value, each, parts) for each in several):
            return False
    if not all(fulfils(value, each, parts) for each in schema.get("allOf") or ()):
        return False
    return _is_sized(value, schema) and _is_fine_within(value, schema, parts)


def _is_of(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    fine = isinstance(value, _TYPES.get(kind, ()))
    return fine and (kind == "boolean" or not isinstance(value, bool))


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal in JSON: 1 equals 1.0, but not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _is_sized(value: Any, schema: Mapping[str, Any]) -> bool:
    if is_number(value):
        low = schema.get("minimum")
        high = schema.get("maximum")
        above = schema.get("exclusiveMinimum")
        below = schema.get("exclusiveMaximum")
        return (
            (low is None or value >= low)
            and (high is None or value <= high)
            and (above is None or value > above)
            and (below is None or value < below)
        )
    for name, kind in _SIZES:
        if isinstance(value, kind):
            most = schema.get(f"max{name}")
            return len(value) >= (schema.get(f"min{name}") or 0) and (
                most is None or len(value) <= most
            )
    return True


def _is_fine_within(value: Any, schema: Mapping[str, Any], parts: ReferencedSchemas) -> bool:
    if isinstance(value, list):
        items = schema.get("items", True)
        return all(fulfils(each, items, parts) for each in value)
    if not isinstance(value, dict):
        return True
    properties = properties_of(schema)
    others = schema.get("additionalProperties", True)
    if not all(name in value for name in schema.get("required") or ()):
        return False
    return all(fulfils(each, properties.get(name, others), parts) for name, each in value.items())
