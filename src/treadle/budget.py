"""How much of the waiting prompts one step reads: a budget of time, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np

TARGET_S = 0.12  # a step's length where somebody waits for a next token
LEAST = 4  # tokens of prompts beside decoding ones, however slow the machine: none must starve
TILE = 8  # a step's tokens fill tiles of products: a ninth would cost as much as four
QUANTUM = 128  # tokens that a client may read before it is another one's turn
MEASURED = 64  # steps that a fit looks back on
T = TypeVar("T")


class Pace:
    """What a step costs: ``a + b prefill + c decode + d context`` seconds, fitted as it runs.

    ``prefill`` and ``decode`` are tokens; ``context`` is the sum over all tokens of how many stand
    before each. Only steps that read prompts are noted: no others are predicted, and small batches
    have other kernels.
    """

    def __init__(self, target_s: float = TARGET_S) -> None:
        self.target_s = target_s
        self._rows: deque[tuple[float, float, float, float]] = deque(maxlen=MEASURED)
        self._times: deque[float] = deque(maxlen=MEASURED)
        self._fit: np.ndarray | None = None
        self.token_s = 0.0  # seconds of steps for each token of a prompt that they read

    def note(self, prefill: int, decode: int, context: int, seconds: float) -> None:
        """One step that has run."""
        seconds = max(seconds, 1e-6)  # a clock may stand still, and relative errors are weighed
        self._rows.append((1.0, prefill, decode, context))
        self._times.append(seconds)
        self._fit = None
        self.token_s = sum(self._times) / sum(row[1] for row in self._rows)

    def seconds(self, prefill: int, decode: int, context: int) -> float | None:
        """What a step will take; None where nothing is known."""
        if not self._rows:
            return None
        if self._fit is None:
            self._fit = _fitted(np.array(self._rows), np.array(self._times))
        return float(self._fit @ (1.0, prefill, decode, context))

    def tokens(self, decode: int, context: int, before: int, most: int) -> int:
        """Tokens of prompts, up to ``most``, that a step may read beside ``decode`` others, which
        have ``context`` tokens before them; the prompts' tokens have about ``before``. All together
        are a multiple of TILE. As long as nothing is known, as few as may be; then at most about
        twice as many as were measured together: a guess from few steps must not cost a long one.
        """
        least = LEAST - (decode + LEAST) % -TILE
        none = self.seconds(0, decode, context)
        if none is None:
            return min(least, most)
        one = self.seconds(1, decode, context + before)
        assert one is not None
        if one <= none:  # noise: more work cannot take less time
            return min(least, most)
        known = 2 * max(int(prefill) for _, prefill, _, _ in self._rows) + 1
        spare = max(self.target_s - none, none / 2)  # they alone may take as long, or longer
        room = min(int(spare / (one - none)), known)
        return min(max(room - (decode + room) % TILE, least), most)


def _fitted(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients, none below 0, of the least squares of relative errors.

    What the rows cannot tell apart is given to all alike, by a little weight on small numbers. A
    coefficient that comes out negative is dropped, and the others are fitted again.
    """
    scale = rows.max(0)
    a, y = rows / np.where(scale > 0, scale, 1.0) / times[:, None], np.ones(len(times))
    out, live = np.zeros(rows.shape[1]), scale > 0
    while live.any():
        b = a[:, live]
        weight = 1e-3 * len(y) * np.square(b).mean() * np.eye(b.shape[1])
        found = np.linalg.solve(b.T @ b + weight, b.T @ y)
        if (found >= 0).all():
            out[live] = found / scale[live]
            break
        live[np.flatnonzero(live)[found < 0]] = False
    return out


class Shares:
    """Whose prompts are read: deficit round robin by client."""

    def __init__(self) -> None:
        self._order: deque[Hashable] = deque()  # clients with something to read, the next first
        self._credit: dict[Hashable, int] = {}  # tokens left of a client's turn

    def split(self, wanted: Iterable[tuple[Hashable, T, int]], budget: int) -> list[tuple[T, int]]:
        """Divide ``budget`` tokens among what is ``wanted`` (client, what, tokens), a client's own
        in the order given. Whoever's turn the budget cuts short goes on with it next time.
        """
        queues: dict[Hashable, deque[tuple[T, int]]] = {}
        for client, what, n in wanted:
            queues.setdefault(client, deque()).append((what, n))
        self._order = deque(client for client in self._order if client in queues)
        self._order.extend(client for client in queues if client not in self._credit)
        self._credit = {client: self._credit.get(client, 0) for client in self._order}
        given: dict[int, tuple[T, int]] = {}
        while budget > 0 and self._order:
            client = self._order[0]
            queue = queues[client]
            turn = self._credit[client] or (budget if len(queues) == 1 else QUANTUM)
            n = min(turn, budget, queue[0][1])
            what, left = queue.popleft()
            given[id(what)] = what, given.get(id(what), (what, 0))[1] + n
            budget, turn, left = budget - n, turn - n, left - n
            if left:
                queue.appendleft((what, left))
            if not queue:
                self._order.popleft()
                del self._credit[client], queues[client]
            else:
                self._credit[client] = turn
                if not turn:
                    self._order.rotate(-1)
        return list(given.values())
