"""Attention over latent rows, in vectors: a value is its key's first dims (DeepSeek-V2, 2024).

Pages have keys transposed, and therefore values too: a dim of the values is a row of PAGE keys. One
dim of a query's result is a sum along that row, accumulated in lanes and reduced across them once a
span of pages. O is kept transposed, ``[dims_v, row_lanes]``: one dim of all rows is one vector.
"""

from __future__ import annotations

from treadle.jit.language import Val, Var
from treadle.jit.math import LOG2_E
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.page_layout import HALF
from treadle.kernels.attention.vector_tile import VectorTile
from treadle.kernels.attention.work_item import SPAN
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import widest


class LatentTile(VectorTile):
    """Vector tile of latent attention: values are the first ``dims_v`` dims of the keys."""

    def _load_queries(self) -> None:
        k = self.k
        dims = self.spec.head_dim
        self.p = self.o + self.stat.n_bytes * self.spec.dims_v
        width = widest(self.isa.lanes, dims)
        for r, t, g in self._rows():
            row = self.query(t, g)
            with k.loop(dims, step=width) as d:
                q = k.load(row, f32 * width, offset=d * 4) * LOG2_E
                k.store(self.q, q, offset=d * 4 + r * dims * 4)
        with k.loop(self.spec.dims_v) as d:
            k.store(self.o + d * self.stat.n_bytes, k.zero(self.stat))

    def _values(self, first: Val, n_pages: Val, correction: Val) -> None:
        """Update O^T = O^T c + V^T P^T, with the ``n_pages`` pages from ``first`` on; c is
        ``correction``.
        """
        k = self.k
        spec = self.spec
        at_once = max(1, (self.isa.regs - 6) // spec.rows)
        while spec.page.keys.fmt.run % at_once or spec.dims_v % at_once:
            at_once -= 1
        with k.loop(spec.dims_v, step=at_once) as d:
            sums = [self._vectors(0.0) for _ in range(at_once)]
            with k.loop(n_pages) as i:
                n_keys = self.item["key_end"] - (first + i) * PAGE
                self._add_values(self.page(first + i), n_keys, self.p + i * (PAGE * 4), d, sums)
            for j, row in enumerate(sums):
                at = self.o + (d + j) * self.stat.n_bytes
                total = self._reduce_rows([each.v for each in row], lambda a, b: a + b)
                k.store(at, k.fma(k.load(at, self.stat), correction, total))

    def _add_values(self, home: Val, n_keys: Val, p: Val, d: Val, sums: list[list[Var]]) -> None:
        """Add P V of the page at ``home`` to ``sums``, for ``len(sums)`` dims from ``d`` on; ``p``:
        address of the page's weights P. Keys from ``n_keys`` on are undefined memory, and count as
        zeros.
        """
        k = self.k
        isa = self.isa
        side = self.spec.page.keys
        fmt = side.fmt
        lanes = isa.lanes
        scales = home + d // BLOCK * (PAGE * 4)
        first = d
        half: Val | int = 0
        if fmt.packed:
            first = d // BLOCK * HALF + d % HALF
            half = d % BLOCK // HALF * 4
        for c in range(0, PAGE, lanes):
            iota = k.const(range(c, c + lanes), i32 * lanes)
            inside = iota < k.splat(n_keys.to(i32), iota.ty)
            values = []
            for j in range(len(sums)):
                v = side.load_keys(k, home, first + j, c, lanes, half)
                if fmt.scaled:
                    v = v * k.load(scales, v.ty, offset=side.scales_at + c * 4)
                if fmt.minimum:
                    v = v + k.load(scales, v.ty, offset=side.minimums_at + c * 4)
                values.append(k.select(inside, v, k.zero(v.ty)))
            for r in range(self.spec.rows):
                weight = k.load(p, f32 * lanes, offset=4 * (c + r * SPAN * PAGE))
                for row, v in zip(sums, values, strict=True):
                    row[r].v = k.fma(weight, v, row[r].v)

    def _store(self, m: Val, total: Val) -> None:
        k = self.k
        spec = self.spec
        with k.if_else(self.item["partial"] < 0) as (whole, part):
            with whole:
                inverse = 1.0 / total
                for r, t, g in self._rows():
                    self._copy(r, self.result(t, g), k.extract(inverse, r))
            with part:
                for r in range(spec.rows):
                    row = self.partial(r)
                    self._copy(r, row, k.const(1.0, f32))
                    k.store(row, k.extract(m, r), offset=spec.dims_v * 4)
                    k.store(row, k.extract(total, r), offset=spec.dims_v * 4 + 4)

    def _copy(self, r: int, to: Val, factor: Val) -> None:
        """Store row ``r`` of O, f32 ``[dims_v]``, times ``factor``, at ``to``."""
        k = self.k
        with k.loop(self.spec.dims_v) as d:
            o = k.load(self.o + d * self.stat.n_bytes, f32, offset=4 * r)
            k.store(to, o * factor, offset=d * 4)
