"""Parser of model output: reasoning, content and tool calls. Server, library and CLI use it.

::

    formats.py               call and reasoning formats of model families, one row each
    arguments.py             call arguments in each notation to JSON, as they stream in
    output.py                parts of an answer, and a whole answer
    stream_parser.py         streaming parser: text to parts
    stop_filter.py           stop strings, searched in content only
    detect.py                the format of a chat template
    messages.py              conversations with calls, in a template's form
    call_grammar.py          grammars of calls: of their rules (grammar_rules.py), of strings
                             without quotes (unquoted_text.py), of Gemma 4's values
                             (gemma_values.py)
    constrained_decoding.py  which token may come next in reasoning, calls, a schema's JSON

A call ends where its JSON ends, whatever its strings contain.
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
