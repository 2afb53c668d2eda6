"""The shape of a product in tiles: what a gemm and its tile loops share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats import Format
from treadle.kernels.act import DWORD, NARROW, SPAN, Act, bf16_bits, from_bf16_bits, words_ref
from treadle.kernels.matmul import Matmul
from treadle.kernels.spec import round_up
from treadle.record import dataclass


@dataclass(frozen=True)
class Tiled(Matmul):
    """Panels of ``mr * lanes`` rows, tiles of ``nr`` tokens.

    With ``kc`` all tokens meet that many values of K before any meets the next: so much of a panel
    stays in the first-level cache, and the sums wait in y meanwhile. ``fence`` is the number of
    dwords of K after which LLVM may not move a load: it would hoist them all and spill. ``folded``:
    panels hold codes that scales are multiplied into already.
    """

    kc: int = 0  # a multiple of 32; 0: all of K at once
    fence: int = 1  # 0: none
    folded: bool = False  # only q8, and of formats that can
    unit: int = DWORD  # q8: values of K that follow each other in a panel's column

    @property
    def fmt(self) -> Format:
        """The format, its codes as a panel has them."""
        fmt = super().fmt
        if not self.folded:
            return fmt
        assert self.act == "q8", self.act
        assert fmt.codes is not None, fmt.name
        assert fmt.codes.folded is not None, fmt.name
        return replace(fmt, codes=fmt.codes.folded)

    def weights_ref(self, w: Sequence[Any], rows: int) -> npt.NDArray[np.float64]:
        """A segment's weights as a panel holds them, float64 ``[M, K]``."""
        weights = super().weights_ref(w, rows)
        if self.act == "q16":
            words, d = words_ref(weights.astype(np.float32))
            return (words * d.repeat(SPAN, 1).astype(np.float64))[:, : self.k]
        if self.act not in NARROW:
            return weights
        parts = bf16_bits(weights.astype(np.float32), NARROW[self.act])
        return np.asarray(sum(from_bf16_bits(part) for part in parts))

    def layout(self) -> Act:
        if self.act != "q8":
            return Act(self.act, self.k, self.nr)
        return Act(self.act, self.k, self.nr, self.sub, max(self.unit, DWORD))

    def rows_per_item(self, lanes: int) -> int:
        return self.mr * lanes

    @property
    def lane_bytes(self) -> int:
        """Scratch for what each token, and each accumulator, needs in every lane."""
        return round_up(4 * self.nr * (self.n_sums + self.mr), 64)

    @property
    def n_sums(self) -> int:
        """How many sums of a token the codes that share a scale have minimums for."""
        return self.fmt.codes.sub // self.sub if self.fmt.codes else 1
