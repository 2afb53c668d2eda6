"""Grammars of tool calls in llguidance's notation, from a call format and the tools' schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.chat.tools.formats import Channels, Tags, ToolCallFormat, core_of
from treadle.chat.tools.gemma_values import GemmaValueGrammar
from treadle.chat.tools.grammar_rules import ANY_TEXT, SOME_TEXT, GrammarRules
from treadle.chat.tools.python_grammar import Pythonic
from treadle.chat.tools.schemas import (
    is_never,
    is_plain,
    properties_of,
    required_of,
    texts_of,
    ways,
)
from treadle.chat.tools.tagged_grammar import Tagged
from treadle.errors import GrammarError
from treadle.grammar.json_schema import Schema, inline_schema, is_possible
from treadle.grammar.llguidance_limits import ReferencedSchemas
from treadle.tokenizer.tokenizer import Tokenizer

MAX_MORE = 15  # calls after the first: a weak model may never stop


def calls_behind(
    row: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer
) -> str:
    """Return the grammar of the text after the core (see ``core_of``) of the row's ``trigger``: all
    calls if the format wraps them (``row.wrap``), else one call. ``tools``: argument schemas by
    name.
    """
    rules = GrammarRules(tokenizer)
    one = _one(rules, row, tools)
    if row.wrap[0]:
        answer = f" | {_in_words(rules, row)}" if row.content else ""
        return rules.source(f"{_behind_core(row)} ({_wrapped(rules, row, one)}{answer})")
    if row.by_header and row.channels:  # models spell the end of the header differently
        constrain = f"({rules.literal(' ')}? {rules.literal('<|constrain|>')})?"
        channel = f"({rules.literal('<|channel|>commentary')})?"
        head = f'{channel} {constrain} ("json" | " json")? {rules.literal(row.channels.message)}'
        calls = [
            f"{rules.literal(name)} {head} {_arguments_of(name, rules, row, schema)}"
            for name, schema in tools.items()
        ]
        return rules.source(" | ".join(calls))
    return rules.source(f"{_behind_core(row)} {one}")


def whole_answer(
    row: ToolCallFormat,
    tools: Mapping[str, Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    begun: bool,
    schema: Schema | None = None,
) -> str:
    """Return the grammar of an answer that is only calls of ``tools`` (argument schemas by name),
    or, with a ``schema``, calls or JSON of it.

    ``parallel``: several calls are allowed. ``begun``: the prompt ends with the first call's
    opening mark.
    """
    rules = GrammarRules(tokenizer)
    one = _one(rules, row, tools)
    if row.wrap[0]:
        own = _wrapped(rules, row, one, parallel=parallel)
        cores = [rules.literal(core_of(trigger)[0]) for trigger in row.triggers]
        answer = f"({' | '.join(cores)}) {_behind_core(row)} {own}"
    else:
        call = f"{rules.literal(core_of(row.open)[0])} {_behind_core(row)} {one}"
        several = parallel and row.trigger and not row.by_header
        answer = f"{one if begun else call} {_more(rules, row, call) if several else ''}"
    if schema is not None:
        answer = f"{answer} | {json_behind(rules, row, schema, begun=begun)}"
    if row.channels:
        answer = f"{next_message(rules, row.channels)} ({answer})"
    return rules.source(answer)


def recipients(
    row: ToolCallFormat,
    tools: Mapping[str, Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
) -> str:
    """Return the grammar of an answer whose first call the prompt has opened, without any
    constraint on content. The model may name ``row.content`` in place of a tool: text follows, then
    perhaps calls. ``parallel``: several calls are allowed.
    """
    rules = GrammarRules(tokenizer)
    one = _one(rules, row, tools)
    more = _more(rules, row, f"{rules.literal(row.open)} {one}") if parallel else ""
    content = rules.literal(row.content + row.after)
    text = rules.add(ANY_TEXT)
    until = rules.text_until(row.open)
    return rules.source(f"{one} {more} | {content} {text} | {content} {until} {one} {more}")


def whole_json(
    row: ToolCallFormat, schema: Schema, tokenizer: Tokenizer, *, begun: bool = False
) -> str:
    """Return the grammar of a JSON answer after the header that the row's format requires.
    ``begun``: the prompt ends with the row's opening mark.
    """
    rules = GrammarRules(tokenizer)
    answer = json_behind(rules, row, schema, begun=begun)
    if row.channels:
        answer = f"{next_message(rules, row.channels)} ({answer})"
    return rules.source(answer)


def json_behind(rules: GrammarRules, row: ToolCallFormat, schema: Schema, *, begun: bool) -> str:
    """Return a rule body: the header that marks an answer for the user, if the row has one, then
    JSON of ``schema``. ``begun``: the prompt ends with the row's opening mark.
    """
    head = ""
    if row.channels:
        head = rules.literal(row.channels.final)
    elif row.content and begun:
        head = rules.literal(row.content + row.after)
    return f"{head} {rules.add(inline_schema(schema, lenient=True))}"


def final_header(row: ToolCallFormat, tokenizer: Tokenizer) -> str:
    """Return the grammar of the header that marks an answer for the user."""
    rules = GrammarRules(tokenizer)
    if row.channels is None:
        return rules.source(rules.literal(row.content + row.after))
    return rules.source(f"{next_message(rules, row.channels)} {rules.literal(row.channels.final)}")


def next_message(rules: GrammarRules, channels: Channels) -> str:
    """Return the rule body of the optional mark that begins the message after reasoning."""
    return f"({rules.literal(channels.start)})?"


def _behind_core(row: ToolCallFormat) -> str:
    """Return the rule body of what follows the core of a row's trigger (see ``core_of``): white
    space, which may be shorter or longer than in the trigger, and its opening bracket if it has
    one; "" if nothing follows.
    """
    core, bracket = core_of(row.trigger)
    if bracket:
        return r"/[ \n]{0,2}\[/"
    return r"/[ \n]{1,2}/?" if core != row.trigger else ""


def _wrapped(rules: GrammarRules, row: ToolCallFormat, one: str, *, parallel: bool = True) -> str:
    call = f"{rules.literal(row.open)} {one}"
    return f"{call} {_more(rules, row, call) if parallel else ''} {rules.literal(row.wrap[1])}"


def _in_words(rules: GrammarRules, row: ToolCallFormat) -> str:
    """Return the rule body of an answer in words, for formats in which even such an answer is
    written as a call: the call of ``row.content``, which is no tool, and then text.
    """
    call = f"{row.before}{row.content}{row.after}{{}}{row.behind}{row.wrap[1]}"
    return f"{rules.literal(call)} {rules.add(SOME_TEXT)}"


def _more(rules: GrammarRules, row: ToolCallFormat, call: str) -> str:
    """Return the rule body of at most MAX_MORE calls after the first; ``call``: the body of one
    call.
    """
    return f"({rules.literal(row.between)} {call}){{0,{MAX_MORE}}}"


def _one(rules: GrammarRules, row: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Add the rule of one call of any of ``tools``, after the opening mark; return its name."""
    calls = []
    for name, schema in tools.items():
        id = f"{rules.literal(row.id_mark)} /{row.id_form}/" if row.id_mark else ""
        first = f"/{row.id_form}/" if row.id_first else ""
        behind = rules.literal(row.behind)
        if row.id_behind:
            id_said = f'"\\"id\\": \\"" /{row.id_form}/ "\\""'
            behind = f"({rules.literal(', ')} {id_said})? {behind}"
        head = rules.literal(row.before + name)
        if row.id_key:
            brace, key = row.before.split("{")
            id_said = f'"\\"{row.id_key}\\": \\"" /[0-9]{{1,6}}/ "\\", "'
            head = f"{rules.plain(brace + '{')} ({id_said})? {rules.plain(key + name)}"
        arguments = _arguments_of(name, rules, row, schema)
        optional = "?" if row.tags and row.after.isspace() else ""
        after = f"{rules.literal(row.after)}{optional}"
        calls.append(f"{first} {head} {id} {after} {arguments} {behind}")
    return rules.add(" | ".join(calls))


