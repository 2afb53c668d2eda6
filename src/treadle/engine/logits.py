"""A run's logits for samplers: the largest of each output row, and the full row on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from struct import Struct

import numpy as np
import numpy.typing as npt

from treadle.kernels.run_state import N_TOP as N_TOP
from treadle.kernels.run_state import RESULT, TOTAL
from treadle.kernels.run_state import TOTAL_ERROR as TOTAL_ERROR
from treadle.kernels.run_state import AsyncMask as AsyncMask
from treadle.kernels.run_state import LogitsQuery as LogitsQuery

Tokens = Seq[int] | npt.NDArray[np.intp]
_FIRST, _TOTAL = Struct(f"=f{4 * N_TOP - 4}xi"), Struct("=d")


class TopLogits:
    """The N_TOP largest logits of a row, in descending order, equal ones by ascending id. NaN and
    +infinity come first. If the row has fewer, or if only the largest was queried, the rest is
    -infinity.
    """

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    @property
    def first(self) -> tuple[float, int]:
        """The largest logit, and its token."""
        value, token = _FIRST.unpack_from(self._data, self._at)
        return value, token

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The logits, float32 ``[N_TOP]``."""
        return np.frombuffer(self._data, np.float32, N_TOP, self._at)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The tokens of ``values``, int32 ``[N_TOP]``."""
        return np.frombuffer(self._data, np.int32, N_TOP, self._at + 4 * N_TOP)

    @property
    def total(self) -> float:
        """The sum of ``exp(logit - largest)`` over the row, to a relative error of TOTAL_ERROR;
        undefined if the query did not include it.
        """
        total: float = _TOTAL.unpack_from(self._data, self._at + TOTAL)[0]
        return total


class LogitsRow:
    """The logits of one output.

    top: the largest logits, as the last query found them; None without queries.
    raw: the first query's result if that has no mask and includes ``TopLogits.total``; else None.
    """

    __slots__ = ("_index", "_rows", "raw", "top")

    def __init__(
        self, rows: LogitsBatch, index: int, tops: list[TopLogits], queries: tuple[LogitsQuery, ...]
    ) -> None:
        self._rows = rows
        self._index = index
        self.top = tops[-1] if tops else None
        self.raw = tops[0] if tops and queries[0].total and queries[0].mask is None else None

    def logits(self) -> npt.NDArray[np.float32]:
        """Return all logits, ``[n_vocab]``, as a copy."""
        return self._rows.copy(self._index, slice(None))

    def take(self, ids: Tokens) -> npt.NDArray[np.float32]:
        """Return the logits of the tokens ``ids``, f32 ``[len(ids)]``."""
        return self._rows.copy(self._index, ids)


class LogitsBatch:
    """The logits rows of one run, in order. Full rows stay in the run's buffer until the engine's
    next run, which copies them if this object is still referenced.
    """

    def __init__(
        self,
        read: Callable[[], npt.NDArray[np.float32]],
        data: bytes,
        queries: Seq[tuple[LogitsQuery, ...]],
        lock: AbstractContextManager[object],
    ) -> None:
        self._read = read  # the engine's
        self._lock = lock  # the engine's
        self._data = data
        self._queries = queries
        self._kept: npt.NDArray[np.float32] | None = None

    def __iter__(self) -> Iterator[LogitsRow]:
        at = 0
        for index, queries in enumerate(self._queries):
            tops = [TopLogits(self._data, at + i * RESULT.itemsize) for i in range(len(queries))]
            yield LogitsRow(self, index, tops, queries)
            at += len(queries) * RESULT.itemsize

    def copy(self, row: int, columns: slice | Tokens) -> npt.NDArray[np.float32]:
        """Return a copy of a row's logits in ``columns``. Blocks while another thread runs the
        engine.
        """
        if self._kept is None:
            with self._lock:
                if self._kept is None:
                    return self._read()[row, columns].copy()
        return self._kept[row, columns].copy()

    def snapshot(self) -> None:
        """Copy all logits, before the next run overwrites them. The caller holds the engine's
        lock.
        """
        if self._kept is None:
            self._kept = self._read().copy()
