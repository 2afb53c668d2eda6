"""IQ3_XXS and IQ3_S: four weights are a point of a codebook (*grid*) of eight magnitudes, with
signs.

Both have 8 sub-blocks of 32 weights, with a scale of 4 bits each.

- IQ3_XXS: ``w = d * (scale + 0.5) / 2 * grid[index]``, a grid of 256. ``qs`` has the indices. A
  word of ``scales_and_signs`` has 7 sign bits for each eight weights, then the scale (in ggml these
  words are the end of ``qs``).
- IQ3_S: ``w = d * (1 + 2 * scale) * grid[index]``, a grid of 512. The low 8 bits of an index are in
  ``qs``, the high bit in ``qh``, eight to a byte; ``signs`` has a bit for each weight. Scales are
  nibbles, the low one first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.formats import signs
from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Isa, Val
from treadle.formats.grids import IQ3_S as S_GRID
from treadle.formats.grids import IQ3_XXS as XXS_GRID
from treadle.formats.grids import Codebook
from treadle.formats.kernel_grids import (
    ORDER,
    apply_signs,
    codes_per_4,
    gather_points,
    nibble_scales,
    odd_steps,
    sign_bytes,
    signs_of_7_bits,
)
from treadle.formats.nearest import Nearest
from treadle.formats.numbers import super_blocks
from treadle.formats.packing import join_words, split_words
from treadle.formats.scale_search import FormatCoder
from treadle.jit.types import u32


def coder(grid: Codebook, ladder: F32Array, unit: int, signs: Any) -> FormatCoder:
    """Return the search of a format with the codebook ``grid``, and ``ladder`` as its allowed
    steps.

    ``unit`` times the steps are odd numbers; ``signs``: see ``FormatCoder``. As in IQ2, the largest
    weight may get any magnitude, and the largest scale any step.
    """
    points = Nearest(grid, 16)
    top = grid.alphabet[-1]
    ends = 1 / np.array(grid.alphabet)
    return FormatCoder(
        sub=32,
        ladder=ladder,
        encode=points.encode,
        scales=np.concatenate([np.geomspace(0.6, 1.5, 14) / top, ends]).astype(np.float32),
        shares=np.concatenate([1 / ladder, unit / np.geomspace(4, 50, 12)]).astype(np.float32),
        signs=signs,
        points=points,
    )


# -- IQ3_XXS -----------------------------------------------------------------------------------

XXS_LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (64,)), ("scales_and_signs", "<u4", (8,))])
XXS_LADDER = (np.arange(16, dtype=np.float32) + np.float32(0.5)) / np.float32(2)
XXS_CODER = coder(XXS_GRID, XXS_LADDER, 4, "even")


def read_xxs(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``(scale + 0.5) / 2`` [..., 8] and signed points [..., 256]."""
    words = blocks["scales_and_signs"]
    sign = signs.even_signs()[split_words(words, 4, 7)]
    found = XXS_GRID.points[blocks["qs"]]
    return XXS_LADDER[words >> np.uint32(28)], signs.apply_signs(found, sign)


def write_xxs(out: Blocks, found: Any) -> None:
    """Pack ``found``, a ``ScaleFit`` (codes, signs, scales), into blocks [n]."""
    out["qs"] = found.codes
    sign = join_words(found.signs & np.uint8(127), 4, 7, "<u4")
    out["scales_and_signs"] = sign | found.steps.astype(np.uint32) << np.uint32(28)


def unpack_xxs(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit signed points, plus 64."""
    points = [gather_points(k, XXS_GRID, index, 64) for index in codes_per_4(k, field("qs"))]
    return apply_signs(
        k, points, signs_of_7_bits(k, sign_bytes(k, field("scales_and_signs")), 0), 64
    )


def scales_xxs(k: Builder, isa: Isa, field: Field) -> tuple[Val, None]:
    """Implement ``Codes.scales``: emit ``d * (2 * scale + 1) / 4``."""
    words = field("scales_and_signs")
    steps = words.bits(u32 * (words.ty.lanes // 4)) >> 28
    return odd_steps(k, isa, steps, field("d"), 1 / 4), None


XXS_CODES = Codes(unpack_xxs, 64, 126, run=8, order=ORDER, gathers=True, scales=scales_xxs)
IQ3_XXS = super_blocks("IQ3_XXS", 18, XXS_LAYOUT, read_xxs, write_xxs, XXS_CODER, XXS_CODES)


# -- IQ3_S -------------------------------------------------------------------------------------

S_LAYOUT = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", (64,)),
        ("qh", "u1", (8,)),
        ("signs", "u1", (32,)),
        ("scales", "u1", (4,)),
    ]
)
S_LADDER = 1 + 2 * np.arange(16, dtype=np.float32)
S_CODER = coder(S_GRID, S_LADDER, 1, "any")


def read_s(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``1 + 2 * scale`` [..., 8] and signed points [..., 256]."""
    high = split_words(blocks["qh"], 8, 1).astype(np.uint16)
    found = S_GRID.points[blocks["qs"] | high << np.uint16(8)]
    return S_LADDER[split_words(blocks["scales"], 2, 4)], signs.apply_signs(found, blocks["signs"])


def write_s(out: Blocks, found: Any) -> None:
    """Pack ``found``, a ``ScaleFit`` (codes, signs, scales), into blocks [n]."""
    out["qs"] = found.codes & 255
    out["signs"] = found.signs
    out["qh"] = join_words(found.codes >> 8, 8, 1, "u1")
    out["scales"] = join_words(found.steps, 2, 4, "u1")


def unpack_s(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit signed points, plus 16."""
    qh = field("qh")
    points = []
    spread = k.shuffle(qh, k.zero(qh.ty), [at for s in range(8) for at in (s, 8, 8, 8) * 2])
    high = spread.bits(u32 * 16)  # two per sub-block: for its even points and for its odd ones
    for i, low in enumerate(codes_per_4(k, field("qs"))):
        bit = (high << k.const([8 - 2 * i, 7 - 2 * i] * 8, high.ty)) & 256
        points.append(gather_points(k, S_GRID, low | bit, 16))
    return apply_signs(k, points, sign_bytes(k, field("signs")), 16)


S_CODES = Codes(unpack_s, 16, 31, run=8, order=ORDER, gathers=True, scales=nibble_scales(1))
IQ3_S = super_blocks("IQ3_S", 21, S_LAYOUT, read_s, write_s, S_CODER, S_CODES)
