"""GPU gemv: a group of a warp's lanes multiplies each row; a lane takes one unit of weights
(``weights.py``) at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.weights import (
    FLOATS,
    SPAN,
    four_floats,
    read_floats,
    read_runs,
    unit_of,
)
from treadle.devices.cuda.launch_args import PerBlock
from treadle.formats import Format
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul, pick_segment
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.plan.plan import Plan, Step

WARPS = 4
# Rows that share each load of x, and the block size from which registers hold only one row.
TOGETHER = 2
LARGE_BLOCK = 256


@dataclass(frozen=True)
class SimtGemv(PerBlock, Gemv):
    """GPU kernel of ``Gemv``: each group of lanes multiplies ``mr`` rows; activations are f32 for
    all weight formats.

    A group is a warp, or part of it where rows have fewer units than lanes. Lane i of n takes the
    units i, i + n and so on; then the lanes' sums are added in a tree.
    """

    op: ClassVar[str] = "simt_gemv"

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def unit(self) -> int:
        """Weights that a lane processes at once."""
        return unit_of(self.fmt, self.k)

    @property
    def group(self) -> int:
        """Lanes that share a row."""
        n = 1
        while n < 32 and n * self.unit < self.k:
            n *= 2
        return n

    def rows_per_item(self, lanes: int) -> int:
        return self.threads // self.group * self.mr

    def _multiply(
        self,
        k: Builder,
        frame: Frame,
        tokens: list[Val],
        begin: Val,
        end: Val,
        expert: Val | None = None,
        into: list[Val] | None = None,
    ) -> None:
        simt = k.isa.simt
        assert simt is not None, k.isa.name
        y = self.rows_of_y(frame, into)
        tid = simt.tid(k)
        group = self.group
        lane = tid % group
        first = tid // group * self.mr
        with k.loop(end, start=begin) as item:
            seg = pick_segment(k, frame, self, item, self.rows_per_item(k.isa.lanes), expert)
            here = seg.rows.offset_by(first)
            rows = [here.row(k, i) for i in range(self.mr)]
            sums = [[k.var(k.const(0.0, f32)) for _ in tokens] for _ in rows]
            full, rest = divmod(self.k, self.unit)
            with k.loop(full, start=lane, step=group) as u:
                self._add(k, rows, tokens, u, sums, self.unit)
            if rest:
                with k.if_(lane.eq(full % group)):
                    self._add(k, rows, tokens, k.i64(full), sums, rest)
            totals = [[self._total(k, one.v) for one in some] for some in sums]
            for i in range(self.mr):
                mine = here.offset_by(i)
                with k.if_(lane.eq(0) & (mine.first < mine.m)):
                    self._store(k, frame, y, seg, [mine.first], totals[i : i + 1])

    def _total(self, k: Builder, v: Val) -> Val:
        """Emit the sum of ``v`` over a group's lanes; each lane gets it."""
        assert k.isa.simt is not None
        step = self.group // 2
        while step:
            v = v + k.isa.simt.shuffle(k, v, step)
            step //= 2
        return v

    def _add(
        self,
        k: Builder,
        rows: list[BlockAddress],
        tokens: list[Val],
        u: Val,
        sums: list[list[Var]],
        n: int,
    ) -> None:
        """Emit: add the products of unit number ``u``, which has ``n`` weights of each row, to
        ``sums`` [row][token]. ``rows``: the weight rows; ``tokens``: addresses of the tokens'
        activations.
        """
        if self.fmt.codes is None:
            self._add_floats(k, rows, tokens, u, sums, n)
        else:
            self._add_codes(k, rows, tokens, u, sums)

    def _add_floats(
        self, k: Builder, rows: list[BlockAddress], tokens: list[Val], u: Val, sums: Any, n: int
    ) -> None:
        xs = [self._x(k, token, u, 0, FLOATS)[:n] for token in tokens]
        for row, mine in zip(rows, sums, strict=True):
            w = read_floats(k, row.block(u, FLOATS), self.k, n)
            for x, one in zip(xs, mine, strict=True):
                total = one.v
                for a, b in zip(w, x, strict=True):
                    total = k.fma(a, b, total)
                one.v = total

    def _add_codes(
        self, k: Builder, rows: list[BlockAddress], tokens: list[Val], u: Val, sums: Any
    ) -> None:
        """Emit: add the products of unit ``u`` to ``sums`` (see ``_add``), for formats with codes;
        a large block is processed one SPAN of codes at a time, in a loop.

        Unrolled, the assembler would first load the whole block and spill registers.
        """
        if self.unit <= SPAN:
            self._add_runs(k, rows, tokens, u, sums, 0)
            return
        with k.loop(self.unit // SPAN) as part:
            for first in range(0, self.unit, SPAN):
                with k.if_(part.eq(first // SPAN)):
                    self._add_runs(k, rows, tokens, u, sums, first)

    def _add_runs(
        self, k: Builder, rows: list[BlockAddress], tokens: list[Val], u: Val, sums: Any, first: int
    ) -> None:
        """Emit: add the products of at most SPAN codes of unit ``u``, from code ``first`` on, to
        ``sums`` (see ``_add``).
        """
        codes = rows[0].codes
        span = range(first, first + SPAN)
        units = [read_runs(k, row.block(u, self.unit // self.fmt.block), self.unit) for row in rows]
        for some in zip(*units, strict=True):  # the same run of each row
            if some[0].fours[0][0] not in span:
                continue
            dots: list[list[Val | None]] = [[None] * len(tokens) for _ in rows]
            x_sums: list[Val | None] = [None] * len(tokens)
            for i, (at, _) in enumerate(some[0].fours):
                xs = [self._x(k, token, u, at, 4) for token in tokens]
                for t, x in enumerate(xs):
                    if codes.has_m:
                        four = (x[0] + x[1]) + (x[2] + x[3])
                        before = x_sums[t]
                        x_sums[t] = four if before is None else before + four
                for r, run in enumerate(some):
                    w = four_floats(k, run.fours[i][1], codes.offset)
                    for t, x in enumerate(xs):
                        dot = dots[r][t]
                        for a, b in zip(w, x, strict=True):
                            dot = a * b if dot is None else k.fma(a, b, dot)
                        dots[r][t] = dot
            for run, mine, made in zip(some, sums, dots, strict=True):
                for one, dot, x_sum in zip(mine, made, x_sums, strict=True):
                    assert dot is not None
                    total = k.fma(run.scale, dot, one.v)
                    if run.minimum is not None and x_sum is not None:
                        total = k.fma(run.minimum, x_sum, total)
                    one.v = total

    def _x(self, k: Builder, token: Val, u: Val, at: int, n: int) -> list[Val]:
        """Emit the loads of ``n`` activations of a token, a multiple of 4, from the ``at``-th of
        unit ``u`` on, f32. ``token``: address of the activations.
        """
        p = token + u * (4 * self.unit)
        fours = [k.load(p, f32 * 4, offset=4 * (at + i), align=16) for i in range(0, n, 4)]
        return [k.extract(v, i) for v in fours for i in range(4)]


def swap(step: Step, plan: Plan, isa: Isa) -> Step:
    """Return a gemv step with SimtGemv, for every gemv step."""
    spec = step.spec
    assert isinstance(spec, Gemv)
    other = replace(convert_spec(SimtGemv, spec), mr=rows_together(spec.fmt, spec.nr))
    return with_items(step, spec, other, isa)


def rows_together(fmt: Format, tokens: int) -> int:
    """Return ``mr``, the number of rows that a group of lanes multiplies, for weights of ``fmt``
    and ``tokens`` tokens.
    """
    return TOGETHER if tokens < 4 and fmt.block < LARGE_BLOCK else 1


def with_items(step: Step, spec: Matmul, other: Matmul, isa: Isa) -> Step:
    """Return ``step`` with the kernel ``other`` of the same product in place of ``spec``, and as
    many items as that kernel needs.
    """
    strips = spec.strips
    heights = step.args["rows"]
    times, rest = divmod(step.grid.base, strips(heights, isa.lanes))
    assert not rest, step.label
    grid = replace(step.grid, base=times * other.strips(heights, isa.lanes))
    return replace(step, spec=other, grid=grid)
