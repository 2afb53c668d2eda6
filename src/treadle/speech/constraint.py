"""Grammars of calls, in llguidance's notation: what a row and the tools' schemas allow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.errors import GrammarError
from treadle.speech.arguments import is_text
from treadle.speech.rows import QUOTE, Channels, Row
from treadle.speech.schemas import is_never, is_plain, joined, properties_of, required_of, ways
from treadle.text.json_schema import Schema, inline_schema, schema_source
from treadle.text.schema_limits import Parts
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

    def place(self) -> str:
        """The name of a rule whose body comes later, by ``fill``: it may name the rule."""
        return self.add("")

    def fill(self, name: str, body: str) -> None:
        """Give a rule its body."""
        self._bodies[name] = f"{name}: {body}"

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
            f"{rules.literal(name)} {head} {_arguments_of(name, rules, row, schema)}"
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
        arguments = _arguments_of(name, rules, row, schema)
        calls.append(f"{head} {id} {rules.literal(row.after)} {arguments} {behind}")
    return rules.add(" | ".join(calls))


def _arguments_of(name: str, rules: Rules, row: Row, schema: Mapping[str, Any]) -> str:
    try:
        return _arguments(rules, row, schema)
    except GrammarError as error:
        raise GrammarError(f"tool {name!r:.80}: {error}") from None


def _arguments(rules: Rules, row: Row, schema: Mapping[str, Any]) -> str:
    if row.style == "tags":
        return _tags(rules, schema)
    if row.style == "own":
        whole = {"type": "object", "additionalProperties": False, **schema}
        try:
            return _Own(rules, Parts(schema)).value(whole)
        except RecursionError:
            raise GrammarError("its schema is too deeply nested") from None
    return rules.add(inline_schema({"type": "object", **schema}, lenient=True))


def _tags(rules: Rules, schema: Mapping[str, Any]) -> str:
    """Parameters in the schema's order, of one of its alternatives."""
    several = [f"({_parameters(rules, schema, way)})" for way in ways(schema)]
    return f"({' | '.join(several)}) {rules.literal('</function>')}"


def _parameters(rules: Rules, schema: Mapping[str, Any], way: Mapping[str, Any]) -> str:
    """Those of one alternative. References lead into the schema as a whole."""
    required, parts = required_of(way), []
    for key, value in properties_of(way).items():
        if not _is_possible(value, schema):
            if key in required:
                raise GrammarError(f"parameter {key!r:.80}: nothing fulfils its schema")
            continue
        said = rules.literal(f"<parameter={key}>\n")
        if is_text(value) and not (isinstance(value, Mapping) and _choices(value)):
            body = rules.text_until("</parameter>")
        elif is_text(value):
            words = " | ".join(rules.literal(word) for word in _choices(value))
            body = f"({words}) {rules.literal(chr(10) + '</parameter>')}"
        else:
            own = rules.add(inline_schema(_alone(value, schema), lenient=True))
            body = f"{own} {rules.literal(chr(10) + '</parameter>')}"
        part = f"({said} {body} {rules.literal(chr(10))})"
        parts.append(part if key in required else f"{part}?")
    return " ".join(parts) or '""'


