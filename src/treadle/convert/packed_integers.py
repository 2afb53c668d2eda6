"""Matrices of quantised checkpoints in whole numbers: ``w = scale * (code - zero)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from treadle.convert.unpack import BLOCK, WORD, split_awq, split_words, whole_numbers
from treadle.convert.unpacked import (
    INT8,
    INT32,
    MULTIPLIED_OUT,
    Array,
    Found,
    matrix,
    numbers,
    take,
    unpacked,
)
from treadle.errors import UnsupportedError
from treadle.files.safetensors import SafeTensor


def read_bytes(found: Found, name: str, tensor: SafeTensor) -> None:
    """I8 [M, K] with ``name``_scale, and maybe ``name``_zero_point."""
    scale = take(found, tensor, f"{name}_scale")
    zero = found.pop(f"{name}_zero_point", None)
    m, k = matrix(tensor)
    grid = m, _scales_a_row(scale, m, k)
    blocks = zero is None and k // grid[1] % BLOCK == 0
    dtype = "Q8_0" if blocks else _floats_of(scale)

    def make(codes: Array, scales: Array, *zeros: Array) -> Array:
        shift = _on(grid, zeros[0].astype(np.int16)) if zeros else np.zeros(grid, np.int16)
        return whole_numbers(dtype, codes, _on(grid, scales), shift)

    found[name] = unpacked(name, dtype, (m, k), _there(tensor, scale, zero), make)


def read_scaled_rows(found: Found, name: str, scale: SafeTensor) -> None:
    """bitsandbytes' I8: the largest magnitude of a row became 127."""
    tensor = found.get(name)
    if tensor is None or tensor.dtype != INT8:
        raise scale.error(f"is there without {name} in I8")
    m, k = matrix(tensor)
    if scale.shape != (m,):
        raise scale.error(f"shape {list(scale.shape)}", str([m]))
    dtype = "BF16" if k % BLOCK else "Q8_0"

    def make(codes: Array, scales: Array) -> Array:
        each = (scales[:, None] / 127).astype(np.float32)
        return whole_numbers(dtype, codes, each, np.zeros((m, 1), np.int16))

    found[name] = unpacked(name, dtype, (m, k), (tensor, scale), make)


