"""Matrices of quantised checkpoints in 8-bit and 4-bit floats, and in lookup tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from treadle.convert.quantized.dequantized_tensor import (
    EXPONENTS,
    FLOATS,
    Array,
    Found,
    matrix_shape,
    one_number,
    pop_companion,
    shared,
    unpacked,
)
from treadle.convert.quantized.unpack import (
    E4M3,
    FLOAT8,
    MX_GROUP,
    NV_BLOCK,
    NV_GROUP,
    float4,
    float8,
    from_float8,
    from_mxfp4,
    from_nvfp4,
    from_table,
    is_nonfinite,
    powers,
    to_bytes,
)
from treadle.convert.sources.derived_tensors import FACTOR, Make
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import SafeTensor

Sizes = tuple[Sequence[int], Sequence[int]]  # candidate rows and columns per scale; (): not given

NO_POWER = 255  # NaN as an exponent
_MOST = 1e9  # limit of a setting


def is_float8(tensor: SafeTensor) -> bool:
    """Return whether the tensor's type is an 8-bit float that holds weights."""
    return tensor.dtype in FLOAT8


def read_float8(found: Found, name: str, tensor: SafeTensor, said: Sizes) -> None:
    """Replace the 8-bit floats ``name`` in ``found`` by BF16: multiplied by ``name``_scale, or by
    ``name``_scale_inv, which holds the scale itself.

    There is one scale for all, per row, per block (candidate sizes ``said``), or per matrix of a
    stack; a float, or an exponent of a power of two. Raises FileError for other shapes.
    """
    end = "_scale_inv" if f"{name}_scale_inv" in found else "_scale"
    scale, shape = (
        pop_companion(found, tensor, name + end, (*FLOATS, *EXPONENTS)),
        matrix_shape(tensor),
    )
    grid = _grid(scale.shape, shape)
    (n, k), (rows, columns) = shape[-2:], grid[-2:]
    if (rows, columns) in ((1, 1), (n, 1)):
        m = n // rows
    else:
        m, k = shared(n, rows, *said[0], 1), shared(k, columns, *said[1])
    if not m or not k:
        raise scale.error(f"shape {list(scale.shape)} for weights of shape {list(shape)}")

    def make(codes: Array, scales: Array) -> Array:
        if scale.dtype in EXPONENTS:
            scales = powers(scales)
        each = np.broadcast_to(scales.reshape(grid), (*shape[:-2], *grid[-2:]))
        return from_float8(codes, each, (m, k), tensor.dtype)

    found[name] = unpacked(name, "BF16", shape, (tensor, scale), make)


