"""IQ1_S and IQ1_M: eight weights are a point of a codebook (*grid*) of 2048, shifted by 1/8 up or
down.

``w = d * (1 + 2 * scale) * (grid[index] + shift)``, with a scale of 3 bits per sub-block. The shift
keeps weights from being zero, and gives a sub-block a non-zero mean. The low 8 bits of an index are
in ``qs``.

- IQ1_S: 8 sub-blocks of 32. A word of ``qh`` has the high 3 bits of four indices, the scale, and
  the sign of the shift.
- IQ1_M: 16 sub-blocks of 16, a shift for each point. The high 3 bits of an index are in a nibble of
  ``qh``, whose top bit is the sign of the shift. Two bytes of ``scales`` are a word: four scales,
  then 4 bits of d, which has no field of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Isa, Val
from treadle.formats.grids import IQ1
from treadle.formats.kernel_grids import ORDER, codes_per_8, high_bits, odd_steps, shifted
from treadle.formats.kernel_scales import repeat
from treadle.formats.nearest import Index, Nearest
from treadle.formats.numbers import super_blocks
from treadle.formats.packing import join_words, split_words
from treadle.formats.scale_search import FormatCoder
from treadle.jit.types import u16

SHIFT = np.float32(0.125)
DOWN = 2048  # the bit of a code beyond the index of its point: shifted down
NEAREST = Nearest(IQ1, 5)


@cache
def points() -> F32Array:
    """Return the eight values of each code, float32 [2 * DOWN, 8]: the codebook's points shifted
    up, then, from code DOWN on, shifted down.
    """
    grid = IQ1.points.astype(np.float32)
    return np.concatenate([grid + SHIFT, grid - SHIFT])


def values(codes: npt.NDArray[Any]) -> F32Array:
    """Return the weights before scaling, [..., 8 n], of codes [..., n]: shifted points."""
    return points().take(codes, axis=0).reshape(*codes.shape[:-1], codes.shape[-1] * 8)


@dataclass(frozen=True)
class ShiftedGrid:
    """Nearest-point search among shifted points; ``group`` weights share the direction of the
    shift.
    """

    group: int

    def encode(
        self, u: F32Array, weights: F32Array | None, careful: bool
    ) -> tuple[Index, F32Array]:
        """Implement ``FormatCoder.encode``: float32 [n, sub] -> codes [n, sub / 8] and values [n,
        sub].
        """
        tried = []
        for shift, code in ((SHIFT, 0), (-SHIFT, DOWN)):
            codes = NEAREST.encode(u - shift, weights, careful)[0] + code
            r = points().take(codes, axis=0).reshape(u.shape)
            r -= u
            w = r if weights is None else r * weights
            groups = -1, self.group
            loss = np.vecdot(r.reshape(groups), w.reshape(groups))
            tried.append((codes.reshape(len(loss), -1), loss))
        (up, up_loss), (down, down_loss) = tried
        codes = np.where((down_loss < up_loss)[:, None], down, up).reshape(len(u), -1)
        return codes, points().take(codes, axis=0).reshape(u.shape)


# The largest weight may lie far beyond its code, or be any of 1 1/8, 7/8 and 1/8.
LADDER = 1 + 2 * np.arange(8, dtype=np.float32)
ENDS = 1 / np.array([1.125, 0.875, 0.125])
SCALES = np.concatenate([np.geomspace(0.25, 1.2, 10), ENDS]).astype(np.float32)
SHARES = np.concatenate([1 / LADDER, 1 / np.geomspace(2.5, 24, 12)]).astype(np.float32)
S_CODER = FormatCoder(32, LADDER, ShiftedGrid(32).encode, SCALES, SHARES)
M_CODER = FormatCoder(16, LADDER, ShiftedGrid(8).encode, SCALES, SHARES)


# -- IQ1_S -------------------------------------------------------------------------------------

S_LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (32,)), ("qh", "<u2", (8,))])


def read_s(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``1 + 2 * scale`` [..., 8] and shifted points [..., 256]."""
    high = split_words(blocks["qh"], 4, 3)
    down = np.repeat(blocks["qh"] >> np.uint16(15), 4, axis=-1)
    code = blocks["qs"] | high << np.uint16(8) | down << np.uint16(11)
    return LADDER[blocks["qh"] >> np.uint16(12) & np.uint16(7)], values(code)


