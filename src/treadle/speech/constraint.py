"""Grammars of calls, in llguidance's notation: what a row and the tools' schemas allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.speech.arguments import is_text
from treadle.speech.rows import QUOTE, Channels, Row
from treadle.text.json_schema import Schema, inline_schema
from treadle.text.tokenizer import Tokenizer

MAX_MORE = 15  # calls behind the first: a weak model may go on for ever
_ID = "/[a-zA-Z0-9]{9}/"
_ANY_TEXT = "/(?s:.*)/"


class Rules:
    """Collects the rules of a grammar for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bodies: dict[str, str] = {}

    def add(self, body: str, attribute: str = "") -> str:
        """The name of a rule with this body."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = f"{name}{attribute}: {body}"
        return name

    def literal(self, text: str) -> str:
        """Exactly this text; control tokens that it spells are those tokens."""
        parts = [
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in self._tokenizer.cut(text)
        ]
        return " ".join(parts) or '""'

    def text_until(self, mark: str) -> str:
        """Any text, and the first such mark behind it."""
        cut = self._tokenizer.cut(mark)
        if len(cut) == 1 and isinstance(cut[0], int):  # no other text is a control token
            return f"{self.add(_ANY_TEXT)} <[{cut[0]}]>"
        return self.add(_ANY_TEXT, f"[suffix={json.dumps(mark, ensure_ascii=False)}]")

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._bodies.values()])


def calls_behind(row: Row, tools: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer) -> str:
    """What follows the row's ``trigger``: where it wraps calls, all of them; else one."""
    rules = Rules(tokenizer)
    one = _one(rules, row, tools)
    if row.wrap[0]:
        return rules.source(_wrapped(rules, row, one))
    if row.channels:  # the trigger is within the header: its end may be written otherwise
        constrain = f"({rules.literal(' ')}? {rules.literal('<|constrain|>')})?"
        channel = f"({rules.literal('<|channel|>commentary')})?"
        head = f'{channel} {constrain} ("json" | " json")? {rules.literal(Channels.message)}'
        calls = [
            f"{rules.literal(name)} {head} {_arguments(rules, row, schema)}"
            for name, schema in tools.items()
        ]
        return rules.source(" | ".join(calls))
    return rules.source(one)


