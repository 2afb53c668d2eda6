"""F32, F16, BF16 and F64: unquantised weights."""

from __future__ import annotations

import numpy as np

from treadle.formats.format import Blocks, Builder, Emit, F32Array, Format, Isa, Val
from treadle.jit.types import f16, f32, f64, u16, u32


def ieee(name: str, ggml_id: int, dtype: str, load: Emit) -> Format:
    """Return the format called ``name`` for numpy's float type ``dtype``; ``load``: see
    ``Format.load``.

    Quantising rounds to nearest even and overflows to infinity, as in ggml; F32 is copied bit for
    bit, NaNs included.
    """

    def dequantize(blocks: Blocks) -> F32Array:
        with np.errstate(over="ignore", under="ignore"):
            return blocks.astype(np.float32, copy=False)[..., None]

    def quantize(x: F32Array, weights: F32Array | None = None) -> Blocks:
        with np.errstate(over="ignore", under="ignore"):
            return x[..., 0].astype(dtype, copy=False)

    return Format(name, ggml_id, 1, np.dtype(dtype), dequantize, quantize, load=load)


# Each ``load`` reads ``n`` weights at ``p`` as ``f32 * lanes``, padded with zeros; ``align`` is the
# known alignment of ``p`` in bytes.


def load_f32(k: Builder, isa: Isa, p: Val, lanes: int, n: int, align: int = 1) -> Val:
    """Emit a load of ``n`` F32 weights at ``p`` as ``f32 * lanes``, padded with zeros. ``align``:
    known alignment of ``p`` in bytes.
    """
    return k.load_first(p, f32 * lanes, n, align)


def load_f16(k: Builder, isa: Isa, p: Val, lanes: int, n: int, align: int = 1) -> Val:
    """Emit a load of ``n`` F16 weights at ``p``, widened by ``Isa.widen_f16``, as ``f32 * lanes``,
    padded with zeros. ``align``: known alignment of ``p`` in bytes.
    """
    return isa.widen_f16(k, k.load_first(p, f16 * lanes, n, align))


def load_f64(k: Builder, isa: Isa, p: Val, lanes: int, n: int, align: int = 1) -> Val:
    """Emit a load of ``n`` F64 weights at ``p``, rounded to f32, as ``f32 * lanes``, padded with
    zeros. ``align``: known alignment of ``p`` in bytes.
    """
    return k.load_first(p, f64 * lanes, n, align).to(f32)


F32 = ieee("F32", 0, "<f4", load_f32)
F16 = ieee("F16", 1, "<f2", load_f16)
F64 = ieee("F64", 28, "<f8", load_f64)


# -- BF16: the upper half of a float32 ---------------------------------------------------------


def from_bf16(numbers: Blocks) -> F32Array:
    """Convert bf16 bits [...] to float32 [...]; exact."""
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: F32Array) -> Blocks:
    """Convert float32 [...] to bf16 bits [...], to nearest even.

    Rounding a NaN could carry into its exponent and yield an infinity or a zero, so a NaN is
    truncated instead, with its quiet bit set (as in ggml).
    """
    u = x.view(np.uint32)
    rounded = u >> np.uint32(16)  # in place from here on: memory bandwidth limits large matrices
    rounded &= np.uint32(1)
    rounded += u
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    if (nan := np.isnan(x)).any():
        rounded = np.where(nan, u >> np.uint32(16) | np.uint32(0x40), rounded)
    return rounded.astype("<u2")


def load_bf16(k: Builder, isa: Isa, p: Val, lanes: int, n: int, align: int = 1) -> Val:
    """Emit a load of ``n`` BF16 weights at ``p``, whose bits become the upper half of an f32, as
    ``f32 * lanes``, padded with zeros. ``align``: known alignment of ``p`` in bytes.
    """
    return (k.load_first(p, u16 * lanes, n, align).to(u32) << 16).bits(f32 * lanes)


BF16 = Format(
    "BF16",
    30,
    1,
    np.dtype("<u2"),
    lambda blocks: from_bf16(blocks)[..., None],
    lambda x, weights=None: to_bf16(x[..., 0]),
    "bf16",
    load=load_bf16,
)
