"""What a model says, told apart: reasoning, content, calls of tools. The server, the library and
the command line read answers by it.

::

    rows.py     how a family of models writes calls: a row each
    scanner.py  an answer's parts, while it comes
    trial.py    which row a chat template has

Calls end where their JSON ends, whatever a string in it says.
"""

from treadle.speech.rows import ROWS, Row, ToolCall
from treadle.speech.scanner import THINK, THOUGHT, Said, Scanner, Speech, Told
from treadle.speech.trial import find_row, reasons, shows_tools

__all__ = [
    "ROWS",
    "THINK",
    "THOUGHT",
    "Row",
    "Said",
    "Scanner",
    "Speech",
    "Told",
    "ToolCall",
    "find_row",
    "reasons",
    "shows_tools",
]
