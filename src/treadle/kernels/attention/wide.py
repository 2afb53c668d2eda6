"""Base of attention tiles with many rows of queries (``matrix_tile.py``, ``int16_tile.py``).

The keys and values of a span of pages are converted once into the layout of the products, and used
by all rows of an item. Results (O) are kept in scratch, which the second-level cache holds. Scores
are computed for a block of ROWS rows at a time, and processed in groups of ``group_rows`` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, f32, i32
from treadle.kernels.attention.work_item import SPAN, AttentionItem, Queries
from treadle.kernels.reduce import reduce_all
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Frame

KEYS = SPAN * PAGE  # keys of a span
ROWS = 32  # rows with scores at a time
TALL = 8  # rows whose maxima are found together with 32 registers; half of them with 16
DIMS = 32  # dims of a query or of a result that are copied at a time, if that divides them


class WideTile(AttentionItem):
    """Base of the wide tiles. ``o``, ``m`` and ``total``: addresses of all rows' results O, f32
    ``[rows, pitch]``, and of their m and l (``paged.py``), f32 ``[rows]``.
    """

    places: ClassVar[Any]  # class of the offsets in scratch: ``MatrixScratch`` or ``Int16Scratch``
    divisor: ClassVar[int] = DIMS  # dims of queries and of values are multiples of this

    def __init__(
        self, k: Builder, isa: Isa, spec: Queries, frame: Frame, item: Val, group: Val
    ) -> None:
        super().__init__(k, isa, spec, frame, item, group)
        assert spec.head_dim % self.divisor == spec.dims_v % self.divisor == 0, spec.name
        self.scratch, self.at = frame.scratch, self.places.for_spec(spec)
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
                _, last_key = self.visible_keys(k.min(block * ROWS + (ROWS - 1), self.n_rows - 1))
                n_seen = k.min(last_key // PAGE + 1 - first, n_pages)
                with k.if_(n_seen > 0):
                    with k.loop(n_seen) as i:
                        self._scores(block, i)
                    self._softmax(block, first * PAGE)
                    self._values(block, n_seen)
        self._store()

    @property
    def step(self) -> int:
        """Dims of a query, or of a result, that one vector operation copies."""
        dims = self.spec.head_dim, self.spec.dims_v
        return self.divisor if any(n % DIMS for n in dims) else DIMS

    @property
    def pitch(self) -> int:
        """f32 values from one row of ``o`` to the next."""
        return self.spec.dims_v

    def _load_queries(self) -> None:
        """Load the item's queries into scratch, zero O, and initialise m and l."""
        raise NotImplementedError

    def _load_page(self, p: Val, i: Val) -> None:
        """Convert the keys and values of the sequence's ``p``-th page, as the ``i``-th of the span.
        Values past the last key become zeros: their memory is undefined.
        """
        raise NotImplementedError

    def _scores(self, block: Val, i: Val) -> None:
        """Compute S of the ``block``-th ROWS rows and the keys of the span's ``i``-th page."""
        raise NotImplementedError

    def _softmax(self, block: Val, first_key: Val) -> None:
        """Replace S by P = 2**(S - m') for the rows of a block, and update m and l. ``first_key``:
        position of the span's first key. Each group of rows is masked, its maxima found together
        (``_shift``), then each row weighed (``_weigh``).
        """
        with self.k.loop(self._groups(block)) as g:
            first = block * ROWS + g * self.group_rows
            row = self.scratch + self.at.scores + g * (self.group_rows * KEYS * 4)
            with self.k.loop(self.group_rows) as r:
                if self.spec.softcap:
                    self._cap(row + r * (KEYS * 4), first + r)
                self._hide(row + r * (KEYS * 4), first + r, first_key)
            self._shift(row, first, g * self.group_rows)
            with self.k.loop(self.group_rows) as r:
                self._weigh(row + r * (KEYS * 4), first + r, g * self.group_rows + r)

    def _weigh(self, row: Val, at_m: Val, r: Val) -> None:
        """Compute P of the row of scores at address ``row``, and update its l. ``at_m``: the row's
        number in the item; ``r``: its number in the block.
        """
        raise NotImplementedError

    def _values(self, block: Val, n_pages: Val) -> None:
        """Update O = O c + P V for the rows of a block, with the span's first ``n_pages`` pages."""
        raise NotImplementedError

    @property
    def lanes(self) -> int:
        """Lanes of the vectors in which scores are processed."""
        return self.isa.lanes

    @property
    def group_rows(self) -> int:
        """Rows of a group, whose maxima are found together."""
        return TALL if self.isa.regs >= 32 else TALL // 2

    def _groups(self, block: Val) -> Val:
        """Return the number of groups of ``group_rows`` rows in the ``block``-th block."""
        left = self.k.min(self.n_rows - block * ROWS, ROWS)
        return (left + (self.group_rows - 1)) // self.group_rows

    def _shift(self, row: Val, first: Val, r: Val) -> None:
        """Update m of a group's rows together, and store the correction 2**(m - m') of earlier
        sums; row by row, each step would wait for the one before. ``row``: address of the group's
        scores; ``first``: number of the group's first row in the item; ``r``: in the block.
        """
        k = self.k
        at = self.at
        starts = range(0, 4 * KEYS, 4 * self.lanes)
        ty = f32 * self.lanes
        group = f32 * self.group_rows
        tops = [
            tree([k.load(row, ty, offset=i * (4 * KEYS) + c) for c in starts], k.max)
            for i in range(self.group_rows)
        ]
        top = k.split(reduce_all(k, tops, k.max), self.group_rows)[0]
        m = self.m + first * 4
        old = k.load(m, group)
        new = k.max(old, top * self._scale(first, group))
        k.store(m, new)
        k.store(self.scratch + at.less, math.exp2(k, old - new), offset=r * 4)

    def _cap(self, row: Val, r: Val) -> None:
        """Apply the softcap to all scores of row ``r``, at address ``row``, in units of log2(e)."""
        k = self.k
        cap = self.spec.softcap
        ty = f32 * self.lanes
        by = k.splat(self._unit(r, f32) * (1 / cap), ty)
        with k.loop(KEYS, step=self.lanes) as c:
            score = math.tanh(k, k.load(row, ty, offset=c * 4) * by) * (cap * math.LOG2_E)
            k.store(row, score, offset=c * 4)

    def _hide(self, row: Val, r: Val, first_key: Val) -> None:
        """Set the scores of keys that row ``r`` of the item does not see to -infinity. ``row``:
        address of its scores; ``first_key``: position of their first key. Emits a test first: few
        spans have hidden keys.
        """
        k = self.k
        lanes = self.lanes
        first, last = self.visible_keys(r)
        hides = (first > first_key) | (last < first_key + (KEYS - 1))
        with k.if_(hides), k.loop(KEYS, step=lanes) as c:
            iota = k.const(range(lanes), i32 * lanes)
            position = iota + k.splat((first_key + c).to(i32), iota.ty)
            low, high = (k.splat(v.to(i32), iota.ty) for v in (first, last))
            score = k.load(row, f32 * lanes, offset=c * 4)
            seen = (position >= low) & (position <= high)
            k.store(row, k.select(seen, score, k.const(float("-inf"), score.ty)), offset=c * 4)

    def _number(self, place: int, r: Val) -> Val:
        """Load the f32 of row ``r`` from the array at byte offset ``place`` in scratch."""
        return self.k.load(self.scratch + place, f32, offset=r * 4)

    def _unit(self, r: Val, ty: Ty) -> Val:
        """Return the factors, of type ``ty``, that turn the raw products of the rows from ``r`` on
        into scores.
        """
        return self.k.const(1.0, ty)

    def _scale(self, r: Val, ty: Ty) -> Val:
        """Return the factors, of type ``ty``, that turn the stored scores of the rows from ``r`` on
        into scores in units of log2(e): 1 if the softcap has applied them already.
        """
        return self.k.const(1.0, ty) if self.spec.softcap else self._unit(r, ty)

    def row(self, r: Val) -> tuple[Val, Val]:
        """Return row ``r``'s token in the item, and its head in the group."""
        return r // self.spec.heads, r % self.spec.heads

    def visible_keys(self, r: Val) -> tuple[Val, Val]:
        """Return the positions of the first and of the last key that row ``r`` sees."""
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
        """Write the rows' results O / l; if the item is a part of a split history, O, m and l to
        ``partials``.
        """
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
    """Reduce ``values`` to one by ``op``, in a balanced tree."""
    level = list(values)
    while len(level) > 1:
        rest = level[len(level) & ~1 :]
        level = [op(a, b) for a, b in zip(level[:-1:2], level[1::2], strict=False)] + rest
    return level[0]
