"""Parser of model output: reasoning, content and tool calls. Server, library and CLI use it.

::

    formats.py               call and reasoning formats of model families, one row each
    detect.py                the dialect of a chat template: its format, and what it can render
                         -- from messages to a prompt --
    messages.py              conversations with calls, in a template's form
    history.py               earlier messages that only some templates take
    system_messages.py       system messages in the middle of a conversation
    reasoning.py             reasoning before an answer, in a template's style
                         -- from an answer to its parts --
    answer_plan.py           request options to a constraint and the marks of an answer
    stream_parser.py         streaming parser: text to parts
    output.py                parts of an answer, and a whole answer
    openai_objects.py        answers and their parts as objects of OpenAI's API
    stop_filter.py           stop strings, searched in content only
    argument_readers.py      call arguments in each notation to JSON, as they stream in
    arguments.py             call arguments that are complete, or cut short
    schemas.py               property names and values of a schema, for notations other than JSON
    schema_check.py          JSON-schema check of values
                         -- constraints --
    constrained_decoding.py  which token may come next in reasoning, calls, a schema's JSON
    call_grammar.py          grammars of calls
    grammar_rules.py         builder of their rules
    tagged_grammar.py        grammars of values between tags
    unquoted_text.py         regular expressions of strings without quotes
    gemma_values.py          grammars of values in Gemma 4's notation
    python_grammar.py        grammars of values as Python literals
                         -- tools that are Python functions --
    python_functions.py      a schema from the signature, and calls of the function
    python_annotations.py    annotations as schemas
    python_constraints.py    constraints in ``Annotated``
    python_literals.py       Python literals, read as models write them

A call ends where its JSON ends, whatever its strings contain.
"""

from treadle.chat.tools.detect import (
    TemplateDialect,
    dialect_of,
    find_dialect,
    find_thought,
    keeps_reasoning,
)
from treadle.chat.tools.formats import ROWS, Thought, ToolCallFormat
from treadle.chat.tools.output import OutputPiece, ParsedOutput, ToolCall
from treadle.chat.tools.stream_parser import AnswerMarks, StreamParser

__all__ = [
    "ROWS",
    "AnswerMarks",
    "OutputPiece",
    "ParsedOutput",
    "StreamParser",
    "TemplateDialect",
    "Thought",
    "ToolCall",
    "ToolCallFormat",
    "dialect_of",
    "find_dialect",
    "find_thought",
    "keeps_reasoning",
]
