"""Matrices of quantised checkpoints in integers: ``w = scale * (code - zero)``.

Functions that unpack a matrix raise FileError for parts that are missing or do not match.
``found``: a checkpoint's tensors by name, which they change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.convert.quantized.dequantized_tensor import (
    FLOATS,
    INT8,
    INT32,
    Array,
    Found,
    floats_of,
    matrix,
    numbers,
    pop_companion,
    pop_optional,
    shared,
    typed,
    unpacked,
)
from treadle.convert.quantized.unpack import BLOCK, WORD, split_awq, split_words, whole_numbers
from treadle.errors import UnsupportedError
from treadle.files.safetensors import SafeTensor

# Increment of packed zero-point words of GPTQModel's first version, by bits: one per code. With
# three bits GPTQModel swaps the first and the last word. Words wrap, because one was subtracted
# from zero points of 0 as well.
_ONE_MORE = {
    2: (0x55555555,),
    3: (0x24924924, 0x92492492, 0x49249249),
    4: (0x11111111,),
    8: (0x01010101,),
}


def read_bytes(found: Found, name: str, tensor: SafeTensor, sizes: Sequence[int]) -> None:
    """Replace I8 ``name`` [M, K] in ``found`` by Q8_0 or floats, with ``name``_scale and an
    optional ``name``_zero_point; ``sizes``: candidate group sizes.
    """
    scale = pop_companion(found, tensor, f"{name}_scale")
    zero = pop_optional(found, f"{name}_zero_point", (INT8,))
    m, k = matrix(tensor)
    grid = m, _scales_a_row(scale, m)
    if shared(k, grid[1], k, *sizes) * grid[1] != k or (zero and zero.shape != scale.shape):
        beside = f", {list(zero.shape)} zero points" if zero else ""
        raise scale.error(f"shape {list(scale.shape)}{beside} for weights of shape {[m, k]}")
    blocks = zero is None and k // grid[1] % BLOCK == 0
    dtype = "Q8_0" if blocks else floats_of(scale)

    def make(codes: Array, scales: Array, *zeros: Array) -> Array:
        shift = _broadcast(grid, zeros[0].astype(np.int16)) if zeros else np.zeros(grid, np.int16)
        return whole_numbers(dtype, codes, _broadcast(grid, scales), shift)

    found[name] = unpacked(name, dtype, (m, k), _present(tensor, scale, zero), make)


def read_scaled_rows(found: Found, name: str, scale: SafeTensor) -> None:
    """Replace bitsandbytes' I8 ``name`` [M, K] in ``found`` by Q8_0 or BF16. ``scale`` [M] has the
    largest magnitude of each row, which code 127 stands for.
    """
    tensor = found.get(name)
    if tensor is None or tensor.dtype != INT8:
        raise scale.error(f"has no {name} in I8")
    m, k = matrix(tensor)
    if typed(scale, FLOATS).shape != (m,):
        raise scale.error(f"shape {list(scale.shape)}", str([m]))
    dtype = "BF16" if k % BLOCK else "Q8_0"

    def make(codes: Array, scales: Array) -> Array:
        each = (scales[:, None] / 127).astype(np.float32)
        return whole_numbers(dtype, codes, each, np.zeros((m, 1), np.int16))

    found[name] = unpacked(name, dtype, (m, k), (tensor, scale), make)


def read_rows(
    found: Found, name: str, tensor: SafeTensor, said: Sequence[int], sizes: Sequence[int]
) -> None:
    """Unpack compressed-tensors' int32 words along K, [M, K * bits / 32], into ``found[name]``;
    zero points are in words along M, offset by half the range.

    ``said``: candidate bits in config.json, ``sizes``: candidate group sizes. Raises FileError,
    UnsupportedError.
    """
    scale = pop_companion(found, tensor, f"{name}_scale")
    zero = pop_optional(found, f"{name}_zero_point", [INT32])
    size = pop_optional(found, f"{name}_shape", (INT32, "I64"))
    order = found.pop(f"{name}_g_idx", None)
    m, n_words = matrix(tensor)
    if size and (size.shape != (2,) or numbers(size)[0] != m):
        raise size.error(f"shape {list(size.shape)}", f"two numbers, the first {m}")
    k = int(numbers(size)[1]) if size else 0
    a_word = {WORD // n for n in said if n in (2, 4, 8)}  # codes
    fits = [n for n in a_word if -(-k // n) == n_words or not k]
    if tensor.dtype != INT32 or len(fits) != 1:
        told = " or ".join(str(n) for n in sorted(set(said))) or "no"
        what = f"shape {list(tensor.shape)} in {tensor.dtype}, {k} weights per row of {told} bits"
        raise UnsupportedError(f"{tensor.path}: {tensor.name}: {what}")
    n_bits = WORD // fits[0]
    k = k or n_words * fits[0]
    grid = m, _scales_a_row(scale, m)
    if not (group := shared(k, grid[1], k, *sizes)):
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {[m, k]}")
    if zero and zero.shape != (packed := (-(-m // fits[0]), grid[1])):
        raise zero.error(f"shape {list(zero.shape)}", f"{list(packed)}")
    groups = _order(order, k, group, grid[1])
    dtype = _dtype_of(n_bits, group, zero is None, groups, scale)

    def make(words: Array, scales: Array, *zeros: Array) -> Array:
        codes = split_words(words, n_bits)[:, :k]
        middle = np.full(grid, 1 << (n_bits - 1), np.int16)
        shift = split_words(zeros[0].T, n_bits)[:, :m].T.astype(np.int16) if zeros else middle
        return whole_numbers(dtype, codes, _broadcast(grid, scales), shift, groups)

    found[name] = unpacked(name, dtype, (m, k), _present(tensor, scale, zero), make)


@dataclass(frozen=True)
class GptqLayout:
    """GPTQ settings common to all matrices.

    bits: bits per code, unless the length of ``g_idx`` implies others.
    size: weights per group; -1: a whole row.
    ordered: with ``desc_act``, the weights of a group may be anywhere in a row.
    codes_lack: amount by which each stored zero point is too small.
    words_lack: whole words are decremented, as in GPTQModel's first version.
    """

    bits: int
    size: int
    ordered: bool
    codes_lack: int
    words_lack: bool


def read_columns(found: Found, name: str, tensor: SafeTensor, said: GptqLayout) -> None:
    """Unpack GPTQ's int32 words along K, [K * bits / 32, M], into ``found[name]``, with ``qzeros``
    [G, M * bits / 32], ``scales`` [G, M], and optionally each weight's group, ``g_idx`` [K].
    ``said``: the settings of config.json.
    """
    module = name.removesuffix("weight")
    g_idx = f"{module}g_idx"
    zero = pop_companion(found, tensor, f"{module}qzeros", [INT32])
    scale = pop_companion(found, tensor, f"{module}scales")
    order = pop_companion(found, tensor, g_idx, [INT32]) if said.ordered else found.pop(g_idx, None)
    (n_words, m), n_scales = matrix(typed(tensor, [INT32])), matrix(scale)[0]
    k = order.shape[0] if order is not None and order.shape else n_words * WORD // said.bits
    bits = n_words * WORD // max(1, k)
    if bits not in _ONE_MORE or n_words * WORD != k * bits or n_words % bits:
        raise tensor.error(f"shape {list(tensor.shape)} for rows of {k} weights")
    group = shared(k, n_scales, said.size, k // n_scales)
    if scale.shape != (n_scales, m) or not group:
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {[m, k]}")
    if zero.shape != (n_scales, m * bits // WORD) or m * bits % WORD:
        raise zero.error(f"shape {list(zero.shape)}", f"{[n_scales, m * bits // WORD]}")
    groups = _order(order, k, group, n_scales)

    def zeros_of(words: Array) -> Array:
        if said.words_lack:
            more = np.array(_ONE_MORE[bits], np.uint32)
            words = words.view(np.uint32) + np.resize(more, words.shape[1])
        codes = split_words(words, bits) + np.uint8(said.codes_lack) & ((1 << bits) - 1)
        return codes.T.astype(np.int16)

    middle = bool((zeros_of(numbers(zero)) == 1 << (bits - 1)).all())
    dtype = _dtype_of(bits, group, middle, groups, scale)

    def make(words: Array, zeros: Array, scales: Array) -> Array:
        return whole_numbers(dtype, split_words(words.T, bits), scales.T, zeros_of(zeros), groups)

    found[name] = unpacked(name, dtype, (m, k), (tensor, zero, scale), make)


def read_awq(found: Found, name: str, tensor: SafeTensor) -> None:
    """Unpack AWQ's int32 words along M, [K, M / 8], into ``found[name]``, with ``qzeros`` [G, M /
    8] and ``scales`` [G, M].
    """
    module = name.removesuffix("weight")
    zero = pop_companion(found, tensor, f"{module}qzeros", [INT32])
    scale = pop_companion(found, tensor, f"{module}scales")
    (k, n_words), n_scales = matrix(typed(tensor, [INT32])), matrix(scale)[0]
    m = n_words * WORD // 4
    if scale.shape != (n_scales, m) or k % n_scales:
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {[m, k]}")
    if zero.shape != (n_scales, n_words):
        raise zero.error(f"shape {list(zero.shape)}", str([n_scales, n_words]))
    dtype = _dtype_of(4, k // n_scales, False, None, scale)
    found[name] = unpacked(name, dtype, (m, k), (tensor, zero, scale), partial(_awq, dtype=dtype))


def _awq(words: Array, zeros: Array, scales: Array, dtype: str) -> Array:
    codes = split_awq(words).T
    shift = split_awq(zeros).T.astype(np.int16)
    return whole_numbers(dtype, codes, scales.T, shift)


def _broadcast(grid: tuple[int, int], values: Array) -> Array:
    """Broadcast scales or zero points, [M, G], [M] or a single one, to ``grid``, [M, G]."""
    return np.broadcast_to(values.reshape(-1, grid[1]), grid)


def _present(*sources: SafeTensor | None) -> tuple[SafeTensor, ...]:
    return tuple(each for each in sources if each is not None)


def _scales_a_row(scale: SafeTensor, m: int) -> int:
    """Return the number of scales per row, G, for scales [M, G], [M] or a single one. Raises
    FileError for other shapes.
    """
    n = scale.shape[-1] if len(scale.shape) > 1 else 1
    if len(scale.shape) > 2 or n < 1 or math.prod(scale.shape) not in (1, m * n):
        raise scale.error(f"shape {list(scale.shape)} for {m} rows")
    return n


def _order(order: SafeTensor | None, k: int, group: int, n_scales: int) -> Array | None:
    """Return the scale group of each of the ``k`` weights in a row, int64 [K], from ``order``
    (``g_idx``) if it is given; None if groups of ``group`` weights are contiguous and whole. Raises
    FileError for invalid groups.
    """
    in_turn = np.arange(k) // group
    if order is None:
        return None if k % group == 0 else in_turn
    groups = numbers(typed(order, [INT32])).astype(np.int64)
    if groups.shape != (k,) or groups.max() >= n_scales:
        raise order.error(f"shape {list(order.shape)}", f"{k} numbers below {n_scales}")
    if (groups < 0).all():
        groups = in_turn
    if groups.min() < 0:
        raise order.error("has numbers below 0", f"{k} numbers below {n_scales}")
    return None if k % group == 0 and np.array_equal(groups, in_turn) else groups


def _dtype_of(bits: int, group: int, middle: bool, groups: Array | None, scale: SafeTensor) -> str:
    """Return Q4_0, Q4_1 or Q8_0 if it holds the same numbers, else a float type. ``bits``: per
    code; ``group``: weights per scale; ``middle``: every zero point is the middle code; ``groups``:
    as ``_order`` returns them.
    """
    if groups is not None or group % BLOCK or (bits > 4 and not middle):
        return floats_of(scale)
    if bits > 4:
        return "Q8_0"
    return "Q4_0" if middle else "Q4_1"
