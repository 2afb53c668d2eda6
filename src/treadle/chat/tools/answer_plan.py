"""Plan of an answer: turns request options (tools, schema, reasoning) into a constraint for
decoding and the marks that the output parser looks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.chat.tools.call_grammar import (
    calls_behind,
    final_header,
    recipients,
    whole_answer,
    whole_json,
)
from treadle.chat.tools.constrained_decoding import ConstrainedDecoder, ConstraintPlan, Trigger
from treadle.chat.tools.detect import TemplateDialect
from treadle.chat.tools.formats import Thought, ToolCallFormat, core_of
from treadle.chat.tools.stop_filter import StopFilter
from treadle.chat.tools.stream_parser import AnswerMarks
from treadle.errors import GrammarError, of_setting
from treadle.grammar.compiled_cache import Grammars
from treadle.grammar.grammar import Grammar
from treadle.grammar.json_schema import Schema, enforced_schema, kept_schema
from treadle.tokenizer.tokenizer import Tokenizer

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerOptions:
    """Options of an answer.

    ``tools``: argument schemas by name. Those of ``strict`` tools must be enforced completely,
        others as far as possible.
    ``forced``: names of tools, one of which must be called. ``parallel``: several calls are
        allowed.
    ``schema`` (``lenient``: enforced as far as possible), ``grammar`` (GBNF), ``regex``:
        constraints of an answer that is not a call.
    ``budget``: most tokens of reasoning. ``message``: text written before the closing mark when the
        budget is used up.
    ``control``: ``ConstrainedDecoder.end_reasoning`` may be called.
    """

    tools: Schemas = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    forced: tuple[str, ...] = ()
    parallel: bool = True
    schema: Schema | None = None
    lenient: bool = False
    grammar: str | None = None
    regex: str | None = None
    budget: int | None = None
    message: str = ""
    control: bool = False
    streams: bool = True  # output arguments as they stream in


@dataclass(frozen=True)
class AnswerPlan:
    """Plan of one answer: ``marks`` for its parser, ``plan``, its constraint (None: any text), and
    ``warnings`` about schema parts that are not enforced.
    """

    marks: AnswerMarks = field(default_factory=AnswerMarks)
    plan: ConstraintPlan | None = None
    warnings: tuple[str, ...] = ()
    shown: frozenset[int] = frozenset()  # control tokens that the parser reads

    def guide(self) -> ConstrainedDecoder | None:
        """Return a constrained decoder for one output; None if nothing is constrained."""
        return None if self.plan is None else self.plan.guide()

    def stop_filter(self, stop: Sequence[str]) -> StopFilter | None:
        """Return a filter for one output that hides reasoning and calls from the search for
        ``stop`` strings; None without stop strings, or if the output can have neither.
        """
        marks = self.marks
        if stop and (marks.thought or marks.row or marks.channels):
            return StopFilter(marks, stop)
        return None


def plan_answer(
    wanted: AnswerOptions, dialect: TemplateDialect, prompt: str, grammars: Grammars
) -> AnswerPlan:
    """Plan the answer with the options ``wanted`` to a rendered ``prompt``. ``grammars``: cache of
    the model's compiled grammars. Raises GrammarError for a schema, grammar or message that must be
    enforced and cannot be.
    """
    with of_setting("tools"):
        tools, warnings = _enforceable(wanted, grammars)
    if wanted.schema is not None and wanted.lenient:
        with of_setting("json_schema"):
            schema, left_out = kept_schema(wanted.schema)
        wanted = replace(wanted, schema=schema)
        warnings = [*warnings, *left_out]
    own = wanted.grammar is not None or wanted.regex is not None
    marks = dialect.marks(
        prompt,
        tools=tools,
        parallel=wanted.parallel,
        streams=wanted.streams and not own,
        sure=bool(tools) and not own,
        forced=bool(wanted.forced) and not own,
    )
    bound = _bound(wanted, dialect, tools, marks, grammars)
    lazy = None
    row = dialect.row
    plan = None
    if bound is None and tools:
        if marks.begun:
            source = recipients(row, tools, grammars.tokenizer, parallel=wanted.parallel)
            bound = _of_tools(source, grammars)
        else:
            lazy = _of_tools(calls_behind(row, tools, grammars.tokenizer), grammars)
    ends = wanted.budget is not None or wanted.control
    if dialect.thought and ends:
        check_message(wanted.message, dialect.thought)
    if bound or lazy or (dialect.thought and ends):
        plan = ConstraintPlan(
            grammars.tokenizer,
            dialect.thought,
            marks.opened,
            _may_open(wanted, dialect, grammars),
            wanted.budget,
            wanted.message,
            _header(wanted, dialect, marks, grammars),
            bound,
            lazy,
            triggers=_triggers(row, grammars.tokenizer),
            heads=tuple(head.encode() for head in _heads(row, tools)),
            drafts=() if own else tuple(head.encode() for head in _drafts(row, tools)),
            trigger=row.trigger if row.by_header else core_of(row.trigger)[0],
            once=not wanted.parallel,
        )
    found = bound or lazy
    said = (*warnings, *(found.warnings if found is not None else ()))
    return AnswerPlan(marks, plan, tuple(dict.fromkeys(said)), _shown(marks, grammars))


@of_setting("reasoning_budget_message")
def check_message(message: str, thought: Thought) -> None:
    """Raise GrammarError if the message that ends reasoning contains a mark of reasoning: the
    parser would take the text after that mark for the answer.
    """
    for mark in (thought.close.strip(), thought.begin.strip()):
        if mark in message:
            raise GrammarError(
                f"reasoning_budget_message has {mark!r}: expected text without marks of reasoning, "
                "which are written behind it"
            )


def _bound(
    wanted: AnswerOptions,
    dialect: TemplateDialect,
    tools: Schemas,
    marks: AnswerMarks,
    grammars: Grammars,
) -> Grammar | None:
    """Return the grammar of the whole answer without its reasoning; None if the answer may also be
    free text. ``tools``: argument schemas by name, as ``_enforceable`` returns them.
    """
    row = dialect.row
    tokenizer = grammars.tokenizer
    schema = wanted.schema
    if wanted.grammar is not None:
        return grammars.gbnf(wanted.grammar)
    if wanted.regex is not None:
        return grammars.regex(wanted.regex)
    if schema is not None and not wanted.lenient:
        grammars.schema(schema)  # raises for parts that cannot be enforced
    if wanted.forced or (tools and schema is not None):
        chosen = {name: tools[name] for name in wanted.forced or tools}
        parallel = wanted.parallel
        begun = marks.begun
        other = None if wanted.forced else schema
        source = whole_answer(row, chosen, tokenizer, parallel=parallel, begun=begun, schema=other)
        return _of_tools(source, grammars)
    if schema is None:
        return None
    if dialect.channels or marks.begun:
        with of_setting("json_schema"):
            return grammars.lark(whole_json(row, schema, tokenizer, begun=marks.begun))
    return grammars.schema(schema, lenient=wanted.lenient)


@of_setting("tools")
def _of_tools(source: str, grammars: Grammars) -> Grammar:
    return grammars.lark(source)


def _enforceable(wanted: AnswerOptions, grammars: Grammars) -> tuple[Schemas, list[str]]:
    """Return the tools' schemas without parts that cannot be enforced, and warnings about these. A
    tool with an invalid schema takes any object; if it is strict, raises GrammarError.
    """
    result: dict[str, Mapping[str, Any]] = {}
    warnings = []
    for name, schema in wanted.tools.items():
        try:
            if name in wanted.strict:
                schema = enforced_schema(schema)
            else:
                schema, left_out = kept_schema(schema)
                warnings += [f"tool {name!r:.80}: {each}" for each in left_out]
            if schema is False:
                raise GrammarError("its schema allows no value")
            result[name] = schema
            grammars.schema({"type": "object", **schema}, lenient=name not in wanted.strict)
        except GrammarError as error:
            if name in wanted.strict:
                raise GrammarError(f"tool {name!r:.80}: {error}") from None
            result[name] = {}
            warnings.append(f"tool {name!r:.80}: {error}")
    return result, warnings


def _header(
    wanted: AnswerOptions, dialect: TemplateDialect, marks: AnswerMarks, grammars: Grammars
) -> Grammar | None:
    """Return the grammar of the header that must precede an answer in the caller's own ``grammar``
    or ``regex`` (of ``wanted``); None if the format has no header or that grammar writes it.
    """
    own = wanted.grammar or wanted.regex
    row = dialect.row
    channels = dialect.channels
    if own is None:
        return None
    written = own.replace("\\", "")
    if channels is not None and not any(mark in written for mark in channels.known_by):
        return grammars.lark(final_header(row, grammars.tokenizer))
    if marks.begun and row.content and channels is None:
        return grammars.lark(final_header(row, grammars.tokenizer))
    return None


def _may_open(wanted: AnswerOptions, dialect: TemplateDialect, grammars: Grammars) -> bool:
    """Whether reasoning may precede a constrained answer: its opening mark is one token or begins
    with a special token, or answers are messages with headers. Before a caller's ``grammar`` or
    ``regex`` the mark must be one token.
    """
    if dialect.thought is None:
        return False
    ids = grammars.tokenizer.encode(dialect.thought.open, bos=False, special=True)
    if len(ids) == 1 or wanted.grammar is not None or wanted.regex is not None:
        return len(ids) == 1
    return dialect.channels is not None or grammars.tokenizer.is_special(ids[0])


def _drafts(row: ToolCallFormat, tools: Schemas) -> list[str]:
    """Return strings that confirm a call inside reasoning when they follow a trigger, the mark at
    which a call begins.
    """
    if not tools:
        return []
    if row.by_header and row.channels:
        return [row.channels.message]
    keyed = row.before.rpartition("{")[2] if row.id_key else ""
    return [*_heads(row, tools), *(f"{keyed}{name}{row.after}" for name in tools if keyed)]


def _triggers(row: ToolCallFormat, tokenizer: Tokenizer) -> tuple[Trigger, ...]:
    """Return the triggers of a row's calls. A trigger's mark includes the bracket after its core
    (see ``core_of``), unless the core is a single token.
    """
    if row.by_header:
        return (Trigger("to=functions."),)
    made = []
    for mark in row.triggers:
        core, bracket = core_of(mark)
        begins = len(tokenizer.encode(core, bos=False, special=True)) == 1
        made.append(Trigger(core) if begins or not bracket else Trigger(mark, bracket))
    return (*made, *(Trigger(mark, read) for mark, read in row.shortened.items()))


def _heads(row: ToolCallFormat, tools: Schemas) -> list[str]:
    """Return the texts between a trigger and a call's arguments, one for each tool; if an id
    follows the trigger, only the text before the id.
    """
    if row.by_header:
        return list(tools)
    first = row.open if row.wrap[0] else ""
    if row.id_first:  # an id follows, which the model chooses
        return [first]
    behind = [f"{name}{row.id_mark or row.after}" for name in tools]
    space = row.trigger[len(core_of(row.trigger)[0]) :].rstrip("[")
    heads = [f"{space}{first}{row.before}{each}" for each in behind]
    if row.shortened:
        heads += [f"{row.before if row.wrap[0] else ''}{each}" for each in behind]
    return heads


def _shown(marks: AnswerMarks, grammars: Grammars) -> frozenset[int]:
    found: tuple[str, ...] = ()
    if marks.thought is not None:
        found += marks.thought.open, marks.thought.close
    if marks.row is not None:
        found += marks.row.marks
    if marks.channels:
        found += marks.channels.marks
    parts = [part for mark in found for part in grammars.tokenizer.cut(mark)]
    return frozenset(part for part in parts if isinstance(part, int))
