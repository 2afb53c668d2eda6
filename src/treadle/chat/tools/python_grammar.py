"""Grammars of values as Python literals: some templates print values that way instead
of as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.chat.tools.grammar_rules import GrammarRules
from treadle.chat.tools.schemas import choices, is_never, properties_of, required_of
from treadle.chat.tools.unquoted_text import fits, limits
from treadle.grammar.json_schema import inline_schema, is_possible
from treadle.grammar.lark import counts
from treadle.grammar.llguidance_limits import NUMBERS, ReferencedSchemas

_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "$defs"}
_SEVERAL = {"anyOf", "oneOf"}
_TEXT = {"minLength", "maxLength", "pattern", "format", "allOf"}
_OF_KINDS: Mapping[str, set[str]] = {
    "string": _TEXT,
    "integer": set(NUMBERS),
    "number": set(NUMBERS),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_CONSTANTS = {"boolean": '"True" | "False" | "true" | "false"', "null": '"None" | "null"'}
_QUOTES = ("'", '"')
_HEX = "[0-9a-fA-F]"
_WHOLE = f"(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"  # no surrogates
# Escapes that stand for one character, whatever follows them.
_ESCAPE = (
    rf"\\(?:[\\'\"abfnrtv]|[0-3][0-7][0-7]|x{_HEX}{{2}}|u{_WHOLE}"
    rf"|U(?:0000{_WHOLE}|000[1-9a-fA-F]{_HEX}{{4}}|0010{_HEX}{{4}}))"
)


class Pythonic:
    """Adds rules to ``rules`` for the values that a schema allows, as Python literals. Only schemas
    whose keywords are all known here are supported. ``parts`` resolves references.
    """

    def __init__(self, rules: GrammarRules, parts: ReferencedSchemas) -> None:
        self._rules = rules
        self._parts = parts
        self._known: dict[str, str] = {}  # rules by reference; under "", the rule of any value

    def value(self, schema: Any) -> str | None:
        """Return the rule of an argument's value; None if its schema has keywords that cannot be
        enforced here. A string may have line breaks if it is the whole value.
        """
        try:
            return self._value(schema, breaks=True) if self._is_known(schema, set()) else None
        except RecursionError:
            return None

    def _is_known(self, schema: Any, met: set[str]) -> bool:
        """Whether every keyword of a schema can be enforced here. ``met``: references being
        followed.
        """
        if schema is True:
            return True
        if not isinstance(schema, Mapping):
            return False
        keys = schema.keys() - _NOTES
        kinds = _kinds(schema)
        if ref := schema.get("$ref"):
            if not isinstance(ref, str) or keys != {"$ref"}:
                return False
            if ref in met:
                return True
            return self._is_known(self._parts.at(ref), met | {ref})
        if keys & {"enum", "const"}:
            return keys <= {"enum", "type"} or keys <= {"const", "type"}
        if keys & _SEVERAL:
            several = next(schema[key] for key in keys)
            return (
                len(keys) == 1
                and isinstance(several, list)
                and bool(several)
                and all(self._is_known(each, met) for each in several)
            )
        if not keys:
            return True
        own = set[str]().union(*(_OF_KINDS.get(kind, set()) for kind in kinds))
        if not kinds or not keys <= {"type", *own} or not all(kind in _OF_KINDS for kind in kinds):
            return False
        bounds = {key: schema[key] for key in NUMBERS if key in schema}
        if bounds and not is_possible({"type": list(kinds), **bounds}):
            return False
        if not _is_said(schema):
            return False
        return self._is_known_within(schema, met)

    def _is_known_within(self, schema: Mapping[str, Any], met: set[str]) -> bool:
        """Whether the schemas of an array's items or an object's properties can be enforced here.
        ``met``: references being followed.
        """
        properties = properties_of(schema)
        more = schema.get("additionalProperties", True)
        if not properties:
            inner = [schema.get("items", True), True if is_never(more) else more]
            return not required_of(schema) and all(self._is_known(each, met) for each in inner)
        others = [v for v in properties.values() if not is_never(v)]
        required = required_of(schema)
        if more is not False or not all(name in properties for name in required):
            return False
        if any(is_never(properties[name]) for name in required):
            return False
        return all(self._is_known(each, met) for each in (*others, schema.get("items", True)))

    def _once(self, ref: str, body: Callable[[], str]) -> str:
        """Return the name of the rule of the reference ``ref``. At the first call it is added with
        the body that ``body`` returns, which may refer to the rule itself.
        """
        if ref not in self._known:
            self._known[ref] = self._rules.place()
            self._rules.fill(self._known[ref], body())
        return self._known[ref]

    def _value(self, schema: Any, *, breaks: bool = False) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        if ref := schema.get("$ref"):
            return self._once(ref, lambda: self._value(self._parts.at(ref)))
        kinds = _kinds(schema)
        if values := choices(schema):
            return self._rules.add(self._choices(values, kinds))
        several = schema.get("anyOf", schema.get("oneOf"))
        if several:
            ways = (self._value(each, breaks=breaks) for each in several)
            return self._rules.add(" | ".join(ways))
        if not kinds:
            every = self._once("", lambda: self._of({}, tuple(_OF_KINDS)))
            return self._rules.add(" | ".join([every, *self._texts({}, breaks=breaks)]))
        return self._rules.add(self._of(schema, kinds, breaks=breaks))

    def _choices(self, values: Sequence[Any], kinds: Sequence[str]) -> str:
        fitting = [value for value in values if not kinds or _is_of(value, kinds)]
        said = [repr(value) for value in fitting or values]
        return " | ".join(map(self._rules.plain, said))

    def _of(self, schema: Mapping[str, Any], kinds: Sequence[str], *, breaks: bool = False) -> str:
        made = []
        for kind in kinds:
            if kind == "string":
                made += self._texts(schema, breaks=breaks)
            elif kind == "array":
                made.append(self._array(schema))
            elif kind == "object":
                made.append(self._object(schema))
            else:
                bounds = {key: schema[key] for key in NUMBERS if key in schema}
                number = inline_schema({"type": kind, **bounds}, lenient=True)
                made.append(_CONSTANTS.get(kind) or self._rules.add(number))
        return " | ".join(made)

    def _texts(self, schema: Mapping[str, Any], *, breaks: bool = False) -> list[str]:
        """Return the expressions of a string in single quotes and in double quotes. ``breaks``:
        line breaks are allowed.
        """
        own = limits(schema)
        out = "" if breaks else r"\n"
        if not own:
            behind = "(?s:.)" if breaks else "."
            return [rf"/{q}(?:[^{q}\\{out}]|\\{behind})*{q}/" for q in _QUOTES]
        if not schema.keys() & (_TEXT - {"minLength", "maxLength"}):
            size = counts(int(schema.get("minLength") or 0), schema.get("maxLength"))
            units = [rf"/{q}(?:[^{q}\\{out}]|{_ESCAPE}){size}{q}/" for q in _QUOTES]
            if all(map(fits, units)):
                return [self._rules.terminal(unit) for unit in units]
        plain = [rf"/[^{q}\\{out}]*/" for q in _QUOTES]  # a pattern cannot match escapes
        return [
            self._rules.terminal(f"{q} ({' & '.join([*own, each])}) {q}")
            for q, each in ((json.dumps(q), each) for q, each in zip(_QUOTES, plain, strict=True))
            if fits(*own, each)
        ]

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least = int(schema.get("minItems") or 0)
        most = schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        some = counts(max(least - 1, 0), None if most is None else int(most) - 1)
        body = item if most == 1 else f'{item} ("," " "? {item}){some}'
        return f'"[" {body} "]"' if least else f'"[" ({body})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        rules = self._rules
        properties = properties_of(schema)
        more = schema.get("additionalProperties", True)
        if not properties:
            if is_never(more):
                return '"{" "}"'
            pair = f'({" | ".join(self._texts({}))}) ":" " "? {self._value(more)}'
            return f'"{{" ({pair} ("," " "? {pair})*)? "}}"'
        required = required_of(schema)
        first = '"}"'
        behind = '"}"'
        for key in reversed([*properties]):
            if is_never(properties[key]):
                continue
            name = f"({rules.plain(repr(key))} | {rules.plain(json.dumps(key))})"
            pair = f'{name} ":" " "? {self._value(properties[key])} {rules.add(behind)}'
            if key in required:
                first = pair
                behind = f'"," " "? {pair}'
            else:
                first = f"{pair} | {rules.add(first)}"
                behind = f'"," " "? {pair} | {rules.add(behind)}'
        return f'"{{" {rules.add(first)}'


def _kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema's ``type`` names; () if it names none."""
    found = schema.get("type", ())
    return (found,) if isinstance(found, str) else tuple(found) if isinstance(found, list) else ()


def _is_of(value: Any, kinds: Sequence[str]) -> bool:
    """Whether a JSON value is of one of the JSON types ``kinds``."""
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    named: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return named.get(type(value), "") in kinds


def _is_said(schema: Mapping[str, Any]) -> bool:
    """Whether ``unquoted_text.limits`` can enforce all that a schema requires of a string: pattern,
    format, length, and the same within ``allOf``.
    """
    every = schema.get("allOf", [])
    parts = [{key: schema[key]} for key in ("pattern", "format") if key in schema]
    sizes = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    if not isinstance(every, list) or not all(isinstance(part, Mapping) for part in every):
        return False
    own = [*parts, *([sizes] if any(sizes.values()) else [])]
    inner = all(part.keys() <= _TEXT | {"type"} and _is_said(part) for part in every)
    return inner and all(map(limits, own))
