"""Tool calls: prompts with tools, constrained decoding, and the parser that splits output into
reasoning, content and calls. Server, library and CLI use it.

::

    formats.py               call and reasoning formats of model families, one row each
    detect.py                a chat template's dialect: its call format, and what it can render
                         -- from messages to a prompt --
    messages.py              converts conversations with calls to a template's form
    history.py               converts earlier messages that only some templates render
    system_messages.py       moves system messages that stand in the middle of a conversation
    reasoning.py             writes the reasoning of an answer in a template's style
                         -- from an answer to its parts --
    answer_plan.py           from request options to a constraint and the marks of an answer
    stream_parser.py         streaming parser: text to pieces
    output.py                pieces of an answer, and a whole answer
    openai_objects.py        answers and their pieces as objects of OpenAI's API
    stop_filter.py           restricts stop strings to content
    argument_readers.py      converts call arguments of each notation to JSON, while streaming
    arguments.py             reads call arguments that are complete or cut short
    schemas.py               property names and values of a schema, for notations other than JSON
    schema_check.py          checks values against a JSON schema
                         -- constraints --
    constrained_decoding.py  allowed next tokens in reasoning, calls, a schema's JSON
    call_grammar.py          grammars of calls
    grammar_rules.py         builder of grammar rules
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