def _grid(scales: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape ``scales`` with as many axes as ``shape``, that of the weights; zeros if it
    does not match.
    """
    if math.prod(scales) == 1:
        return (1,) * len(shape)
    if scales == shape[:-1]:  # one a row
        return *scales, 1
    if scales == shape[:-2]:  # one a matrix
        return *scales, 1, 1
    if len(scales) == len(shape) and scales[:-2] in (shape[:-2], (1,) * (len(shape) - 2)):
        return scales
    return (0,) * len(shape)


def read_float4(
    found: Found, name: str, tensor: SafeTensor, whole: str = "", *, divides: bool = False
) -> None:
    """Replace the pairs of E2M1 ``name`` in ``found`` by blocks: with powers of two in
    ``name``_scale MXFP4, with E4M3 scales NVFP4.

    ``whole``: name of a factor that multiplies (if ``divides``, divides) all weights of NVFP4; "":
    none. Rows that are not whole NVFP4 blocks become BF16. Raises FileError for scales of another
    shape.
    """
    scale = pop_companion(found, tensor, f"{name}_scale", (E4M3, *EXPONENTS))
    *others, half = matrix_shape(tensor)
    shape = (*others, 2 * half)
    group = NV_GROUP if scale.dtype == E4M3 else MX_GROUP
    if scale.shape != (*others, shape[-1] // group) or shape[-1] % group:
        said = f"one scale per {group} of {list(shape)} weights"
        raise scale.error(f"shape {list(scale.shape)}", said)
    if group == MX_GROUP:
        found[name] = unpacked(name, "MXFP4", shape, (tensor, scale), _packed(scale, from_mxfp4))
        return
    factors = (one_number(pop_companion(found, tensor, whole)),) if whole else ()
    if shape[-1] % NV_BLOCK:
        make: Make = partial(_multiplied, divides=divides)
        found[name] = unpacked(name, "BF16", shape, (tensor, scale, *factors), make)
        return
    found[name] = unpacked(name, "NVFP4", shape, (tensor, scale), _packed(scale, from_nvfp4))
    for factor in factors:
        beside = name.removesuffix(".weight") + FACTOR
        found[beside] = unpacked(beside, "F32", (1,), (factor,), partial(_factor, divides=divides))


def _packed(scale: SafeTensor, pack: Make) -> Make:
    """Return ``pack`` with a check that raises FileError for NaN scales, which GGUF's types would
    read as 0 or 2**127.
    """

    def make(pairs: Array, scales: Array) -> Array:
        bad = is_nonfinite(scales, E4M3) if scale.dtype == E4M3 else scales == NO_POWER
        if bad.any():
            row = int(bad.reshape(-1, bad.shape[-1]).any(-1).argmax())
            raise scale.error(f"has a non-finite scale in row {row}")
        return pack(pairs, scales)

    return make


def _factor(number: Array, divides: bool) -> Array:
    value = number.reshape(1).astype(np.float32)
    return 1 / value if divides else value


def _multiplied(pairs: Array, scales: Array, *numbers: Array, divides: bool) -> Array:
    """Return NVFP4 weights as BF16 bytes, for rows that are not whole blocks: pairs of E2M1 times
    E4M3 ``scales``, times (or, if ``divides``, divided by) each of ``numbers``.
    """
    each = float8(scales, E4M3)
    for number in numbers:
        each = each * _factor(number, divides)
    return to_bytes(float4(pairs) * np.repeat(each, NV_GROUP, -1), "BF16")


def read_table(found: Found, name: str, state: SafeTensor) -> None:
    """Replace bitsandbytes' 4-bit weights ``name`` in ``found`` by F16 or BF16.

    Each code selects one of 16 values, scaled by ``absmax`` per ``blocksize`` weights; the scales
    may be 8-bit codes of a second table. ``state``: the tensor with the settings as JSON. Raises
    FileError for parts that are missing or do not match.
    """
    if name not in found:
        raise state.error(f"has no {name}")
    tensor = found[name]
    try:
        said = json.loads(bytes(state.data))
    except (ValueError, RecursionError) as error:
        raise state.error(f"is not JSON: {error}") from error
    keys = MetadataReader(
        said if isinstance(said, dict) else {}, state.path, prefix=f"{state.name}: "
    )
    shape = keys.get("shape")
    block = keys.integer("blocksize")
    if not (isinstance(shape, list) and [type(n) for n in shape] == [int, int] and min(shape) > 0):
        keys.fail("shape", f"is {shape!r:.60}", "rows and columns")
    m, k = shape
    scale = pop_companion(found, tensor, f"{name}.absmax", (*FLOATS, "U8"))
    table = pop_companion(found, tensor, f"{name}.quant_map")
    n_scales = -(-m * k // block)  # the last block may be short
    n_bytes = -(-m * k // 2)
    if (tensor.n_bytes, math.prod(scale.shape)) != (n_bytes, n_scales) or block % 2:
        what = f"{tensor.n_bytes} bytes and {math.prod(scale.shape)} scales"
        raise tensor.error(what, f"{[m, k]} 4-bit weights with one scale per {block}")
    if table.shape != (16,):
        raise table.error(f"shape {list(table.shape)}", "[16]")
    # Read as bytes, whatever their stored type.
    sources = [replace(tensor, dtype="U8", shape=(n_bytes,)), table, scale]
    offset = 0.0
    a_scale = 1
    if scale.dtype == "U8":
        parts = (f"{name}.nested_{part}" for part in ("quant_map", "absmax"))
        sources += [pop_companion(found, tensor, part) for part in parts]
        offset = keys.number("nested_offset", lo=-_MOST, hi=_MOST)
        a_scale = keys.integer("nested_blocksize")
        if (sources[-2].shape, sources[-1].shape) != ((256,), (-(-n_scales // a_scale),)):
            raise sources[-1].error(f"shape {list(sources[-1].shape)} for {scale.n_bytes} scales")
    dtype = "F16" if keys.text("dtype", "bfloat16") == "float16" else "BF16"
    missing = n_scales * block // 2 - n_bytes

    def make(pairs: Array, values: Array, scales: Array, *nested: Array) -> Array:
        scales = scales.reshape(-1)
        if nested:
            values_of, each = nested
            each = np.repeat(each.reshape(-1), a_scale)[: scales.size]
            scales = values_of[scales] * each + np.float32(offset)
        pairs = np.pad(pairs, (0, missing)) if missing else pairs
        return from_table(pairs, values, scales, dtype)[: 2 * m * k]

    found[name] = unpacked(name, dtype, (m, k), tuple(sources), make)
