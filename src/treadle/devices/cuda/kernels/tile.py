"""A tile of a matrix product, computed by a block of threads with matrix instructions.

Weight rows are unpacked to bf16 in shared memory, SPAN values of K at a time, rows of x are copied
next to them, and each warp multiplies its part of both. There are two stages: while one is
multiplied, the other is filled. bf16 has f32's range, so no scale underflows and no activation
overflows; rounded values have 8 bits (f16's would have 11, but fewer for scales below 6e-5).

Activations in f32 (for weights in f32 and f16) are split into two bf16 each, and so are the
weights: the high part and the remainder. Three products of these give 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import add

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.weights import (
    FLOATS,
    SPAN,
    CodeRun,
    four_floats,
    read_floats,
    read_runs,
)
from treadle.formats import Format
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32, u16, u32
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.run_state import round_up

PIECE = 16  # bytes of one copy
DEEP = 16  # values of K in a matrix instruction
WARPS = 4
THREADS = 32 * WARPS


@dataclass(frozen=True)
class CudaTileShape:
    """A tile of ``rows`` weight rows by ``tokens``.

    A thread unpacks one row's SPAN, so with fewer rows the threads cover more of K: ``parts`` of
    SPAN values, whose sums are added at the end.
    """

    rows: int
    tokens: int
    planes: int  # bf16 values that a number is split into: 1 or 2

    @property
    def parts(self) -> int:
        return THREADS // self.rows

    @property
    def pitch(self) -> int:
        """Bytes between rows in shared memory: 16 more than a power of two, so that eight rows lie
        in different banks.
        """
        return 2 * SPAN * self.parts + PIECE

    @property
    def w_bytes(self) -> int:
        return self.rows * self.pitch

    @property
    def x_bytes(self) -> int:
        return self.tokens * self.pitch

    @property
    def stage(self) -> int:
        return self.planes * (self.w_bytes + self.x_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for two stages, or for the sums of all parts, which reuse them."""
        return max(2 * self.stage, 4 * self.rows * self.tokens * self.parts)

    @property
    def warps(self) -> tuple[int, int]:
        """Number of warps along the rows and along the tokens."""
        return {1: (2, 2), 2: (2, 1), 4: (1, 1)}[self.parts]