def write_s(out: Blocks, found: Any) -> None:
    """Pack ``found``, a search's result (codes, shifts, scales), into ``qs`` and ``qh`` of blocks
    [n].
    """
    index = found.codes % DOWN
    down = found.codes[:, ::4] // DOWN
    out["qs"] = index & 255
    out["qh"] = join_words(index >> 8, 4, 3, "<u2")
    out["qh"] |= (found.steps | down.astype(np.uint8) << np.uint8(3)).astype(np.uint16) << 12


def unpack_s(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit eight times the shifted points, plus 16."""
    words = field("qh").bits(u16 * 8)
    each = repeat(k, words, 4)
    high = ((each >> k.const([0, 3, 6, 9] * 8, each.ty)) & 7) << 8
    down = (words & 0x8000) > 0
    return [shifted(k, index, down) for index in codes_per_8(k, field("qs").to(u16) | high)]


def scales_s(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``Codes.scales``: emit ``d * (2 * scale + 1) / 8``."""
    words = field("qh")
    steps = (words.bits(u16 * (words.ty.lanes // 2)) >> 12) & 7
    return odd_steps(k, isa, steps, field("d"), 1 / 8), None


S_CODES = Codes(unpack_s, 16, 25, run=8, order=ORDER, gathers=True, scales=scales_s)
IQ1_S = super_blocks("IQ1_S", 19, S_LAYOUT, read_s, write_s, S_CODER, S_CODES)


# -- IQ1_M -------------------------------------------------------------------------------------

M_LAYOUT = np.dtype([("qs", "u1", (32,)), ("qh", "u1", (16,)), ("scales", "u1", (8,))])


def scale_m(blocks: Blocks) -> F32Array:
    """Return ``d``, float32 [..., 1], assembled from the top bits of four words of ``scales``."""
    tops = np.ascontiguousarray(blocks["scales"]).view("<u2") >> np.uint16(12)
    d: F32Array = join_words(tops, 4, 4, "<u2").view("<f2").astype(np.float32)
    return d


def read_m(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``1 + 2 * scale`` [..., 16] and shifted points [..., 256]."""
    code = blocks["qs"] | split_words(blocks["qh"], 2, 4).astype(np.uint16) << np.uint16(8)
    words = np.ascontiguousarray(blocks["scales"]).view("<u2")
    return LADDER[split_words(words, 4, 3)], values(code)


def write_m(out: Blocks, found: Any) -> None:
    """Pack ``found``, a search's result (codes, shifts, scales and ``d``), into blocks [n]."""
    out["qs"] = found.codes & 255
    out["qh"] = join_words(found.codes >> 8, 2, 4, "u1")
    half = split_words(found.d.astype("<f2").view("<u2")[:, None], 4, 4)
    words = join_words(found.steps, 4, 3, "<u2") | half << np.uint16(12)
    out["scales"] = np.ascontiguousarray(words).view(np.uint8)


def unpack_m(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit eight times the shifted points, plus 16."""
    code = field("qs").to(u16) | high_bits(k, field("qh"), 4)
    return [shifted(k, v & (DOWN - 1), (v & DOWN) > 0) for v in codes_per_8(k, code)]


def scales_m(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``Codes.scales``: emit ``d * (2 * scale + 1) / 8``, with ``d`` assembled from the
    top bits of four words of ``scales``.
    """
    packed = field("scales")
    n = packed.ty.lanes // 8
    words = packed.bits(u16 * (4 * n))
    tops = (words >> 12) << k.const([0, 4, 8, 12] * n, words.ty)
    for far in (2, 1):  # afterwards every lane has d
        tops = tops | k.shuffle(tops, tops, [i ^ far for i in range(4 * n)])
    steps = (repeat(k, words, 4) >> k.const([0, 3, 6, 9] * (4 * n), u16 * (16 * n))) & 7
    return odd_steps(k, isa, steps, tops.bits(packed.ty), 1 / 8), None


M_CODES = Codes(unpack_m, 16, 25, run=8, order=ORDER, gathers=True, sub=16, scales=scales_m)
IQ1_M = super_blocks("IQ1_M", 29, M_LAYOUT, read_m, write_m, M_CODER, M_CODES, scale_m)
