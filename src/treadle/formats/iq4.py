"""IQ4_NL and IQ4_XS: weights as 4-bit indices of 16 unevenly spaced values, denser around zero.

IQ4_NL has 32 weights, ``w = d * STEPS[q]``; byte j of ``qs`` holds weight j in its low nibble and
weight j + 16 in its high one. IQ4_XS has 8 sub-blocks of 32 packed so, ``w = d * (scale - 32) *
STEPS[q]``. A scale's low 4 bits are a nibble of ``scales_l`` (low one first), its high 2 bits a
pair of ``scales_h``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Isa, Val
from treadle.formats.kernel_bits import load_halves, lookup_nibbles, paired_words
from treadle.formats.kernel_scales import halves, in_floats, repeat
from treadle.formats.numbers import one_scale, super_blocks
from treadle.formats.packing import join_bits, join_words, split_bits, split_words
from treadle.formats.scale_search import FormatCoder
from treadle.jit.types import i32, u8, u16, u32

STEPS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
STEPS.flags.writeable = False
TABLE = [128 + int(v) for v in STEPS]  # as bytes, for kernels

# Midpoints of steps are multiples of a half, so every cell of width 0.5 has one nearest step.
CELLS = 512
NEAREST = np.abs((np.arange(CELLS) - 255.5)[:, None] / 2 - STEPS).argmin(axis=1).astype(np.uint8)


def encode(
    u: F32Array, weights: F32Array | None, careful: bool
) -> tuple[npt.NDArray[np.uint8], F32Array]:
    """Implement ``FormatCoder.encode``: float32 [n, sub] -> codes and values, both [n, sub]."""
    cell = u * np.float32(2)
    cell += np.float32(CELLS // 2)
    np.clip(cell, 0, CELLS - 1, out=cell)
    codes = NEAREST.take(cell.astype(np.uint16))
    return codes, STEPS.take(codes)


def read_steps(blocks: Blocks) -> Any:
    """Unpack blocks [...] to the values ``STEPS[q]`` of their codes, float32 [..., block]."""
    return STEPS[split_bits(blocks["qs"], 4, 16)]


def write_steps(out: Blocks, found: Any) -> None:
    """Pack the codes [n, block] of ``found``, a ``ScaleFit``, into ``qs`` of blocks [n]."""
    out["qs"] = join_bits(found.codes, 4, 16)


def unpack(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit values plus 128, u8, those of low nibbles (the first 16 of
    each 32 weights), then those of high nibbles.
    """
    return lookup_nibbles(k, field, TABLE)


# -- IQ4_NL ------------------------------------------------------------------------------------

NL_LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])

# The largest magnitude may map to the last step of either sign, or beyond it; in a block of equal
# weights f16 may represent the scale of any step best. Shares below 1: where f16 is coarse.
NL_RANGE = np.geomspace(0.7, 1.25, 40) / 127
NL_CODER = FormatCoder(
    sub=32,
    ladder=np.ones(1, np.float32),
    encode=encode,
    scales=np.concatenate([NL_RANGE, -NL_RANGE, 1 / STEPS]).astype(np.float32),
    shares=np.array([1, 0.5, 0.25], np.float32),
    nearest=NEAREST,
    values=STEPS,
)
LEVELS = tuple(STEPS.tolist())
NL_CODES = Codes(unpack, 128, 241, run=16, order=((0,), (1,)), levels=LEVELS, words=paired_words)
IQ4_NL = replace(
    one_scale("IQ4_NL", 20, 32, NL_LAYOUT, read_steps, write_steps, NL_CODER.run, NL_CODES),
    search=NL_CODER,
    aware=True,
)


# -- IQ4_XS ------------------------------------------------------------------------------------

XS_LAYOUT = np.dtype(
    [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "u1", (128,))]
)
XS_RANGE = np.geomspace(0.7, 1.25, 14) / 127
SHARES = 1 / np.linspace(24, 36, 10)  # map the largest scale near an end of the ladder
XS_CODER = FormatCoder(
    sub=32,
    ladder=np.arange(-32, 32, dtype=np.float32),
    encode=encode,
    scales=np.concatenate([XS_RANGE, -XS_RANGE]).astype(np.float32),
    shares=np.concatenate([SHARES, -SHARES, [0.2, 1]]).astype(np.float32),
    nearest=NEAREST,
    values=STEPS,
)


def read_xs(blocks: Blocks) -> tuple[Any, Any]:
    """Unpack blocks [...] to steps ``scale - 32`` [..., 8] and values before scaling [..., 256]."""
    low = split_words(blocks["scales_l"], 2, 4)
    high = split_words(blocks["scales_h"][..., None], 8, 2).astype(np.uint8)
    return XS_CODER.ladder[low | high << np.uint8(4)], read_steps(blocks)


def write_xs(out: Blocks, found: Any) -> None:
    """Pack the scales and codes of ``found``, a ``ScaleFit``, into blocks [n]."""
    out["scales_l"] = join_words(found.steps & np.uint8(15), 2, 4, "u1")
    out["scales_h"] = join_words(found.steps >> np.uint8(4), 8, 2, "<u2")[:, 0]
    write_steps(out, found)


def steps_xs(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    """Implement ``Codes.steps``: emit ``scale - 32`` of the 8 sub-blocks, and ``d``."""
    head = field("d", 8)
    n = head.ty.lanes // 8
    words = head.bits(u32 * (2 * n))
    halfs = head.bits(u16 * (4 * n))
    high, low = (repeat(k, v, 8) for v in k.evens(words, 1))  # d below the high bits
    low = (low >> k.const([*range(0, 32, 4)] * n, low.ty)) & 15
    high = (high >> k.const([*range(12, 28, 2)] * n, high.ty)) & 0x30
    steps = (low | high).bits(i32 * (8 * n)) - 32
    d = k.shuffle(halfs, halfs, range(0, 4 * n, 4)).bits(u8 * (2 * n))
    return steps, halves(k, isa, d), None, None


def in_halves_xs(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves``: emit values plus 128."""
    both = [load_halves(k, field, "qs", at, 64) for at in (0, 16, 32, 48)]
    return [k.lookup(TABLE, v >> at) for v in both for at in (0, 4)]


XS_ORDER = tuple(range(0, 16, 2)), tuple(range(1, 16, 2))
XS_CODES = Codes(
    unpack,
    128,
    241,
    run=16,
    order=XS_ORDER,
    scales=in_floats(steps_xs),
    steps=steps_xs,
    in_halves=in_halves_xs,
    levels=LEVELS,
    words=paired_words,
)
IQ4_XS = super_blocks("IQ4_XS", 23, XS_LAYOUT, read_xs, write_xs, XS_CODER, XS_CODES)
