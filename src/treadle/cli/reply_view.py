"""Display of one answer in ``treadle chat``: reasoning is folded to a line, the rest is shown.

While the model reasons, the line on standard error counts its tokens. Standard output has only the
answer.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from treadle.base.humanize import counted
from treadle.cli.ui.screen import Screen, WrappedScreen
from treadle.cli.ui.table import harmless, is_styled, write

if TYPE_CHECKING:
    from treadle.api.generation import Generation
    from treadle.api.model import Model
    from treadle.chat.tools import AnswerMarks, OutputPiece

DIM = "\x1b[2m"
RESET = "\x1b[0m"
AGAIN = "\r\x1b[2K"
TAIL = 16  # last prompt tokens, in which an opening reasoning mark is looked for


def marks_of(model: Model, reply: Generation, *, bound: bool) -> AnswerMarks:
    """Return the reasoning marks to look for in an answer's text; none for a ``Reply``, which is
    split already, for an answer ``bound`` to a grammar, and if the marks are control tokens.
    """
    from treadle.chat.tools import AnswerMarks, find_thought

    if hasattr(reply, "parts"):  # a Reply's pieces are split already
        return AnswerMarks()
    thought = None if bound else find_thought(model.template)
    if thought is None:
        return AnswerMarks()
    mark = thought.close.strip()
    if model.detokenize(model.tokenize(mark, bos=False)).strip() != mark:
        return AnswerMarks()  # the mark is a control token, which output text lacks
    end = model.detokenize(reply.prompt_ids[-TAIL:], special=True)
    return AnswerMarks(thought=thought, opened=end.rstrip().endswith(thought.open.rstrip()))


class ReplyView:
    """Shows an answer piece by piece. ``content`` and ``reasoning`` hold its two parts so far.

    ``whole``: reasoning is shown in full, dim on a terminal, on standard error if standard output
    is not a terminal. Otherwise standard error shows its token count, updated live on a terminal.
    """

    def __init__(self, screen: Screen, marks: AnswerMarks, *, whole: bool) -> None:
        self.content = ""
        self.reasoning = ""
        self._screen = screen
        self._scanner = marks.scanner()
        self._whole = whole
        self._reasoning_screen = WrappedScreen() if whole and sys.stdout.isatty() else None
        self._dim = is_styled(sys.stdout)
        self._live = is_styled(sys.stderr)
        self._n_thought = 0  # tokens
        self._thinking = False

    def take(self, piece: str, n_tokens: int, *, last: bool = False) -> None:
        """Show a piece of unsplit text. ``n_tokens``: the answer's tokens so far; ``last``: the
        answer has ended.
        """
        for part in self._scanner.feed(piece, last=last):
            self.show(part, n_tokens)

    def show(self, part: OutputPiece, n_tokens: int) -> None:
        """Show a piece of reasoning or content; pieces of tool calls are skipped. ``n_tokens``: the
        answer's tokens so far.
        """
        if part.kind in ("call", "arguments"):
            return
        if part.kind == "reasoning":
            self.reasoning += part.text
            self._think(part.text, n_tokens)
        else:
            self.end()
            self.content += part.text
            self._screen.show(part.text)

    def end(self) -> None:
        """End the reasoning, and fold it unless ``whole``. Idempotent."""
        if not self._thinking:
            return
        self._thinking = False
        if self._reasoning_screen is not None:
            self._reasoning_screen.end()
            write(f"{RESET}\n" if self._dim else "\n")
        elif self._whole:
            print(file=sys.stderr, flush=True)
        if self._whole:
            return
        text = f"thought for {counted(self._n_thought, 'token')}"
        text = f"{AGAIN}{DIM}{text}{RESET}" if self._live else text
        print(text, file=sys.stderr, flush=True)

    def _think(self, text: str, n_tokens: int) -> None:
        first = not self._thinking
        self._thinking = True
        self._n_thought = n_tokens
        if self._reasoning_screen is not None:
            if first and self._dim:
                write(DIM)
            self._reasoning_screen.show(text)
        elif self._whole:
            text = harmless(text) if sys.stderr.isatty() else text
            print(text, end="", file=sys.stderr, flush=True)
        elif self._live:
            line = f"{AGAIN}{DIM}thinking … {counted(n_tokens, 'token')}{RESET}"
            print(line, end="", file=sys.stderr, flush=True)
