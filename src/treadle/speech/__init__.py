"""What a model says, told apart: reasoning, content, calls of tools. The server, the library and
the command line read answers by it.

::

    rows.py       how families of models write calls and reason: a row each
    arguments.py  arguments in their notations to JSON, while they come
    said.py       an answer's parts, and all of them
    scanner.py    the parts, while it comes
    heard.py      where stop strings are looked for
    manner.py     which row a chat template has
    messages.py   conversations with calls, as a template renders them
    constraint.py grammars of calls: of their rules (rules.py), of texts without quotes (texts.py)
                  and of Gemma 4's values (own.py)
    guide.py      which token may come next: within reasoning, calls, an answer's schema

Calls end where their JSON ends, whatever a string in it says.
"""

from treadle.speech.manner import Manner, find_manner, find_thought, manner_of
from treadle.speech.rows import ROWS, Row, Thought
from treadle.speech.said import Said, Told, ToolCall
from treadle.speech.scanner import Scanner, Speech

__all__ = [
    "ROWS",
    "Manner",
    "Row",
    "Said",
    "Scanner",
    "Speech",
    "Thought",
    "Told",
    "ToolCall",
    "find_manner",
    "find_thought",
    "manner_of",
]
