"""Encoded windows of sound, and batches of texts that the decoder writes for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS
from treadle.errors import ContextFullError, TreadleError

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import EncodedKeys
    from treadle.kvcache.cache import Sequence as CachedRow


class EncodedWindow:
    """An encoded window: its keys and values for the decoder's cross attention. Close it, or use it
    as a context manager; its pages are freed once no batch uses it either.
    """

    def __init__(self, engine: Engine, keys: EncodedKeys) -> None:
        self._engine = engine
        self._keys = keys.hold()
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The engine in whose cache the window is."""
        return self._engine

    @property
    def keys(self) -> EncodedKeys:
        """The window's keys and values. Raises TreadleError if it is closed and no
        batch uses it.
        """
        if not self._keys.holders:
            raise TreadleError("the encoded window is closed")
        return self._keys

    def close(self) -> None:
        """Release the window's pages, once no batch uses them; a second call does nothing."""
        with self._engine.lock:
            if not self._closed:
                self._closed = True
                self._keys.drop()

    def __enter__(self) -> EncodedWindow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DecoderBatch:
    """Rows of text that the decoder extends together; each attends to its own window. Use it as a
    context manager, or ``close`` it.
    """

    def __init__(self, engine: Engine, windows: Sequence[EncodedWindow]) -> None:
        """Begin an empty row for each window. ``engine``: the decoder's. Raises TreadleError for a
        window that is closed or of another model.
        """
        self._engine = engine
        self._rows: list[CachedRow] = []
        with engine.lock:
            for window in windows:
                if window.engine is not engine:
                    self.close()
                    raise TreadleError("the encoded window is another model's")
                try:
                    keys = window.keys.hold()
                except TreadleError:
                    self.close()
                    raise
                row = engine.cache.sequence()
                row.attend_to(keys)
                self._rows.append(row)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def ids(self) -> list[list[int]]:
        """The ids that each row has read: prompt and text."""
        return [list(row.ids) for row in self._rows]

    def step(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Append ``ids[i]`` to row ``i``; return the logits after the last id of each row, f32
        ``[n_rows, n_vocab]``, a copy. Rows may get different numbers of ids, each at least one:
        first the prompt, then usually one. If rows begin alike, it is cheaper to let one row read
        the common ids and duplicate it with ``select``.

        Raises TreadleError for a row without ids, an id outside the vocabulary, or another number
        of rows; ContextFullError for more than ``config.n_text_ctx`` ids in a row. Then no row has
        changed.
        """
        return self._run(ids, [len(each) - 1 for each in ids])[1]

    def logits_at(
        self, ids: Sequence[Sequence[int]], places: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``step``, but return two arrays of logits: those after id ``places[i]`` of row ``i``'s
        ``ids``, then those after the last id. The logits after ``sot`` tell whether there is
        speech.
        """
        if len(places) != len(ids):
            raise TreadleError(f"{len(places)} places for {len(ids)} rows")
        for i, (place, each) in enumerate(zip(places, ids, strict=True)):
            if not 0 <= place < len(each):
                raise TreadleError(f"row {i}: place {place}: expected one of {len(each)} ids")
        return self._run(ids, places)

    def _run(
        self, ids: Sequence[Sequence[int]], places: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append ``ids[i]`` to row ``i``; return the logits after id ``places[i]`` of each row's
        ``ids``, and those after its last id, both f32 ``[n_rows, n_vocab]``. Raises as ``step``.
        """
        engine = self._engine
        if len(ids) != len(self._rows):
            raise TreadleError(f"ids of {len(ids)} rows: expected {len(self._rows)}")
        given = [[int(i) for i in each] for each in ids]
        for i, each in enumerate(given):
            if not each:
                raise TreadleError(f"row {i}: no ids")
            if len(self._rows[i]) + len(each) > engine.n_ctx:
                n = len(self._rows[i]) + len(each)
                raise ContextFullError(f"row {i}: {n} ids: the decoder reads {engine.n_ctx}")
            engine.check_ids(each)
        at_places: list[np.ndarray] = []
        at_ends: list[np.ndarray] = []
        with engine.lock:
            starts = [len(row) for row in self._rows]
            try:
                for rows in self._in_runs(given, places):
                    # Each row's logits from the wanted place to its last id.
                    wanted = [len(given[i]) - places[i] for i in rows]
                    items = zip(rows, wanted, strict=True)
                    parts = [BatchItem(self._rows[i], given[i], n) for i, n in items]
                    found = engine.run(parts)
                    behind = np.cumsum(wanted)
                    is_each = len(found) == len(rows)
                    at_places.append(found if is_each else found[behind - wanted])
                    at_ends.append(found if is_each else found[behind - 1])
            except BaseException:
                for row, start in zip(self._rows, starts, strict=True):
                    engine.cache.truncate(row, start)
                raise
        return self._joined(at_places), self._joined(at_ends)

    def _joined(self, found: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate the logits of all runs, each f32 ``[n, n_vocab]``."""
        if len(found) == 1:
            return found[0]
        none = np.empty((0, self._engine.config.n_vocab), np.float32)
        return np.concatenate([none, *found])

    def _in_runs(self, ids: Sequence[Sequence[int]], places: Sequence[int]) -> Iterator[list[int]]:
        """Yield groups of consecutive row numbers, each of which fits the engine's limits of tokens
        and outputs of one run. A row has as many outputs as ids from ``places[i]`` on.
        """
        rows: list[int] = []
        n = n_outputs = 0
        for i, each in enumerate(ids):
            wanted = len(each) - places[i]
            if rows and (n + len(each) > self._engine.max_tokens or n_outputs + wanted > OUTPUTS):
                yield rows
                rows = []
                n = 0
                n_outputs = 0
            rows.append(i)
            n += len(each)
            n_outputs += wanted
        if rows:
            yield rows

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows with these numbers, in this order. A number given twice duplicates its row,
        which costs a copy of one page. Raises TreadleError for a number that no row has.
        """
        if wrong := [i for i in rows if not 0 <= i < len(self._rows)]:
            raise TreadleError(f"row {wrong[0]}: the batch has {len(self._rows)}")
        with self._engine.lock:
            cache = self._engine.cache
            old = self._rows
            self._rows = []
            used: set[int] = set()
            for i in rows:
                row = cache.fork(old[i]) if i in used else old[i]
                used.add(i)
                self._rows.append(row)
            for i, row in enumerate(old):
                if i not in used:
                    row.close()

    def close(self) -> None:
        """Release the rows; the windows stay open. A second call does nothing."""
        with self._engine.lock:
            for row in self._rows:
                row.close()
            self._rows = []

    def __enter__(self) -> DecoderBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
