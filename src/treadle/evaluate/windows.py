"""A text cut into context-sized windows, and the order in which their tokens are run.

As in llama.cpp's program, the second half of each window is scored, so that every prediction has at
least half a context before it. The first token is BOS if the model uses one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import counted
from treadle.errors import TreadleError

MIN_CONTEXT = 4


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """A text as windows of tokens, int32 ``[n_windows, n_ctx]``. In each window the predictions
    after tokens ``first`` to ``n_ctx - 2`` are scored: the token that follows each of them is its
    target.
    """

    tokens: npt.NDArray[np.int32]
    first: int
    bos: int | None = None  # replaces each window's first token when it is run

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    def run_ids(self, window: int) -> list[int]:
        """Return the token ids of window number ``window`` to run: all but the last, whose
        prediction has no target; ``bos`` replaces the first.
        """
        ids: list[int] = self.tokens[window, :-1].tolist()
        if self.bos is not None:
            ids[0] = self.bos
        return ids

    def targets(self, window: int) -> npt.NDArray[np.int32]:
        """Return the target tokens of the scored predictions of window number ``window``, int32
        ``[n]``.
        """
        return self.tokens[window, self.first + 1 :]


def cut(
    ids: Sequence[int],
    n_ctx: int,
    *,
    bos: int | None,
    stride: int = 0,
    n_windows: int | None = None,
) -> TokenWindows:
    """Cut a text of token ids into windows of ``n_ctx`` tokens, at most ``n_windows`` of them if
    given. ``bos``: as in ``TokenWindows``.

    Without ``stride`` they are contiguous, and the second half of each is scored. With it they
    begin ``stride`` tokens apart, and the last ``stride`` tokens of each are scored: more context
    for each prediction, at ``n_ctx / stride`` times the work. A remainder shorter than a window is
    not used.

    Raises TreadleError for a text shorter than a window, or sizes out of range.
    """
    if n_ctx < MIN_CONTEXT:
        raise TreadleError(f"a context of {n_ctx}: expected at least {MIN_CONTEXT}")
    if not 0 <= stride < n_ctx:
        raise TreadleError(f"a stride of {stride}: expected 1 to {n_ctx - 1}")
    if len(ids) < n_ctx:
        raise TreadleError(
            f"the text is {counted(len(ids), 'token')}, less than one context of {n_ctx}: "
            "use a smaller context or a longer text"
        )
    step = stride or n_ctx
    tokens = np.asarray(ids, np.int32)
    starts = range(0, len(tokens) - n_ctx + 1, step)[:n_windows]
    rows = np.stack([tokens[at : at + n_ctx] for at in starts])
    return TokenWindows(rows, n_ctx - stride - 1 if stride else n_ctx // 2, bos)


@dataclass(frozen=True)
class WindowChunk:
    """Tokens ``start`` to ``end`` (exclusive) of window number ``window``, as one part of a run;
    ``scored``: their predictions are scored, else only prefilled.
    """

    window: int
    start: int
    end: int
    scored: bool


def schedule(
    windows: TokenWindows, max_tokens: int, max_outputs: int
) -> Iterator[tuple[WindowChunk | None, list[WindowChunk]]]:
    """Yield the runs that score all windows: for each run the chunk that is scored, None if it has
    none, and a list of chunks that are only prefilled. A run has at most ``max_tokens`` tokens, its
    scored chunk at most ``max_outputs``.

    A run returns few rows of logits, and throughput grows with its tokens: so the scored chunk of
    one window runs together with the prefill of the next.
    """
    n_run = windows.n_ctx - 1
    first = windows.first
    per = min(max_outputs, max_tokens)
    n_pieces = -(-(n_run - first) // per)
    beside = min(-(-first // n_pieces), max_tokens - per)  # tokens of the next window in each run
    ready = 0  # tokens of the current window already run
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