def _is_possible(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a parameter can have a value at all, as far as is known."""
    if is_never(value) or is_text(value) or is_plain(value):
        return not is_never(value)
    from llguidance import LLMatcher

    source, _ = schema_source(_alone(value, schema), lenient=True)
    return "Unsatisfiable" not in LLMatcher.validate_grammar(source)


_WHOLE = "whole"


def _alone(value: Any, schema: Mapping[str, Any]) -> Any:
    """A part of a schema, with the whole where its references need that."""
    moved = _moved(value)
    return moved if moved == value else {**moved, "$defs": {_WHOLE: _moved(schema)}}


def _moved(part: Any) -> Any:
    """A part of a schema, its references as they are where the whole is a definition."""
    if isinstance(part, Mapping):
        moved = {key: _moved(value) for key, value in part.items()}
        ref = moved.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            moved["$ref"] = f"#/$defs/{_WHOLE}{ref[1:]}"
        return moved
    return [_moved(item) for item in part] if isinstance(part, list) else part


_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_KEY = r'/[^\s,:{}\[\]<"]+/'
_PLAIN = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": _NUMBER,
    "boolean": '"true" | "false"',
    "null": '"null"',
}
_KINDS = ("string", *_PLAIN, "object", "array")


class _Own:
    """Values in Gemma 4's notation. What a schema says of the size of values is left out."""

    def __init__(self, rules: Rules, parts: Parts) -> None:
        self._rules, self._parts = rules, parts
        self._known: dict[str, str] = {}  # rules by references; by nothing, that of any value

    def _once(self, ref: str, body: Callable[[], str]) -> str:
        """The rule of a reference, which its body may lead to."""
        if ref not in self._known:
            self._known[ref] = self._rules.place()
            self._rules.fill(self._known[ref], body())
        return self._known[ref]

    def value(self, schema: Any) -> str:
        """The rule of a value."""
        schema = self._merged(schema)
        ref = schema.get("$ref")
        if isinstance(ref, str):
            return self._once(ref, lambda: self.value(self._parts.at(ref)))
        choices = _choices(schema)
        if choices:
            return self._rules.add(" | ".join(self._rules.literal(_own(each)) for each in choices))
        several = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(several, Sequence):
            base = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}
            each = [joined(base, one) if base and isinstance(one, Mapping) else one
                    for one in several]  # fmt: skip
            return self._rules.add(" | ".join(map(self.value, each)))
        if not schema.get("type"):
            return self._once("", lambda: self._kinds({}, _KINDS))
        kinds = schema["type"]
        return self._rules.add(self._kinds(schema, [kinds] if isinstance(kinds, str) else kinds))

    def _merged(self, schema: Any) -> Mapping[str, Any]:
        """A schema with what ``allOf`` says, and what a reference beside others leads to."""
        if not isinstance(schema, Mapping):
            return {}
        parts, made = schema.get("allOf"), {k: v for k, v in schema.items() if k != "allOf"}
        if not isinstance(parts, list):
            return schema
        for part in parts:
            ref = part.get("$ref") if isinstance(part, Mapping) else None
            more = self._merged(self._parts.at(ref) if isinstance(ref, str) else part)
            properties = {**properties_of(made), **properties_of(more)}
            required = [*required_of(made), *required_of(more)]
            made = {**made, **more, "properties": properties, "required": required}
        return made

    def _kinds(self, schema: Mapping[str, Any], kinds: Sequence[str]) -> str:
        made = []
        for kind in kinds:
            if kind == "string":
                made.append(f"{self._rules.literal(QUOTE)} {self._rules.text_until(QUOTE)}")
            elif kind in _PLAIN:
                made.append(_PLAIN[kind])
            elif kind == "array":
                item = self.value(schema.get("items"))
                made.append(f'"[" ({item} ("," {item})*)? "]"')
            elif kind == "object":
                made.append(self._object(schema))
        return " | ".join(made)

    def _object(self, schema: Mapping[str, Any]) -> str:
        rules, properties = self._rules, properties_of(schema)
        if not properties and schema.get("additionalProperties") is not False:
            pair = f'{_KEY} ":" {self.value(schema.get("additionalProperties"))}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        required = required_of(schema)
        first, more = '"}"', '"}"'
        for key in sorted(properties, key=str.lower, reverse=True):  # as its template sorts them
            if is_never(properties[key]) and key not in required:
                continue
            pair = f"{rules.literal(key + ':')} {self.value(properties[key])}"
            rest = rules.add(more)
            if key in required:
                first, more = f"{pair} {rest}", f'"," {pair} {rest}'
            else:
                first, more = f"{pair} {rest} | {rules.add(first)}", f'"," {pair} {rest} | {rest}'
        return f'"{{" {rules.add(first)}'


def _own(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_own(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_own, value))}]"
    return json.dumps(value)


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found if isinstance(found, list) else []
