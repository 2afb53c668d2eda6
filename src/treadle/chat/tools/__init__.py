"""What a model says, told apart: reasoning, content, calls of tools. The server, the library and
the command line read answers by it.

::

    formats.py       how families of models write calls and reason: a row each arguments.py
    arguments in their notations to JSON, while they come output.py       an answer's parts, and all
    of them stream_parser.py    the parts, while it comes stop_filter.py      where stop strings are
    looked for detect.py     which row a chat template has messages.py   conversations with calls,
    as a template renders them call_grammar.py grammars of calls: of their rules (grammar_rules.py),
    of texts without quotes (unquoted_text.py)
                  and of Gemma 4's values (gemma_values.py)
    constrained_decoding.py      which token may come next: within reasoning, calls, an answer's
    schema

Calls end where their JSON ends, whatever a string in it says.
"""

from treadle.chat.tools.detect import TemplateDialect, find_manner, find_thought, manner_of
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
    "find_manner",
    "find_thought",
    "manner_of",
]