class BlockTile:
    """Builds the code of one tile: ``row_of(r)`` returns the address of its r-th weight row,
    ``x_of(t)`` that of the activations of its t-th token. ``n_values``: values in a row, K.
    """

    def __init__(
        self,
        k: Builder,
        shape: CudaTileShape,
        fmt: Format,
        n_values: int,
        row_of: Callable[[Val], BlockAddress],
        x_of: Callable[[Val], Val],
    ) -> None:
        assert k.isa.simt is not None, k.isa.name
        self.k = k
        self.simt = k.isa.simt
        self.shape = shape
        self.fmt = fmt
        self.n_values = n_values
        self.x_of = x_of
        self.memory = self.simt.shared(k)
        self.tid = self.simt.tid(k)
        self.lane = self.tid % 32
        self.warp = self.tid // 32
        self.own = self.tid % shape.rows
        self.part = self.tid // shape.rows
        self.at = row_of(self.own)
        wm, wn = shape.warps
        place = self.warp % (wm * wn)
        self.n_m = shape.rows // (16 * wm)
        self.n_n = shape.tokens // (8 * wn)
        self.first_row = place % wm * 16
        self.row_step = 16 * wm  # warps alternate over groups of 16 rows
        self.first_token = place // wm * (8 * self.n_n)
        self.sums = [
            [[k.var(k.const(0.0, f32)) for _ in range(4)] for _ in range(self.n_n)]
            for _ in range(self.n_m)
        ]
        self._multiply()

    # -- the loop over K --------------------------------------------------------------------------

    def _multiply(self) -> None:
        k = self.k
        shape = self.shape
        step = SPAN * shape.parts
        # A thread takes part of a large block, known at build time; a period of steps covers all.
        period = max(1, self.fmt.block // step)
        full, rest = divmod(self.n_values, step)
        self.simt.barrier(k)  # the previous tile no longer reads shared memory
        if full:
            self._copy(k.i64(0), k.i64(0), step)
            self._unpack(k.i64(0), k.i64(0), 0)
            with k.loop(full // period) as c:
                for p in range(period):
                    self._step(c * period + p, (p + 1) % period, full, period)
            self.simt.wait(k, 0)  # for the last step's copy, which is unused
        if rest:
            self._wait_and_sync()
            self._copy(k.i64(0), k.i64(full), rest)
            whole, few = divmod(rest, SPAN)
            if whole:
                with k.if_(self.part < whole):
                    self._unpack(k.i64(0), k.i64(full), 0)
            if few:
                with k.if_(self.part.eq(whole)):
                    self._store(k.i64(0), self._read(k.i64(full), 0, few))
            self._wait_and_sync()
            if whole:
                with k.if_(self.part < whole):
                    self._dot(k.i64(0), SPAN)
            if few:
                with k.if_(self.part.eq(whole)):
                    self._dot(k.i64(0), few)

    def _step(self, s: Val, next_part: int, full: int, period: int) -> None:
        """Emit: multiply the stage of step ``s`` of K, and fill the other stage for the next step.

        ``next_part``: the part of a large block that the next step has. ``full``: number of steps;
        ``period``: steps in a large block, else 1. After the last step, the other stage is filled
        with values that nothing uses.
        """
        k = self.k
        shape = self.shape
        stage = s % 2 * shape.stage
        other = shape.stage - stage
        after = k.min(s + 1, full - period + next_part)
        self._wait_and_sync()
        self._copy(other, after, SPAN * shape.parts)
        if shape.parts > 1:
            self._unpack(other, after, next_part)
            self._dot(stage, SPAN)
        else:  # loads, then products, then the stores that need the loaded values
            read = self._read(after, next_part, SPAN)
            self._dot(stage, SPAN)
            self._store(other, read)

    def _wait_and_sync(self) -> None:
        """Emit: wait until every thread's copies and stores are visible to all."""
        self.simt.wait(self.k, 0)
        self.simt.barrier(self.k)

    # -- a stage ----------------------------------------------------------------------------------

    def _copy(self, stage: Val, s: Val, n: int) -> None:
        """Emit: copy the first ``n`` values of x in step ``s``, of each token, to the stage as
        bf16. Past K, x has zeros. ``stage``: offset in shared memory.
        """
        k = self.k
        shape = self.shape
        each = round_up(n, DEEP) // FLOATS
        to = self.memory + stage + shape.planes * shape.w_bytes
        first = s * (SPAN * shape.parts)
        with k.loop(shape.tokens * each, start=self.tid, step=THREADS) as i:
            token = i // each
            piece = i % each
            place = to + token * shape.pitch + piece * PIECE
            if shape.planes == 1:
                frm = self.x_of(token) + (first + piece * FLOATS) * 2
                self.simt.copy_async(k, place, frm, PIECE)
            else:
                frm = self.x_of(token) + (first + piece * FLOATS) * 4
                fours = [k.load(frm, f32 * 4, offset=16 * j, align=16) for j in range(2)]
                self._put(place, shape.x_bytes, [k.extract(v, j) for v in fours for j in range(4)])
        self.simt.commit(k)

    def _unpack(self, stage: Val, s: Val, part: int) -> None:
        """Emit: unpack this thread's weights of step ``s`` into the stage.

        ``part``: the part of a large block that the step has; ignored where a step has several
        parts, and the thread's position determines it.
        """
        k = self.k
        n = max(1, self.fmt.block // SPAN)
        if self.shape.parts == 1 or n == 1:
            self._store(stage, self._read(s, part, SPAN))
            return
        for own in range(n):
            with k.if_((self.part % n).eq(own)):
                self._store(stage, self._read(s, own, SPAN))

    def _read(self, s: Val, part: int, n: int) -> list[tuple[int, list[Val] | CodeRun]]:
        """Emit the loads of ``n`` weights of step ``s``, in ``part`` of a large block; return runs
        of them, each with the index of its first value within the thread's SPAN. A run is a list of
        f32, or codes with their scale.
        """
        k = self.k
        fmt = self.fmt
        first = s * (SPAN * self.shape.parts) + self.part * SPAN
        if fmt.codes is None:
            at = self.at.block(first)
            return [  # empty runs pad to a multiple of DEEP
                (i, read_floats(k, at.block(i), self.n_values, min(FLOATS, n - i)) if i < n else [])
                for i in range(0, round_up(n, DEEP), FLOATS)
            ]
        if fmt.block > SPAN:
            block = self.at.block(first // fmt.block)
            runs = read_runs(k, block, fmt.block)
        else:
            runs = read_runs(k, self.at.block(first // fmt.block), n)
        mine = range(part * SPAN, part * SPAN + n)
        return [(run.fours[0][0] - mine[0], run) for run in runs if run.fours[0][0] in mine]

    def _store(self, stage: Val, read: list[tuple[int, list[Val] | CodeRun]]) -> None:
        k = self.k
        shape = self.shape
        to = self.memory + stage + self.own * shape.pitch + self.part * (2 * SPAN)
        for first, run in read:
            values = run if isinstance(run, list) else self._weights(run)
            missing = -len(values) % FLOATS or FLOATS * (not values)
            values = values + [k.const(0.0, f32)] * missing
            for i in range(0, len(values), FLOATS):
                self._put(to + 2 * (first + i), shape.w_bytes, values[i : i + FLOATS])

    def _weights(self, run: CodeRun) -> list[Val]:
        k = self.k
        codes = self.fmt.codes
        assert codes is not None
        whole = [v for _, word in run.fours for v in four_floats(k, word, codes.offset)]
        if run.minimum is None:
            return [v * run.scale for v in whole]
        return [k.fma(v, run.scale, run.minimum) for v in whole]

    def _put(self, to: Val, plane: int, values: list[Val]) -> None:
        """Emit: store FLOATS values as bf16 at ``to``; with two planes, also their remainders
        ``plane`` bytes further on.
        """
        k = self.k
        v = k.zero(f32 * FLOATS)
        for i, value in enumerate(values):
            v = k.insert(v, value, i)
        for i in range(self.shape.planes):
            half = k.isa.narrow_bf16(k, v)
            k.store(to, half.bits(i32 * 4), offset=i * plane, align=PIECE)
            v = v - (half.bits(u16 * FLOATS).to(u32) << 16).bits(v.ty)

    # -- products ---------------------------------------------------------------------------------

    def _dot(self, stage: Val, n: int) -> None:
        """Emit: add the products of the first ``n`` values of this warp's part of K, in the stage
        at the offset ``stage`` of shared memory, to its sums.
        """
        k = self.k
        shape = self.shape
        simt = self.simt
        lane = self.lane
        here = self.memory + stage + self.part * (2 * SPAN)
        w = here + (self.first_row + lane % 16) * shape.pitch + lane // 16 * PIECE
        x = here + (shape.planes * shape.w_bytes) + lane // 8 % 2 * PIECE
        x = x + (self.first_token + lane % 8 + lane // 16 * 8) * shape.pitch
        pairs = [(0, 0), (1, 0), (0, 1)][: 1 if shape.planes == 1 else 3]
        for kk in range(-(-n // DEEP)):
            a = [
                [
                    simt.load_matrix(
                        k, w + (p * shape.w_bytes + i * self.row_step * shape.pitch + kk * 32)
                    )
                    for i in range(self.n_m)
                ]
                for p in range(shape.planes)
            ]
            b: list[list[list[Val]]] = []
            for p in range(shape.planes):
                b.append([])
                for j in range(0, self.n_n, 2):
                    both = simt.load_matrix(
                        k, x + (p * shape.x_bytes + 8 * j * shape.pitch + kk * 32)
                    )
                    b[p] += [both[:2], both[2:]]
            for i in range(self.n_m):
                for j in range(self.n_n):
                    c = self.sums[i][j]
                    for of_w, of_x in pairs:
                        made = simt.mma_bf16(k, [v.v for v in c], a[of_w][i], b[of_x][j])
                        for v, new in zip(c, made, strict=True):
                            v.v = new

    def results(self) -> Iterator[tuple[Val, Val, Val]]:
        """Yield row and token, as indices in the tile, and the sum of each result that this thread
        writes.
        """
        if self.shape.parts == 1:
            for i in range(self.n_m):
                yield from self.sixteen(i)
            return
        for row, token, (total,) in self._totals(1):
            yield row, token, total

    def pairs(self) -> Iterator[tuple[Val, Val, Val, Val]]:
        """Yield row and token, as indices in the tile, and two sums: of this row, and of the row at
        the same index in the tile's second half.
        """
        if self.shape.parts == 1:
            half = self.n_m // 2
            for i in range(half):
                both = zip(self.sixteen(i), self.sixteen(i + half), strict=True)
                for (row, token, first), (_, _, second) in both:
                    yield row, token, first, second
            return
        for row, token, (first, second) in self._totals(2):
            yield row, token, first, second

    def _totals(self, times: int) -> Iterator[tuple[Val, Val, list[Val]]]:
        """Yield row, token, and sums over all parts.

        The tile's rows are divided into ``times`` equal shares; ``row`` is an index within a share,
        and the sums are those of this row in each share.
        """
        k = self.k
        shape = self.shape
        self.simt.barrier(k)  # no thread reads the stages any more
        at = self.memory + self.part * (4 * shape.rows * shape.tokens)
        n = shape.rows // times
        for i in range(self.n_m):
            for row, token, v in self.sixteen(i):
                k.store(at, v, offset=(token * shape.rows + row) * 4, align=4)
        self.simt.barrier(k)
        for first in range(0, n * shape.tokens, THREADS):
            place = self.tid + first
            row = place % n
            token = place // n
            here = self.memory + (token * shape.rows + row) * 4
            totals = []
            for share in range(times):
                some = [
                    k.load(
                        here, f32, offset=4 * (p * shape.rows * shape.tokens + share * n), align=4
                    )
                    for p in range(shape.parts)
                ]
                totals.append(reduce(add, some))
            yield row, token, totals

    def sixteen(self, i: int) -> Iterator[tuple[Val, Val, Val]]:
        """Yield row and token, as indices in the tile, and this thread's sums in the warp's i-th
        group of 16 rows.
        """
        g = self.lane // 4
        t = self.lane % 4
        for j, four in enumerate(self.sums[i]):
            for r, v in enumerate(four):
                row = self.first_row + g + (i * self.row_step + 8 * (r // 2))
                token = self.first_token + t * 2 + (8 * j + r % 2)
                yield row, token, v.v
