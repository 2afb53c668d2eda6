"""Base of attention tiles with many rows of queries (``matrix_tile.py``, ``int16_tile.py``).

A page's keys and values are converted once into the form that products need, for all rows of an
item, whose results are in the second-level cache. Scores are computed for ROWS rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.attention.records import PAGE
from treadle.kernels.attention.work_item import SPAN, AttentionItem, Queries
from treadle.kernels.spec import Frame

KEYS = SPAN * PAGE  # keys of a span
ROWS = 32  # rows with scores at a time
DIMS = 32  # dims of a query or of a result that are copied at a time, if that divides them


class WideTile(AttentionItem):
    """Base tile. ``o``, ``m`` and ``total``: addresses of the rows' results, f32 ``[rows,
    dims_v]``, and of their m and l, f32 ``[rows]`` (``paged.py``).
    """

    places: ClassVar[Any]  # ``places.of(spec)``: offsets in scratch, of these and others
    divisor: ClassVar[int] = DIMS  # of the dims of queries and of values

    def __init__(
        self, k: Builder, isa: Isa, spec: Queries, frame: Frame, item: Val, group: Val
    ) -> None:
        super().__init__(k, isa, spec, frame, item, group)
        assert spec.head_dim % self.divisor == spec.dims_v % self.divisor == 0, spec.name
        self.scratch, self.at = frame.scratch, self.places.of(spec)
        self.o, self.m, self.total = (
            self.scratch + place for place in (self.at.o, self.at.m, self.at.total)
        )
        self.n_rows = self.item["n_tokens"] * spec.heads

    def run(self) -> None:
        k = self.k
        self._load_queries()
        begin = self.item["key_begin"]
        end = self.item["key_end"]
        last = (end + (PAGE - 1)) // PAGE
        with k.loop(last, start=begin // PAGE, step=SPAN) as first:
            n_pages = k.min(last - first, SPAN)
            with k.loop(n_pages) as i:
                self._load_page(first + i, i)
            with k.loop((self.n_rows + (ROWS - 1)) // ROWS) as block:
                _, last_key = self.seen(k.min(block * ROWS + (ROWS - 1), self.n_rows - 1))
                n_seen = k.min(last_key // PAGE + 1 - first, n_pages)
                with k.if_(n_seen > 0):
                    with k.loop(n_seen) as i:
                        self._scores(block, i)
                    self._softmax(block, first * PAGE)
                    self._values(block, n_seen)
        self._store()

    @property
    def step(self) -> int:
        """Dims of a query or of a result that are copied at a time."""
        dims = self.spec.head_dim, self.spec.dims_v
        return self.divisor if any(n % DIMS for n in dims) else DIMS

    @property
    def pitch(self) -> int:
        """Values from one row of ``o`` to the next."""
        return self.spec.dims_v

    def _load_queries(self) -> None:
        """Load the item's queries, and clear its results."""
        raise NotImplementedError

    def _load_page(self, p: Val, i: Val) -> None:
        """Load the p-th page's keys and values as the span's i-th. Values past the last key are
        zeros: their memory is undefined.
        """
        raise NotImplementedError

    def _scores(self, block: Val, i: Val) -> None:
        """S of a block's rows and the keys of the span's i-th page."""
        raise NotImplementedError

    def _softmax(self, block: Val, first_key: Val) -> None:
        """P = 2**(S - m') of a block's rows; update m and l."""
        raise NotImplementedError

    def _values(self, block: Val, n_pages: Val) -> None:
        """O = O c + P V."""
        raise NotImplementedError

    def row(self, r: Val) -> tuple[Val, Val]:
        """Return row r's token and head."""
        return r // self.spec.heads, r % self.spec.heads

    def seen(self, r: Val) -> tuple[Val, Val]:
        """Return the first key that row r sees, and the last."""
        k = self.k
        item = self.item
        window = self.spec.window
        here = item["position"] + self.token(self.row(r)[0])
        first = item["key_begin"]
        last = item["key_end"] - 1
        if window:
            first = k.max(first, here - (window - 1))
        if self.spec.causal or window:
            last = k.min(self.last_seen(here) if self.spec.causal else here + (window - 1), last)
        return first, last

    def _store(self) -> None:
        """Store the results, or the partial ones."""
        k = self.k
        dims = self.spec.dims_v
        with k.loop(self.n_rows) as r:
            m, total = (k.load(p, f32, offset=r * 4) for p in (self.m, self.total))
            whole = self.item["partial"] < 0
            factor = k.splat(k.select(whole, 1.0 / total, k.const(1.0, f32)), f32 * self.step)
            to = self.result(*self.row(r))
            with k.if_else(whole) as (yes, no):
                with yes:
                    self._copy(r, to, factor)
                with no:
                    to = self.partial(r)
                    self._copy(r, to, factor)
                    k.store(to, m, offset=4 * dims)
                    k.store(to, total, offset=4 * dims + 4)

    def _copy(self, r: Val, to: Val, factor: Val) -> None:
        k = self.k
        dims = self.spec.dims_v
        with k.loop(dims, step=self.step) as d:
            o = k.load(self.o + (r * self.pitch + d) * 4, factor.ty)
            k.store(to, o * factor, offset=d * 4)


def tree(values: Sequence[Val], op: Callable[[Val, Val], Val]) -> Val:
    """Reduce all values by ``op``, elementwise, as a tree."""
    level = list(values)
    while len(level) > 1:
        rest = level[len(level) & ~1 :]
        level = [op(a, b) for a, b in zip(level[:-1:2], level[1::2], strict=False)] + rest
    return level[0]