def whole_answer(
    row: Row,
    tools: Mapping[str, Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    begun: bool,
    schema: Schema | None = None,
) -> str:
    """An answer that is nothing but calls; with a ``schema``, either calls or JSON of it."""
    rules = Rules(tokenizer)
    one = _one(rules, row, tools)
    if row.wrap[0]:
        own = _wrapped(rules, row, one, parallel=parallel)
        answer = f"{rules.literal(row.wrap[0])} {own}"
    else:
        call = f"{rules.literal(row.open)} {one}"
        several = parallel and row.trigger and not row.channels
        answer = f"{one if begun else call} {_more(rules, row, call) if several else ''}"
    if schema is not None:
        answer = f"{answer} | {json_behind(rules, row, schema, begun=begun)}"
    if row.channels:
        answer = f"{analysis(rules)} ({answer})"
    return rules.source(answer)


def recipients(
    row: Row, tools: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """An answer behind a prompt that has begun a call, which may be one of no tool: then it is
    content, and calls may follow.
    """
    rules = Rules(tokenizer)
    one = _one(rules, row, tools)
    more = _more(rules, row, f"{rules.literal(row.open)} {one}") if parallel else ""
    content = rules.literal(row.content + row.after)
    text, until = rules.add(_ANY_TEXT), rules.text_until(row.open)
    return rules.source(f"{one} {more} | {content} {text} | {content} {until} {one} {more}")


def whole_json(row: Row, schema: Schema, tokenizer: Tokenizer, *, begun: bool = False) -> str:
    """An answer that is JSON, for rows that write something before contents."""
    rules = Rules(tokenizer)
    answer = json_behind(rules, row, schema, begun=begun)
    return rules.source(f"{analysis(rules)} ({answer})" if row.channels else answer)


def json_behind(rules: Rules, row: Row, schema: Schema, *, begun: bool) -> str:
    """JSON, behind what says that it is no call."""
    head = ""
    if row.channels:
        head = rules.literal(Channels.final)
    elif row.content and begun:
        head = rules.literal(row.content + row.after)
    return f"{head} {rules.add(inline_schema(schema, lenient=True))}"


def analysis(rules: Rules) -> str:
    """A first message of reasoning that gpt-oss may write; then the next begins, perhaps here."""
    thought = Channels.thought
    behind = rules.literal(Channels.start)
    return f"({rules.literal(thought.open)} {rules.text_until(thought.close)} {behind})?"


def _wrapped(rules: Rules, row: Row, one: str, *, parallel: bool = True) -> str:
    call = f"{rules.literal(row.open)} {one}"
    return f"{call} {_more(rules, row, call) if parallel else ''} {rules.literal(row.wrap[1])}"


def _more(rules: Rules, row: Row, call: str) -> str:
    """Calls behind the first."""
    return f"({rules.literal(row.between)} {call}){{0,{MAX_MORE}}}"


def _one(rules: Rules, row: Row, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """A call of one of the tools, behind ``open``."""
    calls = []
    for name, schema in tools.items():
        id = f"{rules.literal(row.id_mark)} {_ID}" if row.id_mark else ""
        behind = rules.literal(row.behind)
        if row.style == "object" and row.short_ids:
            behind = f'({rules.literal(", ")} "\\"id\\": \\"" {_ID} "\\"")? {behind}'
        head = rules.literal(row.before + name)
        calls.append(
            f"{head} {id} {rules.literal(row.after)} {_arguments(rules, row, schema)} {behind}"
        )
    return rules.add(" | ".join(calls))


def _arguments(rules: Rules, row: Row, schema: Mapping[str, Any]) -> str:
    if row.style == "tags":
        return _tags(rules, schema)
    if row.style == "own":
        return own_value(rules, {"type": "object", **schema})
    return rules.add(inline_schema({"type": "object", **schema}, lenient=True))


def _tags(rules: Rules, schema: Mapping[str, Any]) -> str:
    """Parameters in the schema's order. References lead to the schema's own definitions."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required, parts = schema.get("required", ()), []
    for key, value in _properties(schema).items():
        said = rules.literal(f"<parameter={key}>\n")
        if is_text(value) and not (isinstance(value, Mapping) and _choices(value)):
            body = rules.text_until("</parameter>")
        elif is_text(value):
            words = " | ".join(rules.literal(word) for word in _choices(value))
            body = f"({words}) {rules.literal(chr(10) + '</parameter>')}"
        else:
            own = rules.add(inline_schema({**value, **shared}, lenient=True))
            body = f"{own} {rules.literal(chr(10) + '</parameter>')}"
        part = f"({said} {body} {rules.literal(chr(10))})"
        parts.append(part if key in required else f"{part}?")
    return f"{' '.join(parts)} {rules.literal('</function>')}"


def own_value(rules: Rules, schema: Any) -> str:
    """A value in Gemma 4's notation. What a schema says of the size of values is left out."""
    if not isinstance(schema, Mapping):
        schema = {}
    choices = _choices(schema)
    if choices:
        return rules.add(" | ".join(rules.literal(_own(choice)) for choice in choices))
    several = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(several, Sequence):
        return rules.add(" | ".join(own_value(rules, each) for each in several))
    kinds = schema.get("type", list(_OWN))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return rules.add(" | ".join(_OWN[kind](rules, schema) for kind in kinds if kind in _OWN))


def _own_object(rules: Rules, schema: Mapping[str, Any]) -> str:
    properties = _properties(schema)
    required = schema.get("required", ())
    first, more = '"}"', '"}"'
    for key in sorted(properties, key=str.lower, reverse=True):  # as its template sorts them
        pair = f"{rules.literal(key + ':')} {own_value(rules, properties[key])}"
        rest = rules.add(more)
        if key in required:
            first, more = f"{pair} {rest}", f'"," {pair} {rest}'
        else:
            first, more = f"{pair} {rest} | {rules.add(first)}", f'"," {pair} {rest} | {rest}'
    return f'"{{" {rules.add(first)}'


def _own_array(rules: Rules, schema: Mapping[str, Any]) -> str:
    items = schema.get("items")
    item = own_value(rules, items if isinstance(items, Mapping) else {"type": list(_PLAIN)})
    return f'"[" ({item} ("," {item})*)? "]"'


def _own_text(rules: Rules, schema: Mapping[str, Any]) -> str:
    return f"{rules.literal(QUOTE)} {rules.text_until(QUOTE)}"


_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_PLAIN: dict[str, Any] = {
    "string": _own_text,
    "integer": lambda rules, schema: "/-?(0|[1-9][0-9]*)/",
    "number": lambda rules, schema: _NUMBER,
    "boolean": lambda rules, schema: '"true" | "false"',
    "null": lambda rules, schema: '"null"',
}
_OWN = {**_PLAIN, "object": _own_object, "array": _own_array}


def _own(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    return json.dumps(value, ensure_ascii=False)


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found if isinstance(found, list) else []


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}
