"""Pictures and sound in a text: each of their rows is a token, with an id above the vocabulary.

An id is ``number << 16 | row``. The number stands for the content: equal pictures have equal ids,
and different pictures have different ones, so the prefix cache compares ids as it does for text.
Numbers end with the process; files have the content's digest in their place.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fork_safety import free_lock
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import PageTree

ROW_BITS = 16
MOST_ROWS = 1 << ROW_BITS
LAST_NUMBER = (1 << (31 - ROW_BITS)) - 1  # ids fit an i32
ROWS_BYTES = 256 << 20  # of rows kept after their last use


class MediaEntry:
    """One picture or sound.

    digest: sha256 of its content and of all that its rows depend on.
    n_rows: tokens that it has in a text.
    positions: int32 ``[3, n_rows]``, each row's (time, row, column) relative to the position of the
        first; None: consecutive positions.
    advance: position of the text after the last row, minus the position of the first row.
    spans: ranges of rows whose tokens attend to each other in both directions.
    rows: float32 ``[n_rows, width]``: the hidden states in place of embeddings, then those to add
        after the first layers, if the model has such; None before encoding, and after ``trim``.
    """

    def __init__(
        self,
        digest: bytes,
        n_rows: int,
        positions: np.ndarray | None = None,
        advance: int | None = None,
        spans: tuple[tuple[int, int], ...] = (),
    ) -> None:
        if not 0 < n_rows < MOST_ROWS:
            raise TreadleError(
                f"a picture or sound of {n_rows} rows: expected 1 to {MOST_ROWS - 1}"
            )
        self.digest = digest
        self.n_rows = n_rows
        self.positions = positions
        self.advance = n_rows if advance is None else advance
        self.spans = spans
        self.rows: np.ndarray | None = None
        self.number = 0
        self.holders = 0  # requests that will still read ``rows``

    @property
    def ids(self) -> range:
        """The token ids of the entry's rows."""
        first = self.number << ROW_BITS
        return range(first, first + self.n_rows)

    def __repr__(self) -> str:
        return f"MediaEntry({self.digest.hex()[:12]}, {self.n_rows} rows)"


