"""Schemas of tool arguments for call notations other than JSON: properties, required ones, and the
values that each may have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from treadle.errors import GrammarError
from treadle.grammar.llguidance_limits import ReferencedSchemas
from treadle.grammar.schema_closed import MAPS, VALUES

MAX_WAYS = 64  # alternatives of one object
_SEVERAL = ("anyOf", "oneOf")
_SCHEMAS = (*_SEVERAL, "allOf", "items", "prefixItems", "additionalProperties", "not")
_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated"}
_OTHERS = ["integer", "number", "boolean", "null", "array", "object"]  # types other than strings
_ODD = re.compile(r"[:{}\[\],<\"]|^\s|\s$|^$")
_VALUE = ("const", "default")  # keywords whose value may be null


def ways(
    schema: Mapping[str, Any], parts: ReferencedSchemas | None = None
) -> list[Mapping[str, Any]]:
    """Return one object schema for each alternative of ``schema`` (``anyOf``, ``oneOf``), with
    references and ``allOf`` merged in. Raises GrammarError for more than MAX_WAYS alternatives, or
    endless recursion.
    """
    try:
        return _ways(schema, parts or ReferencedSchemas(schema))
    except RecursionError:
        raise GrammarError("its schema is endlessly recursive or too deeply nested") from None


def _ways(schema: Any, parts: ReferencedSchemas) -> list[Mapping[str, Any]]:
    flat = _flat(schema, parts)
    key = next((key for key in _SEVERAL if isinstance(flat.get(key), list) and flat[key]), None)
    if key is None:
        return [with_required(_with_texts(flat, parts))]
    base = {name: value for name, value in flat.items() if name != key}
    found = [way for each in flat[key] for way in _ways(joined(base, _flat(each, parts)), parts)]
    if len(found) > MAX_WAYS:
        raise GrammarError(f"its schema has {len(found)} alternatives (at most {MAX_WAYS})")
    return found


def _with_texts(schema: Mapping[str, Any], parts: ReferencedSchemas) -> Mapping[str, Any]:
    """Return a schema with references resolved in those of its properties that allow strings (such
    as pydantic's enums): notations without quotes must know that a value is a string.
    """
    told: dict[str, Mapping[str, Any]] = {}
    for name, value in properties_of(schema).items():
        with suppress(RecursionError):  # for a recursive schema
            if isinstance(value, Mapping) and not _has_never(value, parts):
                told[name] = _followed(value, parts)
    texts = {name: flat for name, flat in told.items() if split_strings(flat)[0].schemas}
    return {**schema, "properties": {**properties_of(schema), **texts}} if texts else schema


def _followed(schema: Any, parts: ReferencedSchemas) -> Mapping[str, Any]:
    """Return a schema with references and ``allOf`` merged into it and into its alternatives."""
    made = _flat(schema, parts)
    several = {key: made[key] for key in _SEVERAL if isinstance(made.get(key), list)}
    return {**made, **{k: [_followed(each, parts) for each in v] for k, v in several.items()}}


def _has_never(schema: Any, parts: ReferencedSchemas) -> bool:
    """Whether a schema, one of its alternatives, or a schema that it refers to explicitly allows no
    value.
    """
    if not isinstance(schema, Mapping) or is_never(schema):
        return is_never(schema)
    ref = schema.get("$ref")
    several = [schema[key] for key in (*_SEVERAL, "allOf") if isinstance(schema.get(key), list)]
    inner = [*([parts.at(ref)] if isinstance(ref, str) else []), *(p for v in several for p in v)]
    return any(_has_never(each, parts) for each in inner)


def _flat(schema: Any, parts: ReferencedSchemas) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    result: Mapping[str, Any] = {k: v for k, v in schema.items() if k not in ("$ref", "allOf")}
    ref = schema.get("$ref")
    every = schema.get("allOf")
    added = [parts.at(ref)] if isinstance(ref, str) else []
    for each in [*added, *(every if isinstance(every, list) else [])]:
        result = joined(result, _flat(each, parts))
    return result


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return schema ``one`` extended by ``other``, whose keywords win; properties and required
    names are united.
    """
    result = {**one, **other}
    if properties := {**properties_of(one), **properties_of(other)}:
        result["properties"] = properties
    if required := [*required_of(one), *required_of(other)]:
        result["required"] = required
    return result


def with_required(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in which every required property has a schema: ``additionalProperties`` if it
    had none.
    """
    others = schema.get("additionalProperties", {})
    properties = properties_of(schema)
    lacking = {name: others for name in required_of(schema) if name not in properties}
    return {**schema, "properties": {**properties, **lacking}} if lacking else schema


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``properties`` of a schema; {} if there are none."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def without_nulls(schema: Any) -> Any:
    """Return a schema without keywords whose value is null: clients in Go write empty lists so."""
    if isinstance(schema, Mapping):
        kept = {k: v for k, v in schema.items() if v is not None or k in _VALUE}
        return {k: v if k in VALUES else without_nulls(v) for k, v in kept.items()}
    return [without_nulls(each) for each in schema] if isinstance(schema, list) else schema


def simplified(schema: Any, *, is_map: bool = False) -> Any:
    """Return an equivalent schema in keywords that every template reads: the type null becomes a
    value (``enum``) or ``nullable``, and the schemas true and false become objects. ``is_map``: the
    keys of ``schema`` are property names.
    """
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if isinstance(schema, list):
        return [simplified(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if is_map:
        return {name: simplified(each) for name, each in schema.items()}
    result = {key: _simplified_part(key, value) for key, value in schema.items()}
    kinds = result.get("type")
    if kinds == "null":
        del result["type"]
        result.setdefault("enum", [None])
    elif isinstance(kinds, list) and "null" in kinds:
        others = [kind for kind in kinds if kind != "null"]
        result["type"] = others[0] if len(others) == 1 else others
        result["nullable"] = True  # OpenAPI's word
    return result


def _simplified_part(key: str, value: Any) -> Any:
    if key in _SCHEMAS:
        return simplified(value)
    return simplified(value, is_map=True) if key in MAPS else value


def completed(schema: Any) -> Any:
    """Return an equivalent schema with the optional parts that some templates require: descriptions
    of properties, and schemas of the contents of arrays and objects.
    """
    if not isinstance(schema, Mapping):
        return {}
    result = dict(schema)
    if "properties" in result:
        told = {
            name: {"description": "", **completed(v)} for name, v in properties_of(result).items()
        }
        result["properties"] = told
    within = {"array": "items", "object": "additionalProperties"}.get(str(result.get("type")))
    return {**result, within: completed(result.get(within))} if within else result


def required_of(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the names in ``required``. Raises GrammarError unless it is a list of names."""
    found = schema.get("required", ())
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise GrammarError(f"its 'required' is {found!r:.60}: expected a list of names")
    return found


def choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values of ``enum`` or ``const``; [] if the schema has neither."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found if isinstance(found, list) else []


def is_text(schema: Any) -> bool:
    """Whether a schema allows only strings; True too for a schema that is no object, such as
    ``true``.
    """
    if not isinstance(schema, Mapping):
        return True
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return isinstance(values, list) and all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


class StringAlternatives(NamedTuple):
    """Schemas of the strings that a value may be, one for each alternative; ``null``: it may also
    be null.
    """

    schemas: list[Any]
    null: bool = False


def texts_of(schema: Any) -> StringAlternatives | None:
    """Return the strings that a schema allows; None if it allows other types than string and null,
    or only null.
    """
    found = _texts_or_null(schema)
    return found if found is not None and found.schemas else None


def _texts_or_null(schema: Any) -> StringAlternatives | None:
    if is_text(schema):
        return StringAlternatives([schema])
    kind = schema.get("type")
    several = next((schema[k] for k in _SEVERAL if schema.get(k)), None)
    if "enum" in schema or "const" in schema:
        words = [each for each in choices(schema) if each is not None]
        texts = [{"enum": words}] if words else []
        return (
            StringAlternatives(texts, null=True)
            if all(isinstance(word, str) for word in words)
            else None
        )
    if isinstance(several, list):
        base = {key: value for key, value in schema.items() if key not in _SEVERAL}
        ways = [joined(base, each) if isinstance(each, Mapping) else {} for each in several]
    elif isinstance(kind, list):
        ways = [{**schema, "type": each} for each in kind]
    else:
        return StringAlternatives([], null=True) if kind == "null" else None
    found = [_texts_or_null(way) for way in ways]
    texts = [each for part in found if part is not None for each in part.schemas]
    return (
        None
        if None in found
        else StringAlternatives(texts, any(part is not None and part.null for part in found))
    )


def split_strings(schema: Any) -> tuple[StringAlternatives, list[Mapping[str, Any]]]:
    """Split a schema by type: return the strings that it allows, and one schema for each
    alternative of another type.
    """
    schema = {} if schema is True else schema
    whole = texts_of(schema)
    if whole is not None:
        return whole, []
    ways = _alternatives(schema)
    return StringAlternatives([way for way in ways if is_text(way)]), [
        way for way in ways if not is_text(way)
    ]


def _alternatives(schema: Any) -> list[Any]:
    """Return one schema for each alternative, type or kind of value (string, other) that a schema
    lists.
    """
    if not isinstance(schema, Mapping):
        return [schema]
    kind = schema.get("type")
    several = next((schema[k] for k in _SEVERAL if schema.get(k)), None)
    if "enum" in schema or "const" in schema:
        words = choices(schema)
        texts = [word for word in words if isinstance(word, str)]
        others = [word for word in words if not isinstance(word, str)]
        return [{"enum": part} for part in (texts, others) if part]
    if isinstance(several, list):
        base = {key: value for key, value in schema.items() if key not in _SEVERAL}
        ways = [joined(base, each) if isinstance(each, Mapping) else each for each in several]
    elif isinstance(kind, list):
        ways = [{**schema, "type": each} for each in kind]
    elif kind is None and not schema.keys() - _NOTES:
        return [{"type": "string"}, {"type": _OTHERS}]
    else:
        return [schema]
    return [part for way in ways if not is_never(way) for part in _alternatives(way)]


def is_never(schema: Any) -> bool:
    """Whether a schema explicitly allows no value: false, an empty ``enum``, or only such
    alternatives.
    """
    if not isinstance(schema, Mapping):
        return schema is False
    several = [schema[key] for key in _SEVERAL if isinstance(schema.get(key), list) and schema[key]]
    return schema.get("enum") == [] or any(all(map(is_never, each)) for each in several)


def is_plain(schema: Any) -> bool:
    """Whether a schema is just the type integer, number or boolean: it needs no check by
    llguidance, which takes milliseconds.
    """
    return (
        isinstance(schema, Mapping)
        and schema.keys() <= {"type", "description", "title", "default"}
        and schema.get("type") in ("integer", "number", "boolean")
    )


def by_name(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of each property of an object schema, by name; {} for a property that
    differs among the schema's alternatives.
    """
    result: dict[str, Any] = {}
    try:
        several = ways(schema)
    except GrammarError:  # the call grammar reports it
        several = [schema]
    for way in several:
        for name, value in properties_of(way).items():
            result[name] = value if result.get(name, value) == value else {}
    return result


def odd_names(schema: Any) -> set[str]:
    """Return the names of properties, at any depth, that are empty, have an outer blank, or contain
    a colon, comma, double quote, ``<`` or a bracket.
    """
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            found |= {name for name in properties_of(part) if _ODD.search(name)}
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return found
