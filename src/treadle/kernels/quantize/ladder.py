"""Scale search for formats with a table of values, as a kernel: a sub-block's scale is one of
equally spaced *rungs* times the block's. The nearest value is read from a table of cells. The numpy
twin is ``formats/scale_search.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats.k_search import F16_MAX
from treadle.formats.scale_search import LEAST, N_CAREFUL, TINY, ScaleFit
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32
from treadle.kernels.quantize.columns import ScratchColumns, near_f16, rounded
from treadle.kernels.quantize.k_search import SearchKernel

TOGETHER = 8  # weights of an iteration: a table lookup takes several instructions a lane
AROUND = (0, -1, 1)  # rung offsets to try
EXPONENTS = -120, 120  # range of the exponent of the largest weight, used for scaling


@dataclass(frozen=True)
class LadderSearchKernel(SearchKernel):
    """Search for formats with a table of values: ``w = d * ladder[sc] * values[code]``. The twin's
    quick and careful lookups are the same here, because the table gives the nearest value.
    """

    op: ClassVar[str] = "search_ladder"
    scales: ClassVar[tuple[str, ...]] = ("d",)
    integers: ClassVar[tuple[str, ...]] = ("sc",)
    byte: ClassVar[Any] = np.uint8
    least: ClassVar[float] = LEAST

    @property
    def n_sub(self) -> int:
        return self.block // int(self.how.sub)

    @property
    def pitch(self) -> float:
        """Distance of two neighbouring rungs; 0 for a single rung."""
        ladder = self.how.ladder
        return float(ladder[1] - ladder[0]) if len(ladder) > 1 else 0.0

    @property
    def rung_offsets(self) -> tuple[int, ...]:
        """Offsets from a rung's number to the numbers of the rungs to try; only 0 for a single
        rung.
        """
        return AROUND if self.pitch else AROUND[:1]

    @property
    def reach(self) -> float:
        return float(np.finfo(np.float32).max) / F16_MAX  # approximates any finite value

    def sizes(self) -> dict[str, int]:
        """Return the number of vectors of each array in scratch, by name; adds the powers of two
        that scale weights (``up``, ``down``), and the best candidates of d.
        """
        tops = {
            f"top{i}_{name}": n
            for i in range(N_CAREFUL)
            for name, n in self.candidate_rows().items()
        }
        return super().sizes() | {"up": 1, "down": 1} | tops

    def candidate_rows(self) -> dict[str, int]:
        """Return the number of vectors of each array that one candidate of d has in scratch, by
        name.
        """
        return {"error": 1, "d": 1, "sc": self.n_sub}

    def numbers(self, arrays: Mapping[str, np.ndarray], n: int) -> ScaleFit:
        steps = arrays["sc"].transpose(0, 2, 1).reshape(-1, self.n_sub)[:n]
        d = arrays["d"][:n].astype(np.float16)
        return ScaleFit(d, steps, arrays["codes"][:n], np.zeros((n, 0), np.uint8))

    def run_ref(self, args: Any, run: Any) -> None:
        shape = (args.n, self.block)
        found: ScaleFit = self.how.run(
            args.x.reshape(shape), args.importance.reshape(shape) if self.aware else None
        )
        self.put_ref(args, found)
        args.codes[: args.n] = found.codes

    def put_ref(self, args: Any, found: ScaleFit) -> None:
        """Write the scales and rung numbers in ``found``, the twin's result, into the output arrays
        of ``args``, laid out as the kernel's.
        """
        args.d[: args.n] = found.d
        lanes = args.sc.shape[-1]
        for i, each in enumerate(found.steps):
            args.sc[i // lanes, :, i % lanes] = each

    # -- each sub-block alone -------------------------------------------------------------------

    def fit(self, k: Builder, c: ScratchColumns) -> None:
        self.scale_down(k, c)
        shares = k.table(self.how.scales)
        largest = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            reach = k.var(k.zero(c.ty))
            with k.loop(self.length) as j:
                reach.v = k.max(reach.v, k.abs(c.load("x", sub * self.length + j)))
            gain = k.var(k.const(-1.0, c.ty))
            own = k.var(k.zero(c.ty))
            with k.loop(len(self.how.scales)) as i:
                t = reach.v * k.splat(k.load(shares, f32, offset=i * 4), c.ty)
                xy, yy = self.dots(k, c, sub, t, careful=False)
                scale = k.select(yy > 0.0, xy / yy, k.zero(c.ty))
                explained = scale * xy
                if self.n_sub == 1:  # no rungs: this is d itself, so its rounding counts
                    scale = self.to_f16(k, c, scale)
                    explained = scale * (xy + xy - scale * yy)
                more = explained > gain.v
                gain.v = k.select(more, explained, gain.v)
                own.v = k.select(more, scale, own.v)
            c.store("fit_sc", own.v, sub)
            largest.v = k.select(k.abs(own.v) > k.abs(largest.v), own.v, largest.v)
        c.store("most_sc", largest.v)

    def scale_down(self, k: Builder, c: ScratchColumns) -> None:
        """Scale each super-block's weights to about one by a power of two, which is exact: squares
        neither overflow nor underflow.
        """
        top = k.var(k.zero(c.ty))
        with k.loop(self.block) as i:
            top.v = k.max(top.v, k.abs(c.load("x", i)))
        ty = i32.like(c.ty)
        least, most = EXPONENTS
        exponent = k.min(k.max((top.v.bits(ty) >> 23) - 126, least), most)
        c.store("up", ((exponent + 127) << 23).bits(c.ty))
        down = ((127 - exponent) << 23).bits(c.ty)
        c.store("down", down)
        with k.loop(self.block) as i:
            for name in ("x", "xw")[: 1 + self.aware]:
                c.store(name, c.load(name, i) * down, i)

    def dots(
        self, k: Builder, c: ScratchColumns, sub: Val, t: Val, careful: bool
    ) -> tuple[Val, Val]:
        """Return two sums over sub-block ``sub``, for the table values y nearest to its weights x
        divided by ``t``: of ``x y`` and of ``y y``, weighted if ``aware``. ``careful``: as in
        ``nearest``.
        """
        xy = k.var(k.zero(c.ty))
        yy = k.var(k.zero(c.ty))
        unit = reciprocal(k, t)
        with k.loop(self.length, step=TOGETHER) as first:
            for j, y in enumerate(self.nearest(k, c, sub * self.length + first, unit, careful)):
                i = sub * self.length + first + j
                x = c.load("x", i)
                xy.v = k.fma(y, c.load("xw", i) if self.aware else x, xy.v)
                yy.v = k.fma(y, y * c.load("w", i) if self.aware else y, yy.v)
        return xy.v, yy.v

    def nearest(self, k: Builder, c: ScratchColumns, i: Val, unit: Val, careful: bool) -> list[Val]:
        """Return the table values nearest to ``unit`` times each of the TOGETHER weights from the
        ``i``-th on. ``careful`` asks for an exact search, which the table of cells is always here.
        """
        table = k.table(self.how.values[self.how.nearest])
        cells = [self.cell(k, c.load("x", i + j) * unit) for j in range(TOGETHER)]
        return [k.gather(table, cell, c.ty) for cell in cells]

    def cell(self, k: Builder, u: Val) -> Val:
        """Return the number of the cell that contains ``u``: cells are 1/2 wide, as many below 0 as
        above; values outside count to the first or last one.
        """
        n = len(self.how.nearest)
        return k.min(k.max(u * 2.0 + float(n // 2), 0.0), n - 1.0).to(i32.like(u.ty))

    # -- all of them together -------------------------------------------------------------------

    def descend(self, k: Builder, scratch: Val) -> None:
        """Try many values of d and keep the best few; then take the best of these, refitted."""
        c = ScratchColumns(k, scratch, self.sizes())
        infinite = k.const(float("inf"), c.ty)
        for name in ("best_error", *(f"top{i}_error" for i in range(N_CAREFUL))):
            c.store(name, infinite)
        c.store("may", k.const(1.0, c.ty))
        shares = k.table(self.how.shares)
        with k.loop(len(self.how.shares)) as i:
            share = k.splat(k.load(shares, f32, offset=i * 4), c.ty)
            self.start_at(k, c, self.to_f16(k, c, c.load("most_sc") * share))
            self.do(k, "look", scratch, "try", self.rung_offsets)
            self.do(k, "keep", scratch)
        for top in range(N_CAREFUL):
            c.store("try_d", c.load(f"top{top}_d"))
            self.attempt(k, scratch, f"top{top}", self.rung_offsets)
        self.do(k, "refit", scratch)
        c.store("try_d", self.to_f16(k, c, c.load("fitted_d")))
        self.attempt(k, scratch, "best", self.rung_offsets)

    def to_f16(self, k: Builder, c: ScratchColumns, d: Val) -> Val:
        """Return the nearest f16 of ``d``, which is in the units of the scaled weights
        (``scale_down``).
        """
        return near_f16(k, d * c.load("up")) * c.load("down")

    def start_at(self, k: Builder, c: ScratchColumns, d: Val) -> None:
        """Store ``d`` (in each lane the scale of a super-block) in ``try_d``; and in ``try_sc``,
        for each sub-block, the number of the rung that is nearest to the sub-block's own best scale
        (``fit_sc``) divided by ``d``.
        """
        c.store("try_d", d)
        unit = reciprocal(k, d)
        ladder = self.how.ladder
        if len(ladder) == 1:
            c.store("try_sc", k.zero(c.ty))
            return
        first = float(ladder[0])
        pitch = self.pitch
        with k.loop(self.n_sub) as sub:
            at = (c.load("fit_sc", sub) * unit - first) * (1 / pitch)
            c.store("try_sc", rounded(k, at, 0.0, len(ladder) - 1.0), sub)

    def rung(self, k: Builder, sc: Val) -> Val:
        """Return the scale of rung number ``sc``, relative to d."""
        return sc * self.pitch + float(self.how.ladder[0])

    def look(self, k: Builder, c: ScratchColumns, source: str, steps: tuple[int, ...]) -> None:
        d = c.load("try_d")
        highest = len(self.how.ladder) - 1.0
        total = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            first = c.load(f"{source}_sc", sub)
            least = k.var(k.const(float("inf"), c.ty))
            best = k.var(first)
            for step in steps:
                sc = k.min(k.max(first + float(step), 0.0), highest)
                error = self.error(k, c, sub, d * self.rung(k, sc), source != "try")
                less = error < least.v
                least.v = k.select(less, error, least.v)
                best.v = k.select(less, sc, best.v)
            c.store("new_sc", best.v, sub)
            total.v = total.v + least.v
        c.store("new_error", total.v)

    def error(self, k: Builder, c: ScratchColumns, sub: Val, t: Val, careful: bool) -> Val:
        """Return sub-block ``sub``'s (weighted) squared error at scale ``t``. ``careful``: as in
        ``nearest``.
        """
        unit = reciprocal(k, t)
        total = k.var(k.zero(c.ty))
        with k.loop(self.length, step=TOGETHER) as first:
            for j, y in enumerate(self.nearest(k, c, sub * self.length + first, unit, careful)):
                i = sub * self.length + first + j
                off = c.load("x", i) - t * y
                total.v = k.fma(off, off * c.load("w", i) if self.aware else off, total.v)
        return total.v

    def keep(self, k: Builder, c: ScratchColumns) -> None:
        """Insert the result in ``new_`` into the best candidates of d in scratch, sorted by error;
        of equals the earlier stays first.
        """
        new = c.load("new_error")
        better = [new < c.load(f"top{i}_error") for i in range(N_CAREFUL)]
        sources = {"error": "new_error", "d": "try_d", "sc": "new_sc"}
        for name, n in self.candidate_rows().items():
            with k.loop(n) as row:
                value = c.load(sources[name], row)
                old = [c.load(f"top{i}_{name}", row) for i in range(N_CAREFUL)]
                for i in range(N_CAREFUL):  # a better one pushes the others down
                    down = k.select(better[i - 1], old[i - 1], value) if i else value
                    c.store(f"top{i}_{name}", k.select(better[i], down, old[i]), row)

    def refit(self, k: Builder, c: ScratchColumns) -> None:
        d = c.load("best_d")
        xy = k.var(k.zero(c.ty))
        yy = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            rung = self.rung(k, c.load("best_sc", sub))
            sub_xy, sub_yy = self.dots(k, c, sub, d * rung, careful=True)
            xy.v = xy.v + sub_xy * rung
            yy.v = yy.v + sub_yy * rung * rung
        c.store("fitted_d", k.select(yy.v > 0.0, xy.v / yy.v, d))

    def coder(self, k: Builder, c: ScratchColumns, sub: Val) -> Any:
        unit = reciprocal(k, c.load("best_d") * self.rung(k, c.load("best_sc", sub)))
        table = k.table(self.how.nearest.astype(np.float32))
        first = sub * self.length
        return lambda j: k.gather(table, self.cell(k, c.load("x", first + j) * unit), c.ty)

    def final_scales(self, k: Builder, c: ScratchColumns) -> tuple[Val]:
        d = c.load("best_d") * c.load("up")
        sound = c.load("spoilt").eq(0.0)
        return (k.select(sound, d, k.const(float("nan"), c.ty)),)


def reciprocal(k: Builder, t: Val) -> Val:
    """Return 1 / t, and 0 where t is too small to be a scale."""
    return k.select(k.abs(t) < float(TINY), k.zero(t.ty), 1.0 / t)
