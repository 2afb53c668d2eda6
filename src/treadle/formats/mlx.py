"""MLX's affine formats: groups of 32, 64 or 128 weights of 2, 3, 4, 5, 6 or 8 bits; ``w = d * q +
m``.

A tensor is three arrays, as in MLX's safetensors: ``weight``, each row's codes as one bit stream
from the lowest bit of the first word; ``scales``, one per group; ``biases``, a minimum per group (a
maximum if the scale is negative). Scales and minimums are f16, bf16 or f32.

``MLX4_G64`` has four bits, groups of 64 and f16 scales; ``MLX4_G64_BF16`` has bf16 scales. The 54
formats are built on demand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.errors import UnsupportedError
from treadle.formats.floats import from_bf16, to_bf16
from treadle.formats.format import (
    NO_GGML,
    Blocks,
    Builder,
    Codes,
    F32Array,
    Field,
    Format,
    Isa,
    Val,
)
from treadle.formats.kernel_scales import repeat
from treadle.jit.types import f16, f32, u8, u16, u32

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
SCALES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}  # safetensors' names
SUB = 32  # codes that share a sum of activations
RUN = 16  # codes in the narrowest registers
LEAST = 1e-7  # the smallest scale of a group, as in MLX

_NAME = re.compile(r"MLX(\d)_G(\d+)(?:_(BF16|F32))?")


def mlx_name(bits: int, group: int, scales: str) -> str:
    """Return the name of the format of ``bits`` per weight and ``group`` weights per scale;
    ``scales``: "F16", "BF16" or "F32", the type of scales.
    """
    return f"MLX{bits}_G{group}" + ("" if scales == "F16" else f"_{scales}")


def named(name: str) -> Format | None:
    """Return the MLX format with this upper-case name; None if MLX has no such format."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) not in BITS or int(match[2]) not in GROUPS:
        return None
    return mlx(int(match[1]), int(match[2]), match[3] or "F16")


