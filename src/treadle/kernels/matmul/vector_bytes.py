"""Few tokens in vectors of bytes: lanes are tokens, and a dword of a row, four codes, is in every
lane.

A broadcast load takes no arithmetic, so besides the dots and the scales only unpacking the rows is
left, in file order (``byte_strips.py``)::

    acc[r] += dot4(codes[r][kd] in every lane, x[kd])
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, i8, i32
from treadle.kernels.activation_layout import DWORD, scaled_comp
from treadle.kernels.matmul.byte_strips import AT_ONCE, ByteStrips
from treadle.kernels.matmul.matrix import SIDE
from treadle.kernels.matmul.panel import code_offset, code_top, code_type, short_dots
from treadle.kernels.matmul.strips import EACH, Strip, Tokens
from treadle.kernels.run_state import LINE

VECTORS = 8  # accumulators in registers at once


@dataclass(frozen=True)
class LanesGemm(ByteStrips):
    """Strip product of bytes in vectors: a lane a token. ``nr``: the lanes of a vector, half of
    them, or those of two.
    """

    @property
    def name(self) -> str:
        return f"{super().name}_lanes"

    def stored(self, k: Builder, codes: Val) -> Val:
        return codes + (code_offset(self.codes, k.isa) - self.codes.offset)

    def sums(
        self, k: Builder, strip: Strip, tokens: Tokens, made: Val, soon: Strip
    ) -> Iterator[tuple[Val | int, Var]]:
        return self.in_lanes(k, tokens, lambda n: self._sums(k, strip.held, tokens, soon, n))

    def _sums(
        self, k: Builder, strip: Val, tokens: Tokens, soon: Strip, n: int
    ) -> Iterator[tuple[Val | int, Var]]:
        """Yield each of the 16 rows of the strip at ``strip`` with its sums with ``n`` tokens, a
        few rows at a time over all of K. The next strip, ``soon``, is prefetched meanwhile;
        unpacking it as well would leave too few registers.
        """
        turns, rest = divmod(self.n_products, AT_ONCE)
        n_rows = VECTORS // -(-n // k.isa.lanes)
        with k.loop(SIDE, step=n_rows) as first:
            sums = [k.var(k.zero(f32 * n)) for _ in range(n_rows)]
            rows = strip + first * self.row_pitch
            with k.loop(turns) as turn:
                for i in range(n_rows // EACH):
                    self._prefetch_turn(k, soon, first // EACH + i, turn)
                with k.loop((turn + 1) * AT_ONCE, start=turn * AT_ONCE) as at:
                    self._product(k, rows, tokens, at, sums)
            if rest:
                with k.loop(self.n_products, start=turns * AT_ONCE) as at:
                    self._product(k, rows, tokens, at, sums)
            yield from ((first + r, total) for r, total in enumerate(sums))

    def _prefetch_turn(self, k: Builder, strip: Strip, run: Val, turn: Val) -> None:
        """Prefetch, in turn number ``turn``, its share of the strip's rows in run ``run`` (see
        ``Strip``), which are adjacent.
        """
        first = strip.weights(k, run, k.i64(0))
        for p, stride in zip(first.parts, self.fmt.row_strides(self.k), strict=True):
            n_bytes = EACH * stride
            n = -(-n_bytes // (LINE * self.turns))
            for i in range(n):
                k.prefetch(p + (turn * n + i) * LINE, 2)

    def _product(self, k: Builder, rows: Val, tokens: Tokens, at: Val, sums: list[Var]) -> None:
        """Add the ``at``-th product, scaled, of each unpacked row from the address ``rows`` on to
        its entry of ``sums``.
        """
        n = sums[0].v.ty.lanes
        codes = self.codes
        offset = code_offset(self.codes, k.isa)
        start = scaled_comp(offset, tokens.comp(at, n)) if offset else k.zero(i32 * n)
        acc = self._dots(k, rows, tokens, at, k.split(start, min(n, k.isa.lanes)), len(sums))
        d = tokens.scales(at, n)
        values = tokens.sums(at, n) if codes.has_m else None
        for r, total in enumerate(sums):
            place = rows + (at * DWORD + r * self.row_pitch)
            scales = [
                k.splat(k.load(place, f32, offset=off, align=DWORD), d.ty)
                for off in self.scale_offs
            ]
            total.v = k.fma(k.concat(*acc[r]).to(f32), d * scales[0], total.v)
            if values is not None:
                total.v = k.fma(scales[1], values, total.v)
        k.fence()

    def _dots(
        self, k: Builder, rows: Val, tokens: Tokens, at: Val, start: list[Val], n_rows: int
    ) -> list[list[Val]]:
        """Return the i32 dots ``[row][vector of tokens]`` of ``per_scale`` values of K, from value
        ``at * per_scale`` on, of ``n_rows`` unpacked rows with ``tokens``. ``rows``: address of the
        first unpacked row; ``start``: initial sums, one vector for each vector of tokens. As many
        dots as fit an i16 are added up there first, on machines with such dots.
        """
        isa = k.isa
        codes = self.codes
        n_steps = self.per_scale // DWORD
        width = start[0].ty.lanes
        top = code_top(codes, isa)
        room = short_dots(codes, isa)
        dots = i32 * width
        ty = code_type(codes, isa) * (DWORD * width)
        acc = [start] * n_rows
        short: list[list[Val | None]] = [[None] * len(start)] * n_rows
        for step in range(n_steps):
            loaded = tokens.dwords(at * n_steps + step, width * len(start))
            xs = [x.bits(i8 * (DWORD * width)) for x in k.split(loaded, width)]
            for r, mine in enumerate(acc):
                place = rows + (at * self.per_scale + r * self.row_pitch)
                w = k.splat(k.load(place, i32, offset=step * DWORD, align=DWORD), dots).bits(ty)
                if not (isa.shorts and room):
                    acc[r] = [isa.dot4(k, a, w, x, top) for a, x in zip(mine, xs, strict=True)]
                    continue
                made = [isa.shorts.dot(k, s, w, x) for s, x in zip(short[r], xs, strict=True)]
                short[r] = [*made]
                if (step + 1) % room == 0 or step + 1 == n_steps:
                    acc[r] = [isa.shorts.widen(k, a, s) for a, s in zip(mine, made, strict=True)]
                    short[r] = [None] * len(start)
            k.fence()
        return acc
