"""IQ2_XXS, IQ2_XS and IQ2_S: eight weights are a point of a codebook (*grid*) of three magnitudes,
with signs.

``w = d * (scale + 0.5) / 4 * grid[index]``, with a scale of 4 bits per sub-block.

- IQ2_XXS: 8 sub-blocks of 32, a grid of 256. Four ``qs`` per sub-block are two words of 32 bits,
  low half first. The first word has a byte for each index, the second 7 sign bits for each, then
  the scale.
- IQ2_XS: 16 sub-blocks of 16, a grid of 512. Each ``qs`` has 9 bits of index, then 7 sign bits of
  eight weights. Scales are nibbles, the low one first.
- IQ2_S: 16 sub-blocks of 16, a grid of 1024. The low 8 bits of an index are in ``qs``, the high 2
  in ``qh``, four to a byte; ``signs`` has a bit for each weight (in ggml it is the second half of
  ``qs``). Scales are stored as in IQ2_XS.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import signs
from treadle.formats.format import Blocks, Builder, Codes, Field, Isa, Val
from treadle.formats.grids import IQ2_S as S_GRID
from treadle.formats.grids import IQ2_XS as XS_GRID
from treadle.formats.grids import IQ2_XXS as XXS_GRID
from treadle.formats.grids import Codebook
from treadle.formats.kernel_grids import (
    ORDER,
    apply_signs,
    codes_per_8,
    even_signs,
    gather_points,
    high_bits,
    nibble_scales,
    odd_steps,
    sign_bytes,
    signs_of_7_bits,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import super_blocks
from treadle.formats.packing import join_words, split_words
from treadle.formats.scale_search import FormatCoder
from treadle.jit.types import u8, u16, u32

# The largest weight may get any of the three magnitudes, and the largest scale any step; where f16
# represents d badly, a smaller step may allow an exact one.
LADDER = (np.arange(16, dtype=np.float32) + np.float32(0.5)) / np.float32(4)
SCALES = np.concatenate([np.geomspace(0.5, 1.8, 16) / 43, [1 / 25, 1 / 8]]).astype(np.float32)
SHARES = np.concatenate([1 / LADDER, 8 / np.geomspace(4, 50, 12)]).astype(np.float32)
XXS_CODER = FormatCoder(32, LADDER, Nearest(XXS_GRID, 5).encode, SCALES, SHARES, "even")
XS_CODER = FormatCoder(16, LADDER, Nearest(XS_GRID, 5).encode, SCALES, SHARES, "even")
S_CODER = FormatCoder(16, LADDER, Nearest(S_GRID, 5).encode, SCALES, SHARES, "any")


def points(k: Builder, grid: Codebook, index: Val) -> list[Val]:
    """Emit the points, plus 64, of the 256 weights of each block, from the points' indices in
    ``grid``, in the order ``kernel_grids.ORDER``; signs are not applied.
    """
    return [gather_points(k, grid, i, 64) for i in codes_per_8(k, index)]


# -- IQ2_XXS -----------------------------------------------------------------------------------

XXS_LAYOUT = np.dtype([("d", "<f2"), ("qs", "<u2", (32,))])


def read_xxs(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``(scale + 0.5) / 4`` [..., 8] and signed points [..., 256]."""
    words = np.ascontiguousarray(blocks["qs"]).view("<u4").reshape(*blocks.shape, 8, 2)
    sign = signs.even_signs()[split_words(words[..., 1], 4, 7)]
    found = XXS_GRID.points[split_words(words[..., 0], 4, 8)]
    return LADDER[words[..., 1] >> np.uint32(28)], signs.apply_signs(found, sign)


def write_xxs(out: Blocks, found: Any) -> None:
    """Pack ``found``, a ``ScaleFit`` (codes, signs, scales), into blocks [n]."""
    words = np.empty((len(out), 8, 2), "<u4")
    words[..., 0] = join_words(found.codes, 4, 8, "<u4")
    words[..., 1] = join_words(found.signs & np.uint8(127), 4, 7, "<u4")
    words[..., 1] |= found.steps.astype(np.uint32) << np.uint32(28)
    out["qs"] = words.reshape(-1, 16).view("<u2")