@cache
def mlx(bits: int, group: int, scales: str) -> Format:
    """Return the format of ``bits`` per weight and ``group`` weights per scale; ``scales``: "F16",
    "BF16" or "F32", the type of scales. Raises UnsupportedError for values that MLX does not have.
    """
    for what, value, known in (("bits", bits, BITS), ("group_size", group, GROUPS)):
        if value not in known:
            raise UnsupportedError(f"{what} {value}: MLX supports {', '.join(map(str, known))}")
    if scales not in SCALES:
        raise UnsupportedError(f"scales in {scales}: MLX supports {', '.join(SCALES)}")
    number = SCALES[scales]
    layout = np.dtype([("qs", "u1", (group * bits // 8,)), ("d", number), ("m", number)])
    n_runs = group // RUN
    nibbles = bits == 4
    codes = Codes(
        unpack_nibbles if nibbles else unpack_stream(bits),
        0,
        (1 << bits) - 1,
        run=RUN if nibbles else group,
        order=(tuple(range(0, n_runs, 2)), tuple(range(1, n_runs, 2))) if nibbles else ((0,),),
        sub=SUB,
        scales=_scales(scales, group // SUB),
        minimums=True,
        long_scales=scales == "F32",
    )
    return Format(
        mlx_name(bits, group, scales),
        NO_GGML,
        group,
        layout,
        lambda blocks: dequantize(blocks, bits),
        lambda x, weights=None: quantize(x, bits, layout),
        "q8",
        codes,
        parts=("qs", "d", "m"),
    )


# -- numpy ------------------------------------------------------------------------------------


def dequantize(blocks: Blocks, bits: int) -> F32Array:
    """Dequantise blocks [...] to float32 [..., group]; with f32 scales bit-identical to MLX.

    With f16 or bf16 scales MLX rounds product and sum to that type; treadle does not.
    """
    d, m = (_floats(blocks[name])[..., None] for name in ("d", "m"))
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN or huge scale
        scaled: F32Array = split(blocks["qs"], bits).astype(np.float32) * d + m
    return scaled


def quantize(x: F32Array, bits: int, layout: np.dtype[Any]) -> Blocks:
    """Quantise float32 [..., group] to blocks [...] of ``layout`` like MLX.

    Zero is a code, and the extreme farther from zero is represented exactly, except for the
    rounding of scale and minimum to their type.
    """
    out = np.empty(x.shape[:-1], layout)
    top = np.float32((1 << bits) - 1)
    low = x.min(-1)
    high = x.max(-1)
    with np.errstate(all="ignore"):  # NaN and infinities make their block invalid
        negative = np.abs(low) > np.abs(high)
        d = np.maximum((high - low) / top, np.float32(LEAST))
        d = np.where(negative, d, -d)
        edge = np.where(negative, low, high)
        zero = np.rint(edge / d)
        m = np.where(zero == 0, np.float32(0), edge)
        d = np.where(zero == 0, d, edge / zero)
        out["d"], out["m"] = (_numbers(v, layout["d"]) for v in (d, m))
        q = np.rint((x - m[..., None]) / d[..., None])
        q = np.where(q >= 0, np.minimum(q, top), 0)  # NaN as well
    out["qs"] = join(q.astype(np.uint8), bits)
    return out


def split(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack bytes [..., n] to codes [..., n * 8 // bits], from the lowest bit on."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    bits_of = stream.reshape(*packed.shape[:-1], -1, bits)
    filled = np.packbits(bits_of, axis=-1, bitorder="little")
    return filled[..., 0]


def join(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Pack codes [..., n] into bytes [..., n * bits // 8]; the inverse of ``split``."""
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return packed


def _floats(numbers: npt.NDArray[Any]) -> F32Array:
    if numbers.dtype.kind == "u":
        return from_bf16(numbers)
    return numbers.astype(np.float32)


def _numbers(x: F32Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return to_bf16(x) if dtype.kind == "u" else x.astype(dtype)


# -- kernels ----------------------------------------------------------------------------------


def unpack_nibbles(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack`` of 4 bits: emit codes 0..15, the first 16 of each 32, then the
    second 16.

    A byte holds two neighbouring codes, so low and high nibbles are interleaved. This is done
    within 16 bytes, which takes one instruction per vector if registers have 128-bit lanes.
    """
    qs = field("qs")
    low = qs & 15
    high = qs >> 4
    n = qs.ty.lanes
    return [
        k.shuffle(
            low,
            high,
            [
                j + side
                for at in range(0, n, RUN)
                for j in range(at + half, at + half + RUN // 2)
                for side in (0, n)
            ],
        )
        for half in (0, RUN // 2)
    ]


def unpack_stream(bits: int) -> Callable[[Builder, Field], list[Val]]:
    """Return a ``Codes.unpack`` of codes of ``bits`` bits, in order.

    Each four codes get their own dword; then the upper two move to its upper half, and the upper
    one of each pair to the upper byte.
    """

    def unpack(k: Builder, field: Field) -> list[Val]:
        qs = field("qs")
        if bits == 8:
            return [qs]
        words = four_by_four(k, qs, bits)
        pair = (1 << 2 * bits) - 1
        one = (1 << bits) - 1
        words = (words & pair) | ((words << (16 - 2 * bits)) & (pair << 16))
        words = (words & one * 0x10001) | ((words << (8 - bits)) & one * 0x1000100)
        return [words.bits(u8 * (4 * words.ty.lanes))]

    return unpack


def four_by_four(k: Builder, qs: Val, bits: int) -> Val:
    """Emit ``qs``, u8 with packed codes of ``bits`` bits, expanded to u32: lane i has codes 4 i to
    4 i + 3 in its lowest ``4 * bits`` bits. Its upper bits are undefined.

    First the bytes of each RUN codes are moved to 16 bytes of their own, dword by dword, because
    LLVM would move bytes across 16-byte lanes one by one.
    """
    pitch = bits * RUN // 8  # bytes of RUN codes
    dwords_at = []
    order = []
    shifts = []
    for run in range(qs.ty.lanes // pitch):
        first, skip = divmod(run * pitch, 4)
        last = (run * pitch + pitch - 1) // 4
        dwords_at += [min(first + j, last) for j in range(4)]
        for four in range(RUN // 4):
            byte, shift = divmod(4 * bits * four, 8)
            end = (4 * bits * (four + 1) - 1) // 8
            order += [run * RUN + skip + min(byte + j, end) for j in range(4)]
            shifts.append(shift)
    dwords = qs.bits(u32 * (qs.ty.lanes // 4))
    runs = k.shuffle(dwords, dwords, dwords_at).bits(u8 * (4 * len(dwords_at)))
    words = k.shuffle(runs, runs, order).bits(u32 * len(shifts))
    return words >> k.const(shifts, words.ty) if any(shifts) else words


def _scales(kind: str, n: int) -> Callable[[Builder, Isa, Field], tuple[Val, Val]]:
    """Return a ``Codes.scales`` (``d`` and ``m``) for groups of ``n`` times SUB weights; ``kind``:
    the type of scales, "F16", "BF16" or "F32".
    """

    def widen(k: Builder, isa: Isa, raw: Val) -> Val:
        wide: Val
        if kind == "F32":
            wide = raw.bits(f32 * (raw.ty.lanes // 4))
        elif kind == "BF16":
            short = raw.bits(u16 * (raw.ty.lanes // 2))
            wide = (short.to(u32) << 16).bits(f32.like(short.ty))
        else:
            wide = isa.widen_f16(k, raw.bits(f16 * (raw.ty.lanes // 2)))
        return repeat(k, wide, n) if n > 1 else wide

    def scales(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val]:
        return widen(k, isa, field("d")), widen(k, isa, field("m"))

    return scales
