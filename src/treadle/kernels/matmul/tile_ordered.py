"""gemm in vectors with the order of addition of Intel's matrix registers, bit for bit.

For 32 values of K a matrix register sums the even and the odd products apart, each by sixteen fused
multiply-adds in sequence from zero; it adds both sums, and the result to the accumulator (TDPBF16PS
in Intel's Software Developer's Manual; measured: no bit differs in five million sums). So few
tokens can be multiplied in vectors, where a register's tile would be mostly empty, and many on
matrix registers, with equal results: see ``select.exact``. Matrix registers count values below
2**-126 as zero; vectors do not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import ClassVar

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import DWORDS
from treadle.kernels.format_blocks import WeightRows
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.tile import STEP, Ends, MatmulTile

HIGH = -1 << 16  # mask of a dword's odd value


class OrderedTile(MatmulTile):
    """Tile of mr vectors of rows times nr tokens with the order of addition of Intel's matrix
    registers; bf16 only.
    """

    def _multiply(
        self, first: Val, last: Val, before: Callable[[int, int], Val] | None
    ) -> list[list[Var]]:
        assert self.spec.act == "bf16", self.spec.act
        # Starts from zero even if ``before`` is given: ``Epilogue`` adds that.
        k = self.k
        spec = self.spec
        floats = f32 * self.isa.lanes
        sums = [[k.var(k.zero(floats)) for _ in range(spec.nr)] for _ in range(spec.mr)]
        tiles = list(product(range(spec.mr), range(spec.nr)))
        with k.loop(last, start=first, step=DWORDS["bf16"] // STEP[spec.act]) as c:
            chains = {tile: [k.zero(floats), k.zero(floats)] for tile in tiles}
            for u in range(DWORDS["bf16"]):
                kd = c * STEP[spec.act] + u
                weights = [self._values(w) for w in self._weights(kd)]
                tokens = [self._values(self._token(kd, t)) for t in range(spec.nr)]
                for m, t in tiles:
                    pairs = zip(weights[m], tokens[t], chains[m, t], strict=True)
                    chains[m, t] = [k.fma(w, x, total) for w, x, total in pairs]
                k.fence()
            for m, t in tiles:
                even, odd = chains[m, t]
                sums[m][t].v = sums[m][t].v + (even + odd)
        return sums

    def _token(self, kd: Val, t: int) -> Val:
        """Return token ``t``'s ``kd``-th dword in every lane."""
        at = self.x + kd * (4 * self.spec.nr)
        return self.k.splat(self.k.load(at, i32, offset=4 * t, align=4), i32 * self.isa.lanes)

    def _values(self, dwords: Val) -> tuple[Val, Val]:
        """Split dwords of two bf16 each into the even and the odd values, two vectors of f32."""
        ty = f32.like(dwords.ty)
        return (dwords << 16).bits(ty), (dwords & HIGH).bits(ty)


@dataclass(frozen=True)
class OrderedGemm(Gemm):
    """gemm for few tokens with the order of addition of ``MatrixGemm``. With ``kc``, the sums of
    each ``kc`` values of K are computed separately and then added to y, as those of a
    matrix-register panel are.
    """

    resumes: ClassVar[bool] = False
    tile: ClassVar[type[MatmulTile]] = OrderedTile

    @property
    def name(self) -> str:
        return f"{super().name}_ordered"

    def fill(
        self, k: Builder, panel: Val, stage: Val, rows: WeightRows, part: Ends | None = None
    ) -> None:
        if part is None:
            super().fill(k, panel, stage, rows)
            return
        with k.if_(part[0].eq(0)):  # all of K at once
            super().fill(k, panel, stage, rows)
