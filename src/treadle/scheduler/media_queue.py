"""Encoding of pictures and sound between steps: rows that running requests need are computed in
slices, so that other requests' tokens are not delayed by more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.media import MediaEntry
    from treadle.scheduler.request import Encoding, Request


class MediaQueue:
    """The pictures and sounds that requests wait for, first come, first encoded."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._waiting: dict[MediaEntry, list[Request]] = {}  # of this step, in order
        self._current: tuple[MediaEntry, Encoding] | None = None
        self.n_encoded = 0
        self.n_rows = 0  # of these
        self.seconds = 0.0  # of all slices

    def begin_step(self) -> None:
        """Forget who waits: each step asks again, since requests end and caches fill."""
        self._waiting.clear()

    def ready(self, request: Request, ids: list[int]) -> int:
        """Return how many of ``ids``, the request's next ones, can run now: all, or those before
        the first row that is not encoded, which is then waited for.
        """
        media = self._engine.cache.media
        if not media.any_in(ids):
            return len(ids)
        for begin, _, entry, _ in media.runs_in(ids):
            if entry.rows is None:
                self._waiting.setdefault(entry, []).append(request)
                return begin
        return len(ids)

    @property
    def row_s(self) -> float:
        """Mean seconds of encoding per row; 0: nothing was encoded yet."""
        return self.seconds / self.n_rows if self.n_rows else 0.0

    @property
    def waits(self) -> bool:
        """Whether a request of this step waits for rows."""
        return bool(self._waiting)

    def run_slice(self) -> list[tuple[Request, TreadleError]]:
        """Encode for one slice of time. Return the requests whose picture cannot be encoded, with
        the error. The caller holds the engine's lock.
        """
        if not self._waiting:
            self._drop()
            return []
        entry = next(iter(self._waiting))
        if self._current is not None and self._current[0] in self._waiting:
            entry = self._current[0]  # finish what was begun
        elif self._current is not None:
            self._drop()
        began = self._clock()
        try:
            if self._current is None:
                self._current = entry, _begin(entry, self._waiting[entry])
            next(self._current[1])
        except StopIteration as end:
            entry.rows = end.value
            self._current = None
            self.n_encoded += 1
            self.n_rows += entry.n_rows
            self._engine.cache.media.trim()
        except TreadleError as error:
            self._current = None
            return [(request, error) for request in self._waiting[entry]]
        finally:
            took = self._clock() - began
            self.seconds += took
            for request in self._waiting[entry]:
                request.answer.timings.media_s += took
        return []

    def _drop(self) -> None:
        """Stop an encoding that no request waits for any more."""
        if self._current is not None:
            self._current[1].close()
            self._current = None


def _begin(entry: MediaEntry, requests: list[Request]) -> Encoding:
    """Begin an encoding with the picture of one of the requests: one that has only the ids, such as
    a session's, may wait for another's.
    """
    for request in requests:
        if entry in request.media:
            return request.media[entry]()
    raise TreadleError(f"{entry}: its rows are not there, and the request has no picture")