def _arguments_of(
    name: str, rules: GrammarRules, row: ToolCallFormat, schema: Mapping[str, Any]
) -> str:
    try:
        return _arguments(rules, row, schema)
    except GrammarError as error:
        raise GrammarError(f"tool {name!r:.80}: {error}") from None


def _arguments(rules: GrammarRules, row: ToolCallFormat, schema: Mapping[str, Any]) -> str:
    if row.tags is not None:
        return _tags(rules, row.tags, schema)
    if row.style == "python":
        return _python(rules, schema)
    if row.style == "own":
        whole = {"type": "object", "additionalProperties": False, **schema}
        try:
            return GemmaValueGrammar(rules, ReferencedSchemas(schema)).value(whole)
        except RecursionError:
            raise GrammarError("its schema is too deeply nested") from None
    return rules.add(inline_schema({"type": "object", **schema}, lenient=True))


def _tags(rules: GrammarRules, tags: Tags, schema: Mapping[str, Any]) -> str:
    """Return the rule body of arguments between tags, in any order, for each alternative of the
    schema.
    """
    literals = Pythonic(rules, ReferencedSchemas(schema))
    several = []
    values = Tagged(rules, tags, lambda v: _literals(rules, literals, v, schema))
    for way in ways(schema):
        made = []
        for key, value, needed in _parameters(schema, way):
            space = f"{rules.literal(tags.behind)}?" if tags.behind else ""
            made.append((f"{values.argument(key, value)} {space}", needed))
        several.append(rules.in_any_order(made, rules.literal(tags.end)))
    return f"({' | '.join(several)})"


