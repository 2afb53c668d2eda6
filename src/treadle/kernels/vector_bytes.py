"""Few tokens in vectors: a dword of a row, four codes, in every lane, and in the lanes tokens.

To load a dword into all lanes takes no arithmetic, so what is left beside the dots and the scales
is to unpack the rows, in the order of the file (``strips.py``)::

    acc[r] += dot4(codes[r][kd] in every lane, x[kd])
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, i8, i32
from treadle.kernels.act import DWORD, scaled_comp
from treadle.kernels.matrix import SIDE
from treadle.kernels.panel import code_offset, code_top, code_type
from treadle.kernels.spec import LINE
from treadle.kernels.strips import AT_ONCE, EACH, Strip, StripGemm, Tokens
from treadle.record import dataclass

ROWS = 8  # whose sums are in registers at once


@dataclass(frozen=True)
class LanesGemm(StripGemm):
    """``nr``: lanes of a vector, or half as many."""

    @property
    def name(self) -> str:
        return f"{super().name}_lanes"

    def stored(self, k: Builder, codes: Val) -> Val:
        return codes + (code_offset(self.codes, k.isa) - self.codes.offset)

    def sums(
        self, k: Builder, strip: Val, tokens: Tokens, made: Val, to: Val, soon: Strip
    ) -> Iterator[tuple[int, Var]]:
        """ROWS at a time, from the first value of K to the last. The next strip's rows are asked
        for meanwhile; to unpack them, too, would leave too few registers.
        """
        turns, rest = divmod(self.n_products, AT_ONCE)
        for first in range(0, SIDE, ROWS):
            sums = [k.var(k.zero(f32 * self.nr)) for _ in range(ROWS)]
            rows = strip + first * self.row_pitch
            with k.loop(turns) as turn:
                for run in range(first // EACH, (first + ROWS) // EACH):
                    self._ask(k, soon, run, turn)
                with k.loop((turn + 1) * AT_ONCE, start=turn * AT_ONCE) as at:
                    self._product(k, rows, tokens, at, sums)
            if rest:
                with k.loop(self.n_products, start=turns * AT_ONCE) as at:
                    self._product(k, rows, tokens, at, sums)
            yield from ((first + r, total) for r, total in enumerate(sums))

    def _ask(self, k: Builder, strip: Strip, run: int, turn: Val) -> None:
        """For a turn's share of the rows that a strip has of a run, which are neighbours."""
        first = strip.weights(k, run, k.i64(0))
        for p, stride in zip(first.parts, self.fmt.strides, strict=True):
            n_bytes = EACH * self.k // self.fmt.block * stride
            n = -(-n_bytes // (LINE * self.turns))
            for i in range(n):
                k.prefetch(p + (turn * n + i) * LINE, 2)

    def _product(self, k: Builder, rows: Val, tokens: Tokens, at: Val, sums: list[Var]) -> None:
        """Of the values of K that share the ``at``-th scale, with ROWS."""
        isa, codes, n = k.isa, self.codes, self.per_scale // DWORD
        offset, ty = code_offset(codes, isa), code_type(codes, isa) * (DWORD * self.nr)
        dots, bytes_ = i32 * self.nr, i8 * (DWORD * self.nr)
        acc = [scaled_comp(offset, tokens.comp(at)) if offset else k.zero(dots)] * ROWS
        for step in range(n):
            x = k.load(tokens.x + (at * n + step) * self.line, bytes_, align=self.line)
            for r in range(ROWS):
                place = rows + (at * self.per_scale + r * self.row_pitch)
                w = k.splat(k.load(place, i32, offset=step * DWORD, align=DWORD), dots)
                acc[r] = isa.dot4(k, acc[r], w.bits(ty), x, code_top(codes, isa))
            k.fence()
        d, values = tokens.scales(at), tokens.sums(at) if codes.has_m else None
        for r, total in enumerate(sums):
            place = rows + (at * DWORD + r * self.row_pitch)
            scales = [
                k.splat(k.load(place, f32, offset=off, align=DWORD), d.ty)
                for off in self.scale_offs
            ]
            total.v = k.fma(acc[r].to(f32), d * scales[0], total.v)
            if values is not None:
                total.v = k.fma(scales[1], values, total.v)
        k.fence()
