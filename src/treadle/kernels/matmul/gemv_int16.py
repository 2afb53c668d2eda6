"""gemv in i16: codes times activations (``q16``), by spans of 256 values of K with one scale of x::

    whole   i32   dots of a block's codes and x
    part    f32   + whole * scale of the block
    sum     f32   + part * scale of the span of x

On machines where a dot of bytes takes two instructions, dots of signed bytes are no faster, and
rounding x to bytes loses more of it.
"""

from __future__ import annotations

from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i8, i16, i32
from treadle.kernels.activation_layout import BLOCK, SPAN
from treadle.kernels.format_blocks import BlockAddress, load_scale_run, ordered_codes
from treadle.kernels.matmul.gemv_q8 import accumulators
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.prefetch import Neighbours, PrefetchRuns
from treadle.kernels.reduce import reduce_all


class GemvInt16:
    """Products of rows with tokens, for formats of 32 codes with one scale, with ``q16``
    activations.
    """

    def __init__(self, k: Builder, spec: Matmul, tokens: list[Val]) -> None:
        assert spec.fmt.codes is not None, spec.name
        assert k.isa.shorts is not None, spec.name
        self.k = k
        self.spec = spec
        self.tokens = tokens
        self.codes = spec.fmt.codes
        self.act = spec.layout()
        self.dots = k.isa.shorts.scale
        self.lanes = k.isa.lanes

    def dot(self, rows: list[BlockAddress], ahead: Neighbours | PrefetchRuns) -> list[list[Val]]:
        """Return the products f32 ``[row][token]`` of ``rows`` with all tokens; ``ahead``
        prefetches their blocks.
        """
        k, sums = self.k, accumulators(self.k, self.spec, self.lanes)

        def span(i: Val, n: int) -> None:
            n_blocks = n // BLOCK
            first = i * (SPAN // BLOCK)
            parts: dict[tuple[int, int], Val] = {}
            for b in range(n_blocks):
                ahead.fetch(first + b, 1)
                xs = [self._x(token, first + b) for token in self.tokens]
                for r, row in enumerate(rows):
                    at = row.block(first + b)
                    codes = self._codes(at)
                    scale = self._scale(at)
                    for t, x in enumerate(xs):
                        whole = k.zero(i32 * self.lanes)
                        for code, mine in zip(codes, x, strict=True):
                            whole = self.dots(k, whole, code, mine)
                        made = whole.to(f32)
                        before = parts.get((r, t))
                        parts[r, t] = made * scale if before is None else k.fma(made, scale, before)
            for (r, t), part in parts.items():
                d = k.load(self.tokens[t] + i * 4, f32, offset=self.act.d_off)
                sums[r][t].v = k.fma(part, k.splat(d, part.ty), sums[r][t].v)

        k.runs(self.spec.k, SPAN, span)
        flat = [var.v for mine in sums for var in mine]
        n = len(self.tokens)
        made: list[Val] = []
        for at in range(0, len(flat), self.lanes):  # as many as fit one reduction
            some = flat[at : at + self.lanes]
            reduced = reduce_all(k, some, lambda a, b: a + b)
            made += [k.extract(reduced, i) for i in range(len(some))]
        return [made[i : i + n] for i in range(0, len(made), n)]

    def _x(self, token: Val, b: Val) -> list[Val]:
        """Load the i16 values of ``token``'s ``b``-th block of 32."""
        width = min(2 * self.lanes, BLOCK)
        at = token + b * (2 * BLOCK)
        return [self.k.load(at, i16 * width, offset=2 * i) for i in range(0, BLOCK, width)]

    def _codes(self, at: BlockAddress) -> list[Val]:
        """Load a block's codes less their offset, as i16, in as many vectors as ``_x`` returns."""
        (code,) = ordered_codes(self.k, at)
        words = (code - self.codes.offset).bits(i8 * BLOCK).to(i16)
        return list(self.k.split(words, min(2 * self.lanes, BLOCK)))

    def _scale(self, at: BlockAddress) -> Val:
        return load_scale_run(self.k, at, 1, self.codes.d, [0] * self.lanes)