class MediaRegistry:
    """The pictures and sounds of one model, by number and by digest, least recently used first.

    ``n_vocab``: size of the vocabulary, above which the ids of rows are. ``rows_bytes``: limit in
    bytes of the rows that are kept although no request will read them.
    """

    def __init__(self, n_vocab: int, rows_bytes: int = ROWS_BYTES) -> None:
        self.first_number = (n_vocab >> ROW_BITS) + 1
        self.first_id = self.first_number << ROW_BITS
        self._by_number: OrderedDict[int, MediaEntry] = OrderedDict()
        self._by_digest: dict[bytes, MediaEntry] = {}
        self._rows_bytes = rows_bytes
        # Threads that prepare prompts enter pictures while another one runs the engine, whose lock
        # they might wait for as long as it encodes one.
        self._lock = free_lock()

    def __len__(self) -> int:
        return len(self._by_number)

    def enter(self, entry: MediaEntry, tree: PageTree | None = None) -> MediaEntry:
        """Give an entry a number, and return it; if there is an entry of the same digest, return
        that one.

        ``tree``: the cached pages; numbers in their ids are not given again. The caller holds the
        engine's lock. Raises TreadleError if all numbers are in use.
        """
        known = self.add(entry)
        if known is not None:
            return known
        with self._lock:
            return self._number(entry, self._free_number(tree))

    def add(self, entry: MediaEntry) -> MediaEntry | None:
        """Do as ``enter``, but only with a number that was never given, so that the engine's lock
        is not needed. Return None if no such number is left.
        """
        with self._lock:
            known = self._by_digest.get(entry.digest)
            if known is not None:
                self._by_number.move_to_end(known.number)
                return known
            number = self.first_number + len(self._by_number)
            if number > LAST_NUMBER or number in self._by_number:
                return None
            return self._number(entry, number)

    def _number(self, entry: MediaEntry, number: int) -> MediaEntry:
        entry.number = number
        self._by_number[number] = entry
        self._by_digest[entry.digest] = entry
        return entry

    def _free_number(self, tree: PageTree | None) -> int:
        """Return the number of the least recently used entry that neither requests nor cached pages
        (those of ``tree``) use, and remove that entry. Raises TreadleError if there is none.
        """
        used = {id >> ROW_BITS for id in tree.all_ids() if id >= self.first_id} if tree else set()
        for old, entry in self._by_number.items():
            if old not in used and not entry.holders:
                del self._by_number[old]
                del self._by_digest[entry.digest]
                return old
        raise TreadleError(f"{len(self._by_number)} pictures are in use: close some sessions")

    def has(self, id: int) -> bool:
        """Return whether ``id`` is a row of a known picture or sound."""
        entry = self._by_number.get(id >> ROW_BITS)
        return entry is not None and id & (MOST_ROWS - 1) < entry.n_rows

    def entry_of(self, id: int) -> MediaEntry:
        """Return the picture or sound of which ``id`` is a row. Raises KeyError if there is
        none.
        """
        return self._by_number[id >> ROW_BITS]

    def any_in(self, ids: Seq[int]) -> bool:
        """Return whether any of ``ids`` is a row of a picture or sound."""
        return bool(self._by_number) and len(ids) > 0 and max(ids) >= self.first_id

    def runs_in(self, ids: Seq[int], start: int = 0) -> Iterable[tuple[int, int, MediaEntry, int]]:
        """Yield the runs of consecutive rows of one picture or sound in ``ids[start:]``: the index
        of the first, the index after the last, the entry, and the entry's row at the first.
        """
        at = start
        n = len(ids)
        while at < n:
            id = ids[at]
            at += 1
            if id < self.first_id:
                continue
            begin = at - 1
            entry = self.entry_of(id)
            row = id & (MOST_ROWS - 1)
            most = min(n, begin + entry.n_rows - row)
            while at < most and ids[at] == id + (at - begin):
                at += 1
            yield begin, at, entry, row

    def entries_in(self, ids: Seq[int]) -> list[MediaEntry]:
        """Return the pictures and sounds in ``ids``, each once, in order."""
        if not self.any_in(ids):
            return []
        return list(dict.fromkeys(entry for _, _, entry, _ in self.runs_in(ids)))

    # -- rows --------------------------------------------------------------------------------------

    def hold(self, entries: Iterable[MediaEntry]) -> None:
        """Keep the rows of these entries until ``release``."""
        for entry in entries:
            entry.holders += 1

    def release(self, entries: Iterable[MediaEntry]) -> None:
        """End ``hold`` for these entries, and drop rows beyond the byte limit, least recently used
        first.
        """
        for entry in entries:
            entry.holders -= 1
        self.trim()

    def trim(self) -> None:
        """Drop rows that no request will read, least recently used first, until the rest is within
        the byte limit.
        """
        with self._lock:
            entries = list(self._by_number.values())
        kept = sum(entry.rows.nbytes for entry in entries if entry.rows is not None)
        for entry in entries:
            if kept <= self._rows_bytes:
                break
            if entry.rows is not None and not entry.holders:
                kept -= entry.rows.nbytes
                entry.rows = None

    # -- positions ---------------------------------------------------------------------------------

    def add_shifts(self, shifts: list[tuple[int, int]], ids: Seq[int], start: int) -> None:
        """Append a record to ``shifts`` for each entry that ends in ``ids[start:]`` and takes more
        or fewer positions than it has rows: (index after its last row, position minus index from
        there on).
        """
        for begin, end, entry, row in self.runs_in(ids, start):
            if row + (end - begin) == entry.n_rows and entry.advance != entry.n_rows:
                before = shifts[-1][1] if shifts else 0
                shifts.append((end, before + entry.advance - entry.n_rows))

    def positions(self, shifts: list[tuple[int, int]], ids: Seq[int], start: int) -> np.ndarray:
        """Return the positions of ``ids``, int64 ``[3, n]`` (time, row, column). ``start``: tokens
        of the sequence before them; ``shifts``: the sequence's records, with those of ``ids``.
        """
        n = len(ids)
        index = np.arange(start, start + n)
        made = np.repeat(index[None], 3, 0)
        for end, shift in shifts:
            made[:, max(end - start, 0) :] = index[max(end - start, 0) :] + shift
        for begin, end, entry, row in self.runs_in(ids):
            if entry.positions is not None:
                # the first row's position, perhaps in an earlier run
                first = start + begin - row
                shift = next((s for e, s in reversed(shifts) if e <= first), 0)
                rows = entry.positions[:, row : row + end - begin]
                made[:, begin:end] = first + shift + rows
        return made

    # -- spans -------------------------------------------------------------------------------------

    def spans_in(self, ids: Seq[int], start: int) -> list[tuple[int, int]]:
        """Return the bidirectional spans that have tokens in ``ids``, as ranges of indices in the
        sequence; ``start``: its tokens before ``ids``.
        """
        found = []
        for begin, end, entry, row in self.runs_in(ids):
            first = start + begin - row
            for a, b in entry.spans:
                if a < row + (end - begin) and b > row:
                    found.append((first + a, first + b))
        return found

    def run_length(self, ids: Seq[int]) -> int:
        """Return how many of ``ids`` to put in one run, so that it does not end inside a
        bidirectional span.

        If ``ids`` end inside a span, this is the number of ids before the span; if they begin with
        it, the span's whole length, which is more than ``len(ids)``.
        """
        n = len(ids)
        if self.any_in(ids):
            for first, end in self.spans_in(ids, 0):
                if first < n < end:
                    return first if first > 0 else end
        return n

    def truncation_length(self, ids: Seq[int], n: int) -> int:
        """Return the largest length up to ``n`` to which ``ids`` can be truncated without cutting a
        picture.
        """
        if not 0 < n < len(ids) or ids[n] < self.first_id:
            return n
        row = ids[n] & (MOST_ROWS - 1)
        return n - row if ids[max(n - row, 0)] == ids[n] - row else n

    # -- files -------------------------------------------------------------------------------------

    def portable(self, ids: Seq[int]) -> bytes:
        """Return ``ids`` as bytes for digests that outlive the process: a text token's id as i32;
        for a row of media, the content's digest and the row.
        """
        if not self.any_in(ids):
            return array("i", ids).tobytes()
        return b"".join(
            self.entry_of(id).digest + (id & (MOST_ROWS - 1)).to_bytes(4, "little")
            if id >= self.first_id
            else id.to_bytes(4, "little")
            for id in ids
        )

    def describe(self, ids: Seq[int]) -> str:
        """Return the pictures and sounds in ``ids`` as JSON, to be stored beside these ids; "" if
        there are none.
        """
        found = [
            {
                "number": entry.number,
                "digest": entry.digest.hex(),
                "rows": entry.n_rows,
                "advance": entry.advance,
                "spans": entry.spans,
                "positions": None if entry.positions is None else entry.positions.tolist(),
            }
            for entry in self.entries_in(ids)
        ]
        return json.dumps(found) if found else ""

    def restore(self, text: str, ids: Seq[int], tree: PageTree | None = None) -> list[int]:
        """Enter the pictures and sounds that ``text`` describes (JSON from ``describe``), and
        return ``ids`` with their numbers in this process. ``tree``: as in ``enter``. Raises
        ValueError if the text is damaged or does not fit ``ids``.
        """
        try:
            entries = {
                each["number"]: MediaEntry(
                    bytes.fromhex(each["digest"]),
                    each["rows"],
                    _read_positions(each["positions"], each["rows"]),
                    _bounded(each["advance"], MOST_ROWS),
                    tuple(_read_span(span, each["rows"]) for span in each["spans"]),
                )
                for each in (json.loads(text) if text else [])
            }
        except (KeyError, TypeError, RecursionError, TreadleError) as error:
            raise ValueError("a list of pictures is damaged") from error
        made = list(ids)
        used: dict[int, MediaEntry] = {}
        for at, id in enumerate(made):
            if id < self.first_id:
                continue
            number = id >> ROW_BITS
            row = id & (MOST_ROWS - 1)
            if number not in entries or row >= entries[number].n_rows:
                raise ValueError(f"token {id} is of no picture in the file")
            entry = used.get(number)
            if entry is None:
                entry = used[number] = self.enter(entries[number], tree)
                if entry.n_rows != entries[number].n_rows:
                    raise ValueError(f"{entry}: the file says {entries[number].n_rows} rows")
            made[at] = entry.ids[row]
        return made


def _bounded(value: int, most: int) -> int:
    """Return ``value`` if it is a whole number from 0 to ``most``, else raise ValueError."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40}: expected 0 to {most}")
    return value


def _read_span(given: list[int], n_rows: int) -> tuple[int, int]:
    """Return a span as (first row, row after the last). Raises ValueError for rows beyond
    ``n_rows``.
    """
    first, end = given
    return _bounded(first, n_rows), _bounded(end, n_rows)


def _read_positions(given: list[list[int]] | None, n_rows: int) -> np.ndarray | None:
    """Return positions as int32 ``[3, n_rows]``, None if not given. Raises ValueError for another
    shape or values out of range.
    """
    if given is None:
        return None
    made = np.array(given, np.int64)
    if made.shape != (3, n_rows) or made.min() < 0 or made.max() >= MOST_ROWS:
        raise ValueError(f"positions of shape {list(made.shape)}: expected [3, {n_rows}]")
    return made.astype(np.int32)
