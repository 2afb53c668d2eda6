"""Grammars of argument values in Gemma 4's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.chat.tools.formats import QUOTE
from treadle.chat.tools.grammar_rules import GrammarRules
from treadle.chat.tools.schemas import (
    choices,
    is_never,
    joined,
    properties_of,
    required_of,
    with_required,
)
from treadle.chat.tools.unquoted_text import limits
from treadle.grammar.json_schema import inline_schema, is_possible
from treadle.grammar.lark import counts
from treadle.grammar.llguidance_limits import NUMBERS, ReferencedSchemas

_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_KEY = r'/[^\s,:{}\[\]<"]+/'
_PLAIN = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": _NUMBER,
    "boolean": '"true" | "false"',
    "null": '"null" | "None"',
}
_KINDS = ("string", *_PLAIN, "object", "array")


class GemmaValueGrammar:
    """Adds rules to ``rules`` for the values that a schema allows, in Gemma 4's notation. ``parts``
    resolves references.
    """

    def __init__(self, rules: GrammarRules, parts: ReferencedSchemas) -> None:
        self._rules = rules
        self._parts = parts
        self._known: dict[str, str] = {}  # rules by reference; under "", the rule of any value

    def _once(self, ref: str, body: Callable[[], str]) -> str:
        """Return the name of the rule of the reference ``ref``. At the first call it is added with
        the body that ``body`` returns, which may refer to the rule itself.
        """
        if ref not in self._known:
            self._known[ref] = self._rules.place()
            self._rules.fill(self._known[ref], body())
        return self._known[ref]

    def value(self, schema: Any) -> str:
        """Add a rule of the values that a schema allows; return its name."""
        schema = self._merged(schema)
        ref = schema.get("$ref")
        if isinstance(ref, str):
            return self._once(ref, lambda: self.value(self._parts.at(ref)))
        values = choices(schema)
        if values:
            return self._rules.add(" | ".join(self._rules.literal(_own(each)) for each in values))
        several = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(several, Sequence):
            base = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}
            each = [
                joined(base, one) if base and isinstance(one, Mapping) else one
                for one in several
                if not is_never(one)
            ]
            return self._rules.add(" | ".join(map(self.value, each)))
        if not schema.get("type"):
            return self._once("", lambda: self._kinds({}, _KINDS))
        kinds = schema["type"]
        return self._rules.add(self._kinds(schema, [kinds] if isinstance(kinds, str) else kinds))

    def _merged(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema merged with the parts of its ``allOf``, references resolved."""
        if not isinstance(schema, Mapping):
            return {}
        parts = schema.get("allOf")
        result = {k: v for k, v in schema.items() if k != "allOf"}
        if not isinstance(parts, list):
            return schema
        for part in parts:
            ref = part.get("$ref") if isinstance(part, Mapping) else None
            more = self._merged(self._parts.at(ref) if isinstance(ref, str) else part)
            properties = {**properties_of(result), **properties_of(more)}
            required = [*required_of(result), *required_of(more)]
            result = {**result, **more, "properties": properties, "required": required}
        return result

    def _kinds(self, schema: Mapping[str, Any], kinds: Sequence[str]) -> str:
        made = []
        for kind in kinds:
            if kind == "string":
                text = self._rules.text_within(limits(schema), "", QUOTE)
                made.append(f"{self._rules.literal(QUOTE)} {text}")
            elif kind in _PLAIN:
                made.append(self._number(kind, schema))
            elif kind == "array":
                made.append(self._array(schema))
            elif kind == "object":
                made.append(self._object(schema))
        return " | ".join(made)

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        """Return the rule body of a value of the type ``kind``, number, integer, boolean or null,
        with the schema's bounds if they can be enforced.
        """
        bounds = {key: schema[key] for key in NUMBERS if key in schema}
        own = {"type": kind, **bounds}
        if not bounds or kind not in ("integer", "number") or not is_possible(own):
            return _PLAIN[kind]
        return self._rules.add(inline_schema(own, lenient=True))

    def _array(self, schema: Mapping[str, Any]) -> str:
        """Return the rule body of an array: items of ``prefixItems``, then of ``items``, within
        ``minItems`` and ``maxItems``.
        """
        own = schema.get("prefixItems")
        other = schema.get("items")
        first = [self.value(each) for each in own] if isinstance(own, list) else []
        least = int(schema.get("minItems") or 0)
        most = schema.get("maxItems")
        most = len(first) if is_never(other) and most is None else most
        behind = ""
        if most is None or most > len(first):
            item = self.value(other)
            n = max(len(first), 1)
            if most is None or most > n:
                some = counts(max(least - n, 0), None if most is None else int(most) - n)
                behind = f'("," {item}){some}'
            first = first or [item]
        for i in reversed(range(len(first))):
            behind = f"{first[i]} {behind}" if not i else f'"," {first[i]} {behind}'
            behind = "" if most is not None and most <= i else behind
            behind = behind if i < least else f"({behind})?" if behind else ""
        return f'"[" {behind} "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        schema = with_required(schema)
        rules = self._rules
        properties = properties_of(schema)
        if not properties and schema.get("additionalProperties") is not False:
            pair = f'{_KEY} ":" {self.value(schema.get("additionalProperties"))}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        required = required_of(schema)
        first = '"}"'
        more = '"}"'
        for key in sorted(properties, key=str.lower, reverse=True):  # the order of Gemma's template
            if is_never(properties[key]) and key not in required:
                continue
            pair = f"{rules.literal(key + ':')} {self.value(properties[key])}"
            rest = rules.add(more)
            if key in required:
                first = f"{pair} {rest}"
                more = f'"," {pair} {rest}'
            else:
                first = f"{pair} {rest} | {rules.add(first)}"
                more = f'"," {pair} {rest} | {rest}'
        return f'"{{" {rules.add(first)}'


def _own(value: Any) -> str:
    """Return a value as text in Gemma 4's notation."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_own(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_own, value))}]"
    return json.dumps(value)