def unpack_xxs(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit signed points, plus 64."""
    qs = field("qs")
    return apply_signs(k, points(k, XXS_GRID, qs), signs_of_7_bits(k, qs, 32), 64)


def scales_xxs(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``Codes.scales``: emit ``d * (2 * scale + 1) / 8``."""
    qs = field("qs")
    steps = k.evens(qs.bits(u32 * (qs.ty.lanes // 4)), 1)[1] >> 28
    return odd_steps(k, isa, steps, field("d"), 1 / 8), None


XXS_CODES = Codes(unpack_xxs, 64, 107, run=8, order=ORDER, gathers=True, scales=scales_xxs)
IQ2_XXS = super_blocks("IQ2_XXS", 16, XXS_LAYOUT, read_xxs, write_xxs, XXS_CODER, XXS_CODES)


# -- IQ2_XS ------------------------------------------------------------------------------------

XS_LAYOUT = np.dtype([("d", "<f2"), ("qs", "<u2", (32,)), ("scales", "u1", (8,))])


def read_xs(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``(scale + 0.5) / 4`` [..., 16] and signed points [..., 256]."""
    sign = signs.even_signs()[blocks["qs"] >> np.uint16(9)]
    found = XS_GRID.points[blocks["qs"] & np.uint16(511)]
    return LADDER[split_words(blocks["scales"], 2, 4)], signs.apply_signs(found, sign)


def write_xs(out: Blocks, found: Any) -> None:
    """Pack ``found``, a ``ScaleFit`` (codes, signs, scales), into blocks [n]."""
    out["qs"] = found.codes.astype(np.uint16) | found.signs.astype(np.uint16) << np.uint16(9)
    out["scales"] = join_words(found.steps, 2, 4, "u1")


def unpack_xs(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit signed points, plus 64."""
    qs = field("qs").bits(u16 * 32)
    found = points(k, XS_GRID, qs & 511)
    return apply_signs(k, found, even_signs(k, (qs >> 9).bits(u8 * 64)), 64, step=2)


XS_CODES = Codes(
    unpack_xs, 64, 107, run=8, order=ORDER, gathers=True, sub=16, scales=nibble_scales(1 / 8)
)
IQ2_XS = super_blocks("IQ2_XS", 17, XS_LAYOUT, read_xs, write_xs, XS_CODER, XS_CODES)


# -- IQ2_S -------------------------------------------------------------------------------------

S_LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", (32,)),
        ("signs", "u1", (32,)),
        ("qh", "u1", (8,)),
        ("scales", "u1", (8,)),
    ]
)


def read_s(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``(scale + 0.5) / 4`` [..., 16] and signed points [..., 256]."""
    high = split_words(blocks["qh"], 4, 2).astype(np.uint16)
    found = S_GRID.points[blocks["qs"] | high << np.uint16(8)]
    return LADDER[split_words(blocks["scales"], 2, 4)], signs.apply_signs(found, blocks["signs"])


def write_s(out: Blocks, found: Any) -> None:
    """Pack ``found``, a ``ScaleFit`` (codes, signs, scales), into blocks [n]."""
    out["qs"] = found.codes & 255
    out["signs"] = found.signs
    out["qh"] = join_words(found.codes >> 8, 4, 2, "u1")
    out["scales"] = join_words(found.steps, 2, 4, "u1")


def unpack_s(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit signed points, plus 64."""
    index = field("qs").to(u16) | high_bits(k, field("qh"), 2)
    return apply_signs(k, points(k, S_GRID, index), sign_bytes(k, field("signs")), 64)


S_CODES = Codes(
    unpack_s, 64, 107, run=8, order=ORDER, gathers=True, sub=16, scales=nibble_scales(1 / 8)
)
IQ2_S = super_blocks("IQ2_S", 22, S_LAYOUT, read_s, write_s, S_CODER, S_CODES)
