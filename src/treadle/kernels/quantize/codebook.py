"""Scale search for codebooks: a *point* is four weights without signs. The numpy twins are
``formats/scale_search.py`` and ``formats/nearest.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import by_name
from treadle.formats.nearest import NEARBY, Nearest
from treadle.formats.scale_search import ScaleFit
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32
from treadle.kernels.quantize.columns import ScratchColumns
from treadle.kernels.quantize.ladder import TOGETHER, LadderSearchKernel, reciprocal

DIM = 4  # weights of a point
BITS = 4  # bits of a coordinate in a table's entry; the point's number is above them


@dataclass(frozen=True)
class PointSearchKernel(LadderSearchKernel):
    """Search for formats of points: ``w = d * ladder[sc] * point[code]``, with the weights' own
    signs. In each four bytes of ``codes`` the first two are a point's number, the third its signs.
    """

    op: ClassVar[str] = "search_points"

    def sizes(self) -> dict[str, int]:
        """Return the number of vectors of each array in scratch, by name; adds ``signs``, a vector
        for each point.
        """
        return super().sizes() | {"signs": self.block // DIM}

    def numbers(self, arrays: Mapping[str, np.ndarray], n: int) -> ScaleFit:
        made = super().numbers(arrays, n)
        low, high, signs, _ = made.codes.reshape(n, -1, DIM).transpose(2, 0, 1)
        codes = low.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)
        return made._replace(codes=codes, signs=signs[:, ::2] | signs[:, 1::2] << np.uint8(4))

    def run_ref(self, args: Any, run: Any) -> None:
        shape = (args.n, self.block)
        found: ScaleFit = self.how.run(
            args.x.reshape(shape), args.importance.reshape(shape) if self.aware else None
        )
        self.put_ref(args, found)
        codes = args.codes[: args.n].reshape(args.n, -1, DIM)
        codes[..., 0] = found.codes & 255
        codes[..., 1] = found.codes >> 8
        codes[:, ::2, 2] = found.signs & 15
        codes[:, 1::2, 2] = found.signs >> 4

    def scale_down(self, k: Builder, c: ScratchColumns) -> None:
        """Store the weights' signs in ``signs``, scale the weights as the base class does, and
        replace them by their magnitudes.
        """
        ty = i32.like(c.ty)
        with k.loop(self.block // DIM) as group:
            signs = k.zero(ty)
            for j in range(DIM):
                negative = (c.load("x", group * DIM + j).bits(ty) >> 31) & 1
                signs = signs | negative << j
            c.store("signs", signs.to(f32.like(ty)), group)
        super().scale_down(k, c)
        with k.loop(self.block) as i:
            for name in ("x", "xw")[: 1 + self.aware]:
                c.store(name, k.abs(c.load(name, i)), i)

    def nearest(self, k: Builder, c: ScratchColumns, i: Val, unit: Val, careful: bool) -> list[Val]:
        found = []
        for first in range(0, TOGETHER, DIM):
            found += coordinates(k, self.point(k, c, i + first, unit, careful))
        return found

    def point(self, k: Builder, c: ScratchColumns, i: Val, unit: Val, careful: bool) -> Val:
        """Return the table entry of the point nearest to ``unit`` times the four weights from the
        ``i``-th on. ``careful``: compare the nearby points exactly; else take the point of the
        quick lookup's cell.
        """
        points: Nearest = self.how.points
        quick, nearby = tables(self.w)
        us = [c.load("x", i + j) * unit for j in range(DIM)]
        ty = i32 * c.ty.lanes
        if not careful:
            return k.gather(k.table(quick), self.cell_of(k, us, points.cells), ty)
        cell = self.cell_of(k, us, len(points.grid.alphabet)) * NEARBY
        ws = [c.load("w", i + j) if self.aware else k.const(1.0, c.ty) for j in range(DIM)]
        best = k.var(k.zero(ty))
        most = k.var(k.const(float("-inf"), c.ty))
        with k.loop(NEARBY) as at:
            entry = k.gather(k.table(nearby), cell + k.splat(at.to(i32), ty), ty)
            # Least squares: sum w (u - p)^2 is smallest where sum p w (u - p / 2) is largest.
            score = k.zero(c.ty)
            for p, u, w in zip(coordinates(k, entry), us, ws, strict=True):
                score = k.fma(p * w, u - p * 0.5, score)
            more = score > most.v
            most.v = k.select(more, score, most.v)
            best.v = k.select(more, entry, best.v)
        return best.v

    def cell_of(self, k: Builder, us: list[Val], n: int) -> Val:
        """Return the number of the cell of a lookup table that holds the point with the four
        coordinates ``us``; there are ``n`` cells along each coordinate.
        """
        alphabet = self.how.points.grid.alphabet
        pitch = (alphabet[-1] - alphabet[0]) / (n - 1)
        cell = k.zero(i32.like(us[0].ty))
        for j, u in enumerate(us):
            at = k.min(k.max(u * (1 / pitch) + (0.5 - alphabet[0] / pitch), 0.0), n - 0.5)
            cell = cell + at.to(i32) * n**j
        return cell

    def coder(self, k: Builder, c: ScratchColumns, sub: Val) -> Any:
        unit = reciprocal(k, c.load("best_d") * self.rung(k, c.load("best_sc", sub)))
        first = sub * self.length
        entries: dict[int, Val] = {}

        def code(j: int) -> Val:
            group, byte = divmod(j, DIM)
            if byte == 2:
                return c.load("signs", sub * (self.length // DIM) + group)
            if group not in entries:
                entries[group] = self.point(k, c, first + group * DIM, unit, careful=True)
            number = entries[group] >> (BITS * DIM)
            part = [number & 255, number >> 8, number, k.zero(number.ty)][byte]
            return part.to(c.ty)

        return code


def coordinates(k: Builder, entry: Val) -> list[Val]:
    """Return the four coordinates of a point from its table entry ``entry`` (i32), f32."""
    mask = (1 << BITS) - 1
    return [((entry >> (BITS * j)) & mask).to(f32) for j in range(DIM)]


@lru_cache(maxsize=1)
def tables(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of the format ``name`` as i32 entries, in two tables: the point of each
    cell of the quick lookup, ``[cells ** 4]``, and the points near each of the larger cells,
    ``[alphabet ** 4, NEARBY]``.
    """
    points: Nearest = by_name(name).search.points
    at = points.grid.points.astype(np.int32)
    entries = np.arange(len(at), dtype=np.int32) << (BITS * DIM)
    for j in range(DIM):
        entries |= at[:, j] << (BITS * j)
    return entries[points.table], entries[points.nearby]


def fits(points: Nearest | None) -> bool:
    """Whether a codebook's points can be table entries: they have four coordinates of BITS bits.
    False for None (a format without points).
    """
    return points is not None and points.grid.dim == DIM and points.grid.alphabet[-1] < 1 << BITS
