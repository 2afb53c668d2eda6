"""A text cut into windows of one context each, and the order in which their tokens are run.

As in llama.cpp's program: of each window the second half is scored, so that every prediction has
half a context at least before it, and the first token is BOS where the model wants one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from treadle.base.fast_dataclass import dataclass
from treadle.base.humanize import counted
from treadle.errors import TreadleError

MIN_CONTEXT = 4


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Tokens, int32 ``[n_windows, n_ctx]``. The predictions after tokens ``first`` to ``n_ctx - 2``
    of each window are scored: what they predict is in it.
    """

    tokens: npt.NDArray[np.int32]
    first: int
    bos: int | None = None  # what each window's first token is replaced by, when it is run

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    def run_ids(self, window: int) -> list[int]:
        """What is run of a window: all but its last token, whose prediction nobody can score."""
        ids: list[int] = self.tokens[window, :-1].tolist()
        if self.bos is not None:
            ids[0] = self.bos
        return ids

    def targets(self, window: int) -> npt.NDArray[np.int32]:
        """The tokens that the scored predictions should have predicted, int32."""
        return self.tokens[window, self.first + 1 :]


def cut(
    ids: Sequence[int],
    n_ctx: int,
    *,
    bos: int | None,
    stride: int = 0,
    n_windows: int | None = None,
) -> TokenWindows:
    """Cut a text into windows.

    Without ``stride`` they lie side by side, and of each the second half is scored. With it they
    begin ``stride`` tokens apart, and of each the last ``stride`` tokens are scored: more context
    for each prediction, and ``n_ctx / stride`` times the work. What is left at the end, less than a
    window, is not used.

    Raises TreadleError for a text shorter than a window, or sizes out of range.
    """
    if n_ctx < MIN_CONTEXT:
        raise TreadleError(f"a context of {n_ctx}: expected at least {MIN_CONTEXT}")
    if not 0 <= stride < n_ctx:
        raise TreadleError(f"a stride of {stride}: expected 1 to {n_ctx - 1}")
    if len(ids) < n_ctx:
        raise TreadleError(
            f"the text is {counted(len(ids), 'token')}, less than one context of {n_ctx}: "
            "lower the context, or take a longer text"
        )
    step = stride or n_ctx
    tokens = np.asarray(ids, np.int32)
    starts = range(0, len(tokens) - n_ctx + 1, step)[:n_windows]
    rows = np.stack([tokens[at : at + n_ctx] for at in starts])
    return TokenWindows(rows, n_ctx - stride - 1 if stride else n_ctx // 2, bos)


@dataclass(frozen=True)
class WindowChunk:
    """Some of a window's tokens, as one part of a run: from ``start`` on; ``scored`` or not."""

    window: int
    start: int
    end: int
    scored: bool


def schedule(
    windows: TokenWindows, max_tokens: int, max_outputs: int
) -> Iterator[tuple[WindowChunk | None, list[WindowChunk]]]:
    """The runs that score all windows: at most one piece whose logits are wanted, and before it
    in the list pieces that are only read.

    A run gives few rows of logits, and is the quicker the more tokens it has: so beside the scored
    piece of one window the next window's beginning is read.
    """
    n_run, first = windows.n_ctx - 1, windows.first
    per = min(max_outputs, max_tokens)
    n_pieces = -(-(n_run - first) // per)
    beside = min(-(-first // n_pieces), max_tokens - per)  # tokens of the next window in each run
    ready = 0  # tokens read of the window in hand
    for window in range(len(windows)):
        while ready < first:
            end = min(first, ready + max_tokens)
            yield None, [WindowChunk(window, ready, end, False)]
            ready = end
        ready = 0
        for at in range(first, n_run, per):
            others = []
            if window + 1 < len(windows) and ready < first and beside:
                end = min(first, ready + beside)
                others.append(WindowChunk(window + 1, ready, end, False))
                ready = end
            yield WindowChunk(window, at, min(n_run, at + per), True), others
