"""Encoding of pictures and sound between steps: rows that running requests need are computed in
slices, so that other requests' tokens are not delayed by more than one slice.

Small pictures of one shape are encoded together, even for different requests: a run of few patches
spends much of its time on the tower's weights. The first in the queue is always among them, so that
none waits for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError

if TYPE_CHECKING:
    import numpy as np

    from treadle.engine.engine import Engine
    from treadle.kvcache.media import MediaEntry
    from treadle.scheduler.request import Encoding, MediaEncoder, Request

# Patches of pictures that are encoded together. More gain nothing (docs/pictures.md), and each
# waits for all; a tower's smallest plan has as many rows.
MOST_TOGETHER = 256


@dataclass(frozen=True, eq=False)
class EncodingGroup:
    """Pictures or sounds (``entries``) that are being encoded together; ``encoding`` runs one slice
    of time for each ``next``, and returns the rows of each entry at its end.
    """

    entries: list[MediaEntry]
    encoding: Encoding


class MediaQueue:
    """The pictures and sounds that requests wait for, first come, first encoded. ``clock`` returns
    seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._waiting: dict[MediaEntry, list[Request]] = {}  # of this step, in order
        self._current: EncodingGroup | None = None
        self._encode_alone: set[MediaEntry] = set()  # of a group that failed: encoded one by one
        self.n_encoded = 0
        self.n_rows = 0  # of these
        self.seconds = 0.0  # of all slices

    def begin_step(self) -> None:
        """Clear the list of waiting requests: each step collects it anew, since requests end and
        the cache of rows fills.
        """
        self._waiting.clear()

    def ready(self, request: Request, ids: list[int]) -> int:
        """Return how many of ``ids``, the request's next ones, can run now: all, or those before
        the first picture or sound without rows. That one and the request's later ones are then
        added to the queue.
        """
        media = self._engine.cache.media
        if not media.any_in(ids):
            return len(ids)
        for begin, _, entry, _ in media.runs_in(ids):
            if entry.rows is None:
                for each in _from(entry, request):
                    self._waiting.setdefault(each, []).append(request)
                return begin
        return len(ids)

    @property
    def row_s(self) -> float:
        """Mean seconds of encoding per row; 0 if nothing was encoded yet."""
        return self.seconds / self.n_rows if self.n_rows else 0.0

    @property
    def waits(self) -> bool:
        """Whether a request of this step waits for rows."""
        return bool(self._waiting)

    def run_slice(self) -> list[tuple[Request, TreadleError]]:
        """Encode for one slice of time. Return the requests whose picture or sound cannot be
        encoded, each with its error. The caller holds the engine's lock.
        """
        self._encode_alone.intersection_update(self._waiting)
        group = self._current
        if group is not None and not any(each in self._waiting for each in group.entries):
            self._drop()
        if not self._waiting:
            return []
        # The time is that of the first one's requests, should it fail to begin.
        entries = [next(iter(self._waiting))] if self._current is None else self._current.entries
        began = self._clock()
        try:
            if self._current is None:
                self._current = self._begin()
                entries = self._current.entries
            next(self._current.encoding)
        except StopIteration as end:
            self._finish(entries, end.value)
        except TreadleError as error:
            self._current = None
            if len(entries) > 1:  # one of them must not fail the others
                self._encode_alone.update(entries)
                return []
            return [(request, error) for request in self._waiting[entries[0]]]
        finally:
            took = self._clock() - began
            self.seconds += took
            waiting = (self._waiting.get(entry, ()) for entry in entries)
            for request in {request: None for requests in waiting for request in requests}:
                request.answer.timings.media_s += took
        return []

    def _begin(self) -> EncodingGroup:
        """Begin to encode the first picture or sound in the queue, and small ones of its shape.
        Raises TreadleError if no waiting request has its encoder.
        """
        first, *others = self._waiting
        encoder = self._encoder_of(first)
        if encoder is None:
            raise TreadleError(f"{first}: its rows are not there, and the request has no picture")
        entries = [first]
        encoders = [encoder]
        room = MOST_TOGETHER - encoder.n_patches
        for entry in others if first not in self._encode_alone else ():
            if encoder.n_patches > room:
                break
            found = self._encoder_of(entry)
            if (
                found is not None
                and found.shape == encoder.shape
                and entry not in self._encode_alone
            ):
                entries.append(entry)
                encoders.append(found)
                room -= encoder.n_patches
        return EncodingGroup(entries, encoder.begin([each.prepared for each in encoders]))

    def _encoder_of(self, entry: MediaEntry) -> MediaEncoder | None:
        """Return the encoder of ``entry`` from any request that waits for it; None if none has it:
        some requests, such as a session's, have only the ids.
        """
        found = (request.media.get(entry) for request in self._waiting[entry])
        return next((encoder for encoder in found if encoder is not None), None)

    def _finish(self, entries: list[MediaEntry], rows: list[np.ndarray]) -> None:
        """Store each entry's ``rows``, float32 ``[n_rows, width]``; then trim the cache of rows to
        its size.
        """
        for entry, own in zip(entries, rows, strict=True):
            entry.rows = own
            self.n_rows += entry.n_rows
        self._current = None
        self.n_encoded += len(entries)
        self._engine.cache.media.trim()

    def _drop(self) -> None:
        """Stop the current encoding, if any."""
        if self._current is not None:
            self._current.encoding.close()
            self._current = None


def _from(entry: MediaEntry, request: Request) -> list[MediaEntry]:
    """Return ``entry`` and the request's later pictures and sounds that have no rows."""
    own = list(request.media)
    later = own[own.index(entry) + 1 :] if entry in request.media else []
    return [entry, *(each for each in later if each.rows is None)]
