"""Chunked-prefill budget: prompt tokens per step, within a target time, and fair sharing of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from math import inf
from typing import TypeAlias, TypeVar

import numpy as np

TARGET_S = 0.12  # target length of a step while a caller waits for a next token
LONGEST = 1.5  # times TARGET_S: longest step allowed for throughput; see ``StepCostModel.tokens``
MIN_PROMPT_TOKENS = 4  # beside decoding ones, so that prompts are not starved
TILE = 8  # product tiles hold this many tokens: a ninth would cost as much as four
QUANTUM = 128  # prompt tokens per turn of a client
MEASURED = 64  # recent steps per fit
REMEMBERED = 256  # steps after which one is forgotten, so that a slow size is tried again
MOST_REMEMBERED = 16 * REMEMBERED  # the same for a plan that is too slow each time it is tried
MANY = 0  # key of the plan for all token counts without a plan of their own
T = TypeVar("T")
# Step number, 1, prefill, decode, context, seconds.
Step: TypeAlias = "tuple[float, float, float, float, float, float]"


class StepCost:
    """Cost model of the steps of one plan with decoding requests: ``a + b prefill + c decode + d
    context`` seconds, whose coefficients a to d are fitted to measured steps. ``prefill`` and
    ``decode``: tokens of prompts and decoding tokens; ``context``: the sum, over all tokens of the
    step, of the number of tokens before each.
    """

    def __init__(self) -> None:
        # Steps without and with prompts, apart: the former are more and would push out the latter.
        self._steps: tuple[deque[Step], deque[Step]] = (
            deque(maxlen=MEASURED),
            deque(maxlen=MEASURED),
        )
        self._fit: np.ndarray | None = None
        self._n_remembered = REMEMBERED  # steps
        self.most = 0  # tokens of the largest step in the fit

    def note(
        self, at: int, prefill: int, decode: int, context: int, seconds: float, reads: bool
    ) -> None:
        """Record the ``seconds`` of step number ``at``; ``prefill``, ``decode`` and ``context`` as
        of the class. ``reads``: whether it processed prompt tokens.
        """
        seconds = max(seconds, 1e-6)  # a clock may stand still; relative errors divide by it
        self._steps[reads].append((at, 1.0, prefill, decode, context, seconds))
        self._fit = None

    def keep(self, *, is_long: bool) -> None:
        """Set the number of steps after which a measurement is forgotten. If the step was longer
        than the target (``is_long``), the number is doubled, up to MOST_REMEMBERED; else it is
        REMEMBERED.
        """
        self._n_remembered = min(2 * self._n_remembered, MOST_REMEMBERED) if is_long else REMEMBERED

    def forget(self, at: int) -> None:
        """Drop the measurements that are too old at step number ``at``."""
        for steps in self._steps:
            while steps and steps[0][0] < at - self._n_remembered:
                steps.popleft()
                self._fit = None

    def seconds(self, prefill: int, decode: int, context: int) -> float | None:
        """Return the predicted seconds of a step, None before any measurement; ``prefill``,
        ``decode`` and ``context`` as of the class.
        """
        if self._fit is None:
            steps = [*self._steps[False], *self._steps[True]]
            if not steps:
                return None
            rows = np.array(steps)
            self._fit = _fitted(rows[:, 1:5], rows[:, 5])
            self.most = int(rows[:, 2:4].sum(1).max())
        return float(self._fit @ (1.0, prefill, decode, context))


class StepCostModel:
    """Predicts step times by plan. ``sizes``: the token counts of the plans for few tokens,
    ascending; one further plan serves all larger steps. ``target_s``: the longest that a step
    should take.
    """

    def __init__(self, target_s: float = TARGET_S, sizes: Iterable[int] = ()) -> None:
        self.target_s, self._sizes = target_s, tuple(sizes)
        self._costs = {size: StepCost() for size in (*self._sizes, MANY)}
        self._read: deque[tuple[int, float]] = deque(maxlen=MEASURED)
        self._n_steps = 0
        self.token_s = 0.0  # seconds per prompt token of recent steps; read by any thread

    def cost(self, n_tokens: int) -> StepCost:
        """Return the cost model of the plan that serves steps of ``n_tokens``."""
        return self._costs[next((size for size in self._sizes if n_tokens <= size), MANY)]

    def note(self, prefill: int, decode: int, context: int, seconds: float) -> None:
        """Record the ``seconds`` of one step; the counts as of ``StepCost``. Steps of prompts alone
        are not fitted: steps with decoding requests are shorter, and a fit of long ones only would
        allow them too much time.
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
        """Return the number of prompt tokens, up to ``most``, for a step with ``decode`` decoding
        tokens. ``context``: the number of tokens before these, summed over them; ``before``: about
        how many tokens precede each prompt token. The step's total is a multiple of TILE, unless
        ``most`` cuts it.

        The result has the highest prefill throughput within the target time, or within 1.5 times a
        step without prompt tokens if that is longer. A step may take up to LONGEST times the target
        if throughput then grows more than time squared: on a slow machine 16 tokens may take 1.5
        times as long as 8, and the prompt is finished sooner.

        Without measurements the result is the least that is ever returned: MIN_PROMPT_TOKENS,
        or up to TILE - 1 more. With measurements it is at most about twice the largest step
        measured in the plan that would serve the step, or in the next smaller plan if that has
        none, so that a guess from few steps does not cause a long one.
        """
        least = MIN_PROMPT_TOKENS - (decode + MIN_PROMPT_TOKENS) % -TILE
        none = self._decode_only_s(decode, context)
        if none is None:
            return min(least, most)
        limit = max(self.target_s, 1.5 * none)  # decode alone may already exceed the target
        longest = max(limit, LONGEST * self.target_s)
        best = least
        best_s = inf
        last = none
        known = decode - decode % -TILE
        for n in self._candidates(decode, context, before, limit, least):
            cost = self.cost(decode + n)
            took = cost.seconds(n, decode, context + n * before)
            if took is not None:  # else try it, if the last known time fits
                last = took
                known = cost.most
            power = 1 if last <= limit else 2
            better = n / last**power >= best / best_s**power
            if n <= 2 * known and last <= longest and better:
                best = n
                best_s = last
        return min(best, most)

    def _decode_only_s(self, decode: int, context: int) -> float | None:
        """Return the predicted seconds of a step of ``decode`` tokens without prompt tokens, by its
        plan or the next larger one with measurements; None if there are none. ``context``: as of
        ``StepCost``.
        """
        plans = [size for size in self._sizes if size >= decode]
        known = (self._costs[p].seconds(-decode % TILE, decode, context) for p in (*plans, MANY))
        return next((seconds for seconds in known if seconds is not None), None)

    def _candidates(
        self, decode: int, context: int, before: int, limit: float, least: int
    ) -> Iterator[int]:
        """Yield candidate numbers of prompt tokens, ascending from ``least``: those that fit the
        plans for few tokens, then the most that take ``limit`` seconds. ``decode``, ``context``,
        ``before``: as of ``tokens``.
        """
        end = max(self._sizes, default=0) - decode + 1
        yield from range(least, end, TILE)
        many = self._costs[MANY]
        none, one = (many.seconds(n, decode, context + n * before) for n in (0, 1))
        if none is None or one is None:
            yield least + max(0, -(-(end - least) // TILE)) * TILE
        elif one > none:  # else noise: more tokens cannot take less time
            n = min(int((limit - none) / (one - none)), 2 * many.most)
            n -= (decode + n) % TILE
            if n >= max(end, least):
                yield n


def _fitted(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the non-negative coefficients ``[n_columns]`` by which ``rows`` ``[n_steps,
    n_columns]`` give ``times`` ``[n_steps]`` with the least relative error.

    A small ridge term splits evenly between columns that the measurements cannot separate. A
    negative coefficient is dropped, and the rest is fitted again.
    """
    scale = rows.max(0)
    a = rows / np.where(scale > 0, scale, 1.0) / times[:, None]
    y = np.ones(len(times))
    out = np.zeros(rows.shape[1])
    live = scale > 0
    while live.any():
        b = a[:, live]
        weight = 1e-3 * len(y) * np.square(b).mean() * np.eye(b.shape[1])
        found = np.linalg.solve(b.T @ b + weight, b.T @ y)
        if (found >= 0).all():
            out[live] = found / scale[live]
            break
        live[np.flatnonzero(live)[found < 0]] = False
    return out


class DeficitRoundRobin:
    """Deficit round robin over clients, which shares the prompt tokens of a step: a client's turn
    is QUANTUM tokens.
    """

    def __init__(self) -> None:
        self._order: deque[Hashable] = deque()  # clients with pending prompts, the next first
        self._credit: dict[Hashable, int] = {}  # tokens left in a client's turn

    def split(self, wanted: Iterable[tuple[Hashable, T, int]], budget: int) -> list[tuple[T, int]]:
        """Divide ``budget`` tokens among ``wanted``, triples (client, item, tokens), each client's
        items in the given order; return pairs (item, tokens granted). A turn cut short by the
        budget continues at the next call.
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
            budget = budget - n
            turn = turn - n
            left = left - n
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


class KeyedRoundRobin:
    """Round robin over keys, and over clients within each key: shares the prompt tokens of a
    step.
    """

    def __init__(self) -> None:
        self._keys, self._clients = DeficitRoundRobin(), dict[Hashable, DeficitRoundRobin]()

    def split(
        self, wanted: Iterable[tuple[Hashable, Hashable, T, int]], budget: int
    ) -> list[tuple[T, int]]:
        """Divide ``budget`` tokens among ``wanted``, tuples (key, client, item, tokens); return
        pairs (item, tokens granted).
        """
        of_key: dict[Hashable, list[tuple[Hashable, T, int]]] = {}
        for key, client, what, n in wanted:
            of_key.setdefault(key, []).append((client, what, n))
        self._clients = {key: self._clients.get(key) or DeficitRoundRobin() for key in of_key}
        sums = [(key, key, sum(n for *_, n in its)) for key, its in of_key.items()]
        parts = self._keys.split(sums, budget)
        return [each for key, n in parts for each in self._clients[key].split(of_key[key], n)]
