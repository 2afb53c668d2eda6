"""How much of the waiting prompts one step reads: a budget of time, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from math import inf
from typing import TypeAlias, TypeVar

import numpy as np

TARGET_S = 0.12  # a step's length where somebody waits for a next token
LONGEST = 1.5  # times that: a step that is longer for good reason; see ``StepCostModel.tokens``
LEAST = 4  # tokens of prompts beside decoding ones, however slow the machine: none must starve
TILE = 8  # a step's tokens fill tiles of products: a ninth would cost as much as four
QUANTUM = 128  # tokens that a client may read before it is another one's turn
MEASURED = 64  # steps that a fit looks back on
REMEMBERED = 256  # steps after which one is forgotten: what once took long is tried again
MOST_REMEMBERED = 16 * REMEMBERED  # of a plan that takes too long each time that it is tried
MANY = 0  # the plan for all numbers of tokens that have none of their own
T = TypeVar("T")
# When it was, 1, the three numbers, seconds.
Step: TypeAlias = "tuple[float, float, float, float, float, float]"


class StepCost:
    """What steps of one plan take beside decoding texts: ``a + b prefill + c decode + d context``
    seconds, fitted as they run. ``prefill`` and ``decode`` are tokens; ``context`` is the sum over
    all tokens of how many stand before each.
    """

    def __init__(self) -> None:
        # Of steps that read prompts and of others, which are more: they must not push those out.
        self._steps: tuple[deque[Step], deque[Step]] = (
            deque(maxlen=MEASURED),
            deque(maxlen=MEASURED),
        )
        self._fit: np.ndarray | None = None
        self._kept = REMEMBERED  # steps
        self.most = 0  # tokens of the largest step that was fitted

    def note(
        self, at: int, prefill: int, decode: int, context: int, seconds: float, reads: bool
    ) -> None:
        """One step that has run, the ``at``-th of all; ``reads``: a prompt."""
        seconds = max(seconds, 1e-6)  # a clock may stand still, and relative errors are weighed
        self._steps[reads].append((at, 1.0, prefill, decode, context, seconds))
        self._fit = None

    def keep(self, *, is_long: bool) -> None:
        """Forget steps twice as late as before if this one took too long, else as usual."""
        self._kept = min(2 * self._kept, MOST_REMEMBERED) if is_long else REMEMBERED

    def forget(self, at: int) -> None:
        """Steps that are too long ago at the ``at``-th."""
        for steps in self._steps:
            while steps and steps[0][0] < at - self._kept:
                steps.popleft()
                self._fit = None

    def seconds(self, prefill: int, decode: int, context: int) -> float | None:
        """What a step will take; None where nothing is known."""
        if self._fit is None:
            steps = [*self._steps[False], *self._steps[True]]
            if not steps:
                return None
            rows = np.array(steps)
            self._fit = _fitted(rows[:, 1:5], rows[:, 5])
            self.most = int(rows[:, 2:4].sum(1).max())
        return float(self._fit @ (1.0, prefill, decode, context))


class StepCostModel:
    """What steps cost, by the plan that serves them. ``sizes``: of plans for few tokens, ascending;
    all other steps are of one plan.
    """

    def __init__(self, target_s: float = TARGET_S, sizes: Iterable[int] = ()) -> None:
        self.target_s, self._sizes = target_s, tuple(sizes)
        self._costs = {size: StepCost() for size in (*self._sizes, MANY)}
        self._read: deque[tuple[int, float]] = deque(maxlen=MEASURED)
        self._n_steps = 0
        self.token_s = 0.0  # of steps, for each token of a prompt that they read; any thread asks

    def cost(self, n_tokens: int) -> StepCost:
        """Of the plan that serves so many."""
        return self._costs[next((size for size in self._sizes if n_tokens <= size), MANY)]

    def note(self, prefill: int, decode: int, context: int, seconds: float) -> None:
        """One step that has run. What prompts take alone says nothing of steps beside others: those
        are shorter, and a fit of long ones only would promise them too long a time, unseen.
        """
        n = prefill + decode
        if prefill:
            self._read.append((prefill, seconds))
            self.token_s = sum(s for _, s in self._read) / sum(n for n, _ in self._read)
        if decode:
            self._n_steps += 1
            cost = self.cost(n)
            cost.note(self._n_steps, prefill - n % -TILE, decode, context, seconds, prefill > 0)
            cost.keep(is_long=seconds > self.target_s)
            for cost in self._costs.values():
                cost.forget(self._n_steps)

    def tokens(self, decode: int, context: int, before: int, most: int) -> int:
        """Tokens of prompts, up to ``most``, that a step may read beside ``decode`` others, which
        have ``context`` tokens before them; the prompts' tokens have about ``before``. All together
        are a multiple of TILE.

        The number that reads most a second within the target. A step may take up to LONGEST times
        the target if it then reads more than the square of the time says: on a slow machine 16
        tokens may take 1.5 times as long as 8, and a prompt is read in less time. As long as
        nothing is known, as few as may be; then at most about twice as many as were measured
        together in that plan, or in the next smaller one where it has no measures: a guess from few
        steps must not cost a long one.
        """
        least = LEAST - (decode + LEAST) % -TILE
        none = self._alone(decode, context)
        if none is None:
            return min(least, most)
        limit = max(self.target_s, 1.5 * none)  # they alone may take as long, or longer
        longest = max(limit, LONGEST * self.target_s)
        best, best_s, last, known = least, inf, none, decode - decode % -TILE
        for n in self._numbers(decode, context, before, limit, least):
            cost = self.cost(decode + n)
            took = cost.seconds(n, decode, context + n * before)
            if took is not None:  # else it is worth a try, if what is known would fit
                last, known = took, cost.most
            power = 1 if last <= limit else 2
            better = n / last**power >= best / best_s**power
            if n <= 2 * known and last <= longest and better:
                best, best_s = n, last
        return min(best, most)

    def _alone(self, decode: int, context: int) -> float | None:
        """Seconds of a step that only decodes: of its plan, or of the next larger one known."""
        plans = [size for size in self._sizes if size >= decode]
        known = (self._costs[p].seconds(-decode % TILE, decode, context) for p in (*plans, MANY))
        return next((seconds for seconds in known if seconds is not None), None)

    def _numbers(
        self, decode: int, context: int, before: int, limit: float, least: int
    ) -> Iterator[int]:
        """Tokens beside ``decode`` others that are worth a look, the fewest first: each number that
        is about as large as plans for few, then the most that take ``limit`` seconds.
        """
        end = max(self._sizes, default=0) - decode + 1
        yield from range(least, end, TILE)
        many = self._costs[MANY]
        none, one = (many.seconds(n, decode, context + n * before) for n in (0, 1))
        if none is None or one is None:
            yield least + max(0, -(-(end - least) // TILE)) * TILE
        elif one > none:  # else noise: more work cannot take less time
            n = min(int((limit - none) / (one - none)), 2 * many.most)
            n -= (decode + n) % TILE
            if n >= max(end, least):
                yield n


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


class KeyShares:
    """Whose prompts are read: keys take turns, and within a key its clients."""

    def __init__(self) -> None:
        self._keys, self._clients = Shares(), dict[Hashable, Shares]()

    def split(
        self, wanted: Iterable[tuple[Hashable, Hashable, T, int]], budget: int
    ) -> list[tuple[T, int]]:
        """Divide ``budget`` tokens among what is ``wanted`` (key, client, what, tokens)."""
        of_key: dict[Hashable, list[tuple[Hashable, T, int]]] = {}
        for key, client, what, n in wanted:
            of_key.setdefault(key, []).append((client, what, n))
        self._clients = {key: self._clients.get(key) or Shares() for key in of_key}
        sums = [(key, key, sum(n for *_, n in its)) for key, its in of_key.items()]
        parts = self._keys.split(sums, budget)
        return [each for key, n in parts for each in self._clients[key].split(of_key[key], n)]