def read_rows(found: Found, name: str, tensor: SafeTensor, said: Sequence[int]) -> None:
    """compressed-tensors' words along K [M, K * bits / 32], zero points in words along M, each
    larger by half the range; ``said``: the bits that config.json speaks of.
    """
    scale, size = take(found, tensor, f"{name}_scale"), found.pop(f"{name}_shape", None)
    zero, order = (found.pop(f"{name}_{part}", None) for part in ("zero_point", "g_idx"))
    m, n_words = matrix(tensor)
    k = int(numbers(size).reshape(-1)[-1]) if size else 0
    a_word = {WORD // n for n in said if n in (2, 4, 8)}  # codes
    fits = [n for n in a_word if -(-k // n) == n_words or not k]
    if tensor.dtype != INT32 or len(fits) != 1:
        told = " or ".join(str(n) for n in sorted(set(said))) or "no"
        what = f"shape {list(tensor.shape)} in {tensor.dtype}, for {k} weights a row of {told} bits"
        raise UnsupportedError(f"{tensor.path}: {tensor.name}: {what}")
    n_bits, k = WORD // fits[0], k or n_words * fits[0]
    grid = m, _scales_a_row(scale, m, k)
    groups = _order(order, k, grid[1])
    dtype = _dtype_of(n_bits, k // grid[1], zero is None, groups, scale)

    def make(words: Array, scales: Array, *zeros: Array) -> Array:
        codes = split_words(words, n_bits)[:, :k]
        middle = np.full(grid, 1 << (n_bits - 1), np.int16)
        shift = split_words(zeros[0].T, n_bits)[:, :m].T.astype(np.int16) if zeros else middle
        return whole_numbers(dtype, codes, _on(grid, scales), shift, groups)

    found[name] = unpacked(name, dtype, (m, k), _there(tensor, scale, zero), make)


def read_columns(
    found: Found, name: str, tensor: SafeTensor, said: int, *, zeros_lack: int
) -> None:
    """GPTQ's words along K [K * bits / 32, M], with ``qzeros`` [G, M * bits / 32], ``scales`` [G,
    M], and maybe each weight's group, ``g_idx`` [K]. ``said``: bits, where there is none.
    """
    module = name.removesuffix("weight")
    zero, scale = (take(found, tensor, module + part) for part in ("qzeros", "scales"))
    order = found.pop(module + "g_idx", None)
    (n_words, m), n_scales = matrix(tensor), matrix(scale)[0]
    k = order.shape[0] if order is not None and order.shape else n_words * WORD // said
    bits = n_words * WORD // max(1, k)
    if bits not in (2, 3, 4, 8) or n_words * WORD != k * bits or n_words % bits:
        raise tensor.error(f"shape {list(tensor.shape)} for rows of {k} weights")
    if scale.shape != (n_scales, m) or k % n_scales:
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {[m, k]}")
    if zero.shape != (n_scales, m * bits // WORD) or zero.dtype != INT32:
        raise zero.error(f"shape {list(zero.shape)}", f"{[n_scales, m * bits // WORD]} in I32")
    groups = _order(order, k, n_scales)

    def zeros_of(words: Array) -> Array:
        codes = split_words(words, bits) + np.uint8(zeros_lack) & ((1 << bits) - 1)
        return codes.T.astype(np.int16)

    middle = bool((zeros_of(zero.data.view("<i4").reshape(zero.shape)) == 1 << (bits - 1)).all())
    dtype = _dtype_of(bits, k // n_scales, middle, groups, scale)

    def make(words: Array, zeros: Array, scales: Array) -> Array:
        return whole_numbers(dtype, split_words(words.T, bits), scales.T, zeros_of(zeros), groups)

    found[name] = unpacked(name, dtype, (m, k), (tensor, zero, scale), make)


def read_awq(found: Found, name: str, tensor: SafeTensor) -> None:
    """AWQ's words along M [K, M / 8], with ``qzeros`` [G, M / 8] and ``scales`` [G, M]."""
    module = name.removesuffix("weight")
    zero, scale = (take(found, tensor, module + part) for part in ("qzeros", "scales"))
    (k, n_words), n_scales = matrix(tensor), matrix(scale)[0]
    m = n_words * WORD // 4
    if scale.shape != (n_scales, m) or k % n_scales:
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {[m, k]}")
    if zero.shape != (n_scales, n_words):
        raise zero.error(f"shape {list(zero.shape)}", str([n_scales, n_words]))
    dtype = _dtype_of(4, k // n_scales, False, None, scale)
    found[name] = unpacked(name, dtype, (m, k), (tensor, zero, scale), partial(_awq, dtype=dtype))


def _awq(words: Array, zeros: Array, scales: Array, dtype: str) -> Array:
    codes, shift = split_awq(words).T, split_awq(zeros).T.astype(np.int16)
    return whole_numbers(dtype, codes, scales.T, shift)


def _on(grid: tuple[int, int], values: Array) -> Array:
    """One number, one a row, or [M, G], as [M, G]."""
    return np.broadcast_to(values.reshape(-1, grid[1]), grid)


def _there(*sources: SafeTensor | None) -> tuple[SafeTensor, ...]:
    return tuple(each for each in sources if each is not None)


def _scales_a_row(scale: SafeTensor, m: int, k: int) -> int:
    """[M, G], [M], or one: G. FileError for others."""
    n = scale.shape[-1] if len(scale.shape) > 1 else 1
    rows = math.prod(scale.shape) // max(1, n)
    if len(scale.shape) > 2 or rows not in (1, m) or n < 1 or k % n:
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {[m, k]}")
    return n


def _order(order: SafeTensor | None, k: int, n_scales: int) -> Array | None:
    """Each weight's group, int64 [K]; None where they follow each other."""
    if order is None:
        return None
    groups = order.data.view("<i4").astype(np.int64)
    if order.dtype != INT32 or groups.shape != (k,) or groups.max() >= n_scales:
        raise order.error(f"shape {list(order.shape)} in {order.dtype}", f"{k} numbers in I32")
    in_order = (groups < 0).all() or np.array_equal(groups, np.arange(k) // (k // n_scales))
    if not in_order and groups.min() < 0:
        raise order.error("has numbers below 0", f"{k} numbers below {n_scales}")
    return None if in_order else groups


def _dtype_of(bits: int, group: int, middle: bool, groups: Array | None, scale: SafeTensor) -> str:
    """Blocks that hold the same numbers; ``middle``: every zero point is the middle code."""
    if groups is not None or group % BLOCK or (bits > 4 and not middle):
        return _floats_of(scale)
    if bits > 4:
        return "Q8_0"
    return "Q4_0" if middle else "Q4_1"


def _floats_of(scale: SafeTensor) -> str:
    """What products with these scales are kept in."""
    return scale.dtype if scale.dtype in MULTIPLIED_OUT else "BF16"