def _python(rules: GrammarRules, schema: Mapping[str, Any]) -> str:
    """Return the rule body of a Python call's keyword arguments, in any order, up to ")", for each
    alternative of the schema.
    """
    several = []
    values = Pythonic(rules, ReferencedSchemas(schema))
    for way in ways(schema):
        made = []
        for key, value, needed in _parameters(schema, way):
            said = _literals(rules, values, value, schema)
            made.append((f"{rules.plain(f'{key}=')} ({said})", needed))
        several.append(rules.in_any_order(made, '")"', '", "'))
    return f"({' | '.join(several)})"


def _literals(
    rules: GrammarRules, literals: Pythonic, value: Any, schema: Mapping[str, Any]
) -> str:
    """Return the rule body of a parameter's value as JSON or, where it can be enforced, as a Python
    literal. ``value``: its schema, a part of ``schema``.
    """
    return " | ".join([_value(rules, value, schema), *filter(None, [literals.value(value)])])


def _parameters(
    schema: Mapping[str, Any], way: Mapping[str, Any]
) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, schema and whether it is required, of each parameter of one alternative
    (``way``). Optional ones whose schema allows no value are left out; a required one raises
    GrammarError.
    """
    required = required_of(way)
    for key, value in properties_of(way).items():
        if _is_possible(value, schema):
            yield key, value, key in required
        elif key in required:
            raise GrammarError(f"parameter {key!r:.80}: its schema allows no value")


def _value(rules: GrammarRules, value: Any, schema: Mapping[str, Any]) -> str:
    """Return the name of the rule of a parameter's value as JSON. ``value``: its schema, whose
    references point into the whole ``schema``.
    """
    return rules.add(inline_schema(_alone(value, schema), lenient=True))


def _is_possible(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether any value satisfies ``value``, the schema of a parameter in ``schema``, as far as
    llguidance knows.
    """
    if is_never(value) or texts_of(value) is not None or is_plain(value):
        return not is_never(value)
    return is_possible(_alone(value, schema))


_WHOLE = "whole"


def _alone(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return ``value``, a part of ``schema``, as a schema of its own; if it has references, the
    whole ``schema`` becomes a definition in it.
    """
    moved = _moved(value)
    return moved if moved == value else {**moved, "$defs": {_WHOLE: _moved(schema)}}


def _moved(part: Any) -> Any:
    """Return a part of a schema with its references changed to point into the definition that holds
    the whole schema (see ``_alone``).
    """
    if isinstance(part, Mapping):
        moved = {key: _moved(value) for key, value in part.items()}
        ref = moved.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            moved["$ref"] = f"#/$defs/{_WHOLE}{ref[1:]}"
        return moved
    return [_moved(item) for item in part] if isinstance(part, list) else part
