"""Few tokens: products of rows in strips of 16, in file order.

Packing a panel of many rows (``gemm.py``) reorders it, which takes as long as multiplying it by a
few tokens. Here nothing is reordered: tokens, which ``ActivationLayout`` interleaves, are the lanes
of a row's sums, one vector or two. Subclasses compute the sums of a strip's rows: of bytes that are
unpacked first (``byte_strips.py``), or of floats as they are in the file (``vector_floats.py``). An
item's rows are RUNS runs, each a memory stream (``matrix.RUNS``); a strip has the next EACH rows of
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Operand, Val, Var
from treadle.jit.types import Ty, f32, i32
from treadle.kernels.activation_layout import BLOCK, DWORD, block_sums
from treadle.kernels.format_blocks import BlockAddress, WeightRows
from treadle.kernels.matmul.epilogue import Epilogue, Sums
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.matmul import Segment, StripShare, n_strips, pick_segment, shares
from treadle.kernels.matmul.matrix import RUNS, SIDE
from treadle.kernels.spec import Frame
from treadle.kernels.transpose import transpose

EACH = SIDE // RUNS  # rows of a run in a strip


@dataclass(frozen=True)
class StripGemm(Gemm):
    """Base of the strip products; ``mr * lanes`` is a multiple of 16. A strip is multiplied by
    ``groups`` groups of nr tokens while it is in the cache.
    """

    groups: int = 1

    @property
    def per_scale(self) -> int:
        """Values of K that share a scale, which one product covers; 0 for formats
        without scales.
        """
        return 0

    @property
    def n_products(self) -> int:
        """Number of products that make a row's result, each over the ``per_scale`` values of K that
        share a scale; 0 for formats without scales.
        """
        return 0

    @property
    def has_m(self) -> bool:
        """Whether the weights have minimums."""
        return False

    @property
    def strip_bytes(self) -> int:
        """Bytes of scratch for an unpacked strip."""
        return 0

    @property
    def line(self) -> int:
        """Bytes of one line of scratch: a dword (or an f32) for each of ``nr`` tokens."""
        return DWORD * self.nr

    @property
    def unscaled_bytes(self) -> int:
        """Bytes of scratch for products that are not scaled yet."""
        return 0

    @property
    def n_held(self) -> int:
        """Number of strips in scratch: with two, the next is unpacked while one is multiplied."""
        return 1

    def scratch(self, lanes: int) -> int:
        """Return the bytes for strips, unscaled products, the sums of all rows, and the sums of the
        tokens' values.
        """
        n_lines = self.groups * (self.rows_per_item(lanes) + self.n_products * self.has_m)
        return self.n_held * self.strip_bytes + self.unscaled_bytes + n_lines * self.line

    def begin(self, k: Builder, made: Val) -> None:
        """Emit code that runs before all products of a call. ``made``: the scratch of
        ``unscaled_bytes``.
        """

    def end(self, k: Builder) -> None:
        """Emit code that runs after all products of a call."""

    def unpack(self, k: Builder, strip: Strip) -> None:
        """Unpack a strip's rows to its place ``strip.held`` in scratch."""

    def sums(
        self, k: Builder, strip: Strip, tokens: Tokens, made: Val, soon: Strip
    ) -> Iterator[tuple[Val | int, Var]]:
        """Yield each row of ``strip`` (its number of 16) with its sums: f32 ``[nr]``, a lane a
        token, or the first half if only so many tokens are left. If two strips are in scratch, the
        next one, ``soon``, is unpacked meanwhile.
        """
        raise NotImplementedError

    def in_lanes(
        self,
        k: Builder,
        tokens: Tokens,
        sums: Callable[[int], Iterator[tuple[Val | int, Var]]],
    ) -> Iterator[tuple[Val | int, Var]]:
        """Yield what ``sums(n)`` yields, code for n tokens: n is ``nr``, or, if there are several
        groups and at run time this one has no more tokens, half of it.
        """
        if self.groups == 1:
            yield from sums(self.nr)
            return
        half = self.nr // 2
        with k.if_else(tokens.stop - tokens.first > half) as (many, few):
            for n, branch in ((self.nr, many), (half, few)):
                with branch:
                    yield from sums(n)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        rows = self.rows_per_item(isa.lanes)
        share_of = shares(k, frame, self, lambda: n_strips(k, frame, self, rows))
        size = self.strip_bytes
        strips = frame.scratch
        made = frame.scratch + self.n_held * size
        sums = made + self.unscaled_bytes
        sums_bytes = rows * self.line  # bytes of a group
        totals = sums + self.groups * sums_bytes

        def begin(item: Val) -> tuple[StripShare, Segment, Strip]:
            share = share_of(item)
            seg = pick_segment(k, frame, self, share.strip, rows, share.expert)
            left = seg.rows.m - seg.rows.first
            n = k.min((left + (SIDE - 1)) // SIDE, rows // SIDE)
            return share, seg, Strip(seg.rows, n, k.i64(0), strips)

        self.begin(k, made)
        if self.n_held > 1:
            _, _, first = begin(frame.begin)
            self.unpack(k, first)
        full = k.var(k.i64(0))  # number of the unpacked strip
        with k.loop(frame.end, start=frame.begin) as item:
            share, seg, first = begin(item)
            _, _, last = begin(k.min(item + 1, frame.end - 1))
            n = first.n
            step = self.groups * self.nr
            with k.loop(share.stop, start=share.start, step=step) as token:
                met = Tokens(k, self, frame.x, token, share.stop, totals)
                met.prepare()
                then = last.replaced_if(k, token + step < share.stop, first)
                with k.loop(n) as s:
                    here = Strip(seg.rows, n, s, strips + full.v * size)
                    if self.n_held > 1:
                        full.v = k.i64(1) - full.v
                    else:
                        self.unpack(k, here)
                    soon = then.replaced_if(k, s + 1 < n, Strip(seg.rows, n, s + 1, strips))
                    soon.held = strips + full.v * size
                    for g, tokens in met.loop_groups():
                        for r, total in self.sums(k, here, tokens, made, soon):
                            row = here.row(r // EACH, r % EACH)
                            _store_sums(
                                k, sums + (g * sums_bytes + row * self.line), total.v, self.nr
                            )
                for g, tokens in met.loop_groups():
                    out = Epilogue(k, self, frame, seg, tokens.first)
                    with k.loop(n) as s:
                        place = sums + (g * sums_bytes + s * (SIDE * self.line))
                        out.store(_columns(k, place, self.nr), s * SIDE, False, add=False)
        self.end(k)


def _store_sums(k: Builder, at: Val, sums: Val, n: int) -> None:
    """Store a row's sums at ``at``, f32 ``[n]``; lanes that ``sums`` lacks become zeros."""
    for i in range(0, n, sums.ty.lanes):
        k.store(at, k.zero(sums.ty) if i else sums, offset=4 * i, align=sums.ty.n_bytes)


def _columns(k: Builder, sums: Val, n: int) -> Sums:
    """Transpose the sums f32 ``[16, n]`` of 16 rows: yield (first row, token, vector of rows), as
    ``Epilogue.store`` takes them.
    """
    held = [k.load(sums, i32 * n, offset=r * 4 * n, align=4 * n) for r in range(SIDE)]
    for i, column in enumerate(transpose(k, held, k.isa.lanes)):
        for j, v in enumerate(column):
            yield v.ty.lanes * j, i, v.bits(f32 * v.ty.lanes)


@dataclass
class Strip:
    """The ``s``-th of an item's ``n`` strips: EACH rows of each of RUNS runs. ``held``: address in
    scratch of the unpacked rows.
    """

    rows: WeightRows
    n: Val
    s: Val
    held: Val

    def row(self, run: Val | int, r: Operand) -> Val:
        """Return the number, in the item, of the ``r``-th row of run ``run`` in this strip."""
        return self.n * (run * EACH) + self.s * EACH + r

    def weights(self, k: Builder, run: Val | int, r: Val) -> BlockAddress:
        """Return the address of the weights of the ``r``-th row of run ``run`` in this strip."""
        return self.rows.row(k, self.row(run, r))

    def replaced_if(self, k: Builder, holds: Val, other: Strip) -> Strip:
        """Return ``other`` if ``holds`` is true at run time, else this strip; ``held`` is this
        strip's.
        """
        mine, its = ([*each.rows.values, each.n, each.s] for each in (self, other))
        *rows, n, s = (k.select(holds, b, a) for a, b in zip(mine, its, strict=True))
        return Strip(self.rows.with_values(rows), n, s, self.held)


class Tokens:
    """Tokens of an item that a strip is multiplied by, ``first`` to before ``stop``, in groups of
    ``spec.nr``. ``x``: address of all activations (``spec.layout()``); ``room``: address of memory
    for the sums of the values that share a minimum.
    """

    def __init__(
        self, k: Builder, spec: StripGemm, x: Val, first: Val, stop: Val, room: Val
    ) -> None:
        self.k = k
        self.spec = spec
        self.x_all = x
        self.first = first
        self.stop = stop
        self.act = spec.layout()
        self.room = room
        self.line = spec.line
        self.x = x + first // spec.nr * self.act.group_bytes

    def loop_groups(self) -> Iterator[tuple[Val, Tokens]]:
        """Loop over the groups: yield each one's number and its Tokens."""
        k = self.k
        nr = self.spec.nr
        n = self.spec.groups
        if n == 1:
            yield k.i64(0), self
            return
        left = k.min(self.stop - self.first, k.i64(n * nr))
        with k.loop((left + (nr - 1)) // nr) as g:
            room = self.room + g * (self.spec.n_products * self.line)
            yield g, Tokens(k, self.spec, self.x_all, self.first + g * nr, self.stop, room)

    def prepare(self) -> None:
        """Compute the sums of the tokens' values that share a minimum, if the format
        has minimums.
        """
        if self.spec.has_m:
            for _, group in self.loop_groups():
                with self.k.loop(self.spec.n_products) as at:
                    sums = block_sums(self.k, group.comp(at), group.scales(at))
                    self.k.store(group.room + at * self.line, sums, align=self.line)

    def _load(self, at: Val, ty: Ty, off: int, n: int) -> Val:
        """Load one value of type ``ty`` for each of the first ``n`` tokens, or for all nr if ``n``
        is 0, from ``off`` bytes after the address ``at``.
        """
        n = n or self.spec.nr
        return self.k.load(at, ty * n, offset=off, align=4 * n)

    def dwords(self, at: Val, n: int = 0) -> Val:
        """Return the ``at``-th dword of the tokens' values, i32, a lane a token. ``n``: as in
        ``_load``.
        """
        return self._load(self.x + at * self.line, i32, 0, n)

    def comp(self, at: Val, n: int = 0) -> Val:
        """Return the tokens' compensations for the ``at``-th product, i32, a lane a token."""
        return self._load(self.x + at * self.line, i32, self.act.comp_off, n)

    def scales(self, at: Val, n: int = 0) -> Val:
        """Return the tokens' scales for the ``at``-th product, f32, a lane a token."""
        place = self.x + at // (BLOCK // self.spec.per_scale) * self.line
        return self._load(place, f32, self.act.d_off, n)

    def sums(self, at: Val, n: int = 0) -> Val:
        """Return the sums of the tokens' values in the ``at``-th product, f32, a lane a token."""
        return self._load(self.room + at * self.line, f32, 0, n)
