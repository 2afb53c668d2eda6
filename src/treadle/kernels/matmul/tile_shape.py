"""Shape of a tiled product, for a gemm and its tile loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.formats import Format
from treadle.kernels.activation_layout import (
    DWORD,
    NARROW,
    SPAN,
    STEP_BITS,
    ActivationLayout,
    bf16_bits,
    bytes_ref,
    from_bf16_bits,
    word_scales_ref,
    words_ref,
)
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.run_state import round_up


@dataclass(frozen=True)
class Tiled(Matmul):
    """Base of the products that pack panels: panels of ``mr * lanes`` rows, tiles of ``nr`` tokens.

    With ``kc`` all tokens are multiplied by ``kc`` values of K before any by the next ones: that
    part of a panel stays in the first-level cache, and the sums are kept in y. ``fence``: the
    dwords of K after which LLVM may not move a load; without a fence it would hoist them all and
    spill. ``folded``: panels hold codes already multiplied by their scales.
    """

    kc: int = 0  # a multiple of 32; 0: all of K at once
    fence: int = 1  # 0: none
    folded: bool = False  # only q8, in formats that support it
    unit: int = DWORD  # q8: consecutive values of K in a panel's column

    @property
    def compile_ms(self) -> float:
        return 90.0 + 2.5 * self.mr * self.nr

    @property
    def fmt(self) -> Format:
        """The weight format, with its codes as a panel has them (``folded``)."""
        fmt = super().fmt
        if not self.folded:
            return fmt
        assert self.act == "q8", self.act
        assert fmt.codes is not None, fmt.name
        assert fmt.codes.folded is not None, fmt.name
        return replace(fmt, codes=fmt.codes.folded)

    def weights_ref(self, w: Sequence[Any], rows: int) -> npt.NDArray[np.float64]:
        """Return a segment's weights as a panel rounds them, float64 ``[rows, K]``. With ``q16n``
        they are those of the file, because a panel's words depend on the order in which squares are
        added. ``w``: the arrays of its tensor in the file's format.
        """
        weights = super().weights_ref(w, rows)
        if self.act in ("q16", "q16x2"):
            if self.fmt.codes:
                words, d = _words_of_codes_ref(
                    self.fmt, self.fmt.join(w).reshape(rows, -1), weights
                )
            else:
                words, d = words_ref(weights.astype(np.float32), self.act)
            return (words * d.repeat(SPAN, 1).astype(np.float64))[:, : self.k]
        if self.act not in NARROW:
            return weights
        parts = bf16_bits(weights.astype(np.float32), NARROW[self.act])
        return np.asarray(sum(from_bf16_bits(part) for part in parts))

    def left_out_ref(self, source: Any, rows: np.ndarray, w: Sequence[Any], m: int) -> Any:
        """Return the part of the products that this kernel leaves out by design, float64
        ``[len(rows), m]``: for ``q16x2`` the low bytes of activations times the low bytes of
        weights; 0.0 for other kinds. The arguments are those of ``Matmul.left_out_ref``.
        """
        if self.act != "q16x2" or not len(rows):
            return 0.0
        words, d = words_ref(super().weights_ref(w, m).astype(np.float32), self.act)
        low = (bytes_ref(words)[1] * d.repeat(SPAN, 1).astype(np.float64))[:, : self.k]
        return self.layout().low_ref(source, int(rows.max()) + 1)[rows] @ low.T

    def layout(self) -> ActivationLayout:
        if self.act != "q8":
            return ActivationLayout(self.act, self.k, self.nr)
        return ActivationLayout(self.act, self.k, self.nr, self.sub, max(self.unit, DWORD))

    def rows_per_item(self, lanes: int) -> int:
        return self.mr * lanes

    @property
    def lane_bytes(self) -> int:
        """Bytes of scratch for values that are needed in every lane: of each token, and of each
        accumulator.
        """
        return round_up(4 * self.nr * (self.n_sums + self.mr), 64)

    @property
    def n_sums(self) -> int:
        """Number of minimums, and of sums of x, for the codes that share a scale; 1 for floats."""
        return self.fmt.codes.sub // self.sub if self.fmt.codes else 1


def _words_of_codes_ref(
    fmt: Format, rows: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the words of a matrix of codes, int16 ``[M, K up to whole spans]``, and their scales,
    f32 ``[M, spans]``, as a panel's store of codes computes them: a span's largest value is its
    largest scale times the largest possible code, and a code's step is rounded.

    ``rows``: the matrix as uint8 ``[M, row bytes]``; ``weights``: its values, float64 ``[M, K]``.
    The scales of a format without ``sub_scales`` are found by dequantising rows whose codes are all
    the lowest.
    """
    codes = fmt.codes
    shape = (len(weights), -1, SPAN)
    assert codes is not None, fmt.name
    if fmt.sub_scales is None:
        low = rows.copy()
        lows = low.view(fmt.dtype)["qs"]
        lows[:] = np.iinfo(lows.dtype).min
        scales = fmt.dequantize_rows(low) / np.float64(min(codes.levels, default=-codes.offset))
    else:
        each = fmt.sub_scales(fmt.blocks_of(rows)).reshape(len(rows), -1)
        scales = each.repeat(codes.sub, axis=-1).astype(np.float64)
    found = np.rint(np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0))
    missing = (0, 0), (0, -weights.shape[1] % SPAN)
    scales, found = (np.pad(a, missing).reshape(shape) for a in (scales.astype(np.float32), found))
    inverse, d = word_scales_ref(np.abs(scales).max(-1) * np.float32(codes.most))
    steps = np.rint((scales * inverse[:, :, None]).astype(np.float64) * (1 << STEP_BITS))
    words = np.floor(found * steps / (1 << STEP_BITS) + 0.5)
    return words.astype(np.int16).reshape(len(weights), -1), d
