"""MLX's quantised checkpoints: finds the packed modules of config.json and their formats.

::

    "quantization": {"group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": {"bits": 8, ..},
                     "lm_head": false}

A packed module has three tensors in place of its ``weight``: ``weight`` u32 [M, K * bits / 32],
``scales`` and ``biases`` [M, K / group_size]; see ``formats/mlx.py``. (``bias`` is a linear layer's
own and unrelated.) A module is packed if it has scales; config.json must agree. Settings given for
a module by name must match its shapes. For other modules, as in mlx-lm, the shapes determine bits
and group size.

In the modes ``mxfp4``, ``nvfp4`` and ``mxfp8`` codes are floats, scales are one byte each, and
there are no ``biases``: such a module becomes ggml blocks, or BF16, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.convert.quantized.dequantized_tensor import (
    Array,
    Found,
    floats_of,
    matrix_shape,
    unpacked,
)
from treadle.convert.quantized.float_formats import is_float8, read_float4, read_float8
from treadle.convert.quantized.unpack import BLOCK, E4M3, MX_GROUP, affine, split_words
from treadle.convert.sources.derived_tensors import DerivedTensor
from treadle.errors import UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.formats import Format
from treadle.formats.mlx import BITS, GROUPS, SCALES, mlx

if TYPE_CHECKING:
    from treadle.files.safetensors import SafeTensor

KEYS = ("quantization", "quantization_config")  # mlx-lm writes both, identical
CODES = "U32"
WORD = 32
BYTES = "U8"
AFFINE = "affine"  # the default, and only, mode of older files
FLOATS = {"mxfp4": ("U8", "U8"), "nvfp4": ("U8", E4M3), "mxfp8": (E4M3, "U8")}  # codes, scales
BLOCKS = "blocks"
_SETTINGS = ("group_size", "bits", "mode")


@dataclass(frozen=True)
class Quantization:
    """config.json's settings of MLX's packed weights: for all modules, and for some by name."""

    keys: MetadataReader
    modules: Mapping[str, Any]  # modules with their own settings, or left unquantised (false)

    def mode(self, module: str) -> str:
        """Return a module's mode ("affine", "mxfp4" ..). Raises UnsupportedError for an unknown
        one.
        """
        own = self.keys.within(module) if isinstance(self.modules.get(module), Mapping) else None
        keys = own or self.keys
        mode = keys.text("mode", AFFINE)
        if mode != AFFINE and mode not in FLOATS:
            keys.refuse("mode", f"MLX quantisation mode {mode!r:.40} is not supported")
        return mode

    def settings(self, module: str) -> tuple[int, int, str]:
        """Return a module's group size and bits, and the place in config.json that gives them."""
        own = self.keys.within(module) if isinstance(self.modules.get(module), Mapping) else None
        keys = own or self.keys
        self.mode(module)
        # A key missing from a module's own settings has MLX's default, not the model's.
        group = keys.integer("group_size", 64 if own else None)
        bits = keys.integer("bits", 4 if own else None)
        return group, bits, f"{keys.path.name}: {keys.prefix.rstrip('.')}"


def find_quantization(config: MetadataReader) -> Quantization | None:
    """Return MLX's settings, or None without any. Raises UnsupportedError for an unknown mode."""
    for key in KEYS:
        keys = config.within(key)
        if keys is None:
            continue
        if key == KEYS[1] and ("quant_method" in keys.values or "bits" not in keys.values):
            return None
        modules = {name: value for name, value in keys.values.items() if name not in _SETTINGS}
        modules = {n: v for n, v in modules.items() if isinstance(v, (bool, Mapping))}
        found = Quantization(keys, modules)
        found.settings("")
        return found
    return None


@dataclass(frozen=True)
class PackedModule:
    """The three tensors of a packed module, checked against each other. ``shape`` is that of the
    weights.
    """

    weight: SafeTensor
    scales: SafeTensor
    biases: SafeTensor
    format: Format
    shape: tuple[int, ...]  # of the weights

    @property
    def arrays(self) -> tuple[SafeTensor, SafeTensor, SafeTensor]:
        """The tensors in the order of the format's parts."""
        return self.weight, self.scales, self.biases

    @property
    def bits_and_group(self) -> tuple[int, int]:
        """The bits per code, and the weights per scale."""
        group = self.shape[-1] // self.scales.shape[-1]
        return self.weight.shape[-1] * WORD // self.shape[-1], group

    @property
    def n_bytes(self) -> int:
        """The size of all three tensors in bytes."""
        return sum(tensor.n_bytes for tensor in self.arrays)


def unpack_floats(tensors: Mapping[str, SafeTensor], found: Quantization) -> Found:
    """Return the tensors; each module packed in a mode of FLOATS (mxfp4, nvfp4, mxfp8) becomes one
    tensor. ``found``: config.json's settings. Raises FileError for mismatched parts.
    """
    result = dict(tensors)
    for name, scales in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "scales" or (mode := found.mode(module)) not in FLOATS:
            continue
        weight = f"{module}.weight"
        (codes_in, scales_in) = FLOATS[mode]
        if weight not in result:
            raise scales.error(f"has no {weight}")
        codes = result[weight]
        if codes.dtype != CODES or scales.dtype != BYTES:
            what = f"is in {codes.dtype}, with scales in {scales.dtype}"
            raise codes.error(what, f"{CODES} and {BYTES} ({mode})")
        *others, n_words = matrix_shape(codes)
        codes = replace(codes, dtype=codes_in, shape=(*others, n_words * WORD // 8))
        result[f"{weight}_scale"] = replace(result.pop(name), dtype=scales_in)
        if is_float8(codes):
            read_float8(result, weight, codes, ((), (MX_GROUP,)))
        else:
            read_float4(result, weight, codes)
    return result


def unpack(
    tensors: Mapping[str, SafeTensor], found: Quantization, wanted: Callable[[str], str]
) -> Found:
    """Return the tensors; affine modules chosen by ``wanted`` become one tensor each. ``found``:
    config.json's settings.

    ``wanted(name of the weight)`` returns "" to leave a module packed, a float type, or BLOCKS:
    Q4_1 blocks where they hold the codes, else floats. Errors as ``find_packed``'s.
    """
    result = dict(tensors)
    for name in tensors:
        module, _, kind = name.rpartition(".")
        scales = f"{module}.scales"
        biases = f"{module}.biases"
        if kind != "weight" or not {scales, biases} <= result.keys() or not wanted(name):
            continue
        packed = _pack(result[name], result.pop(scales), result.pop(biases), found, None)
        bits, group = packed.bits_and_group
        dtype = wanted(name)
        if dtype == BLOCKS:
            blocks = bits <= 4 and group % BLOCK == 0
            dtype = "Q4_1" if blocks else floats_of(packed.scales)
        make = partial(_numbers, bits=bits, dtype=dtype)
        result[name] = unpacked(name, dtype, packed.shape, packed.arrays, make)
    return result


def _numbers(words: Array, scales: Array, minimums: Array, bits: int, dtype: str) -> Array:
    codes = split_words(words.reshape(-1, words.shape[-1]), bits)
    each = [part.reshape(len(codes), -1) for part in (scales, minimums)]
    return affine(dtype, codes, *each).reshape(*words.shape[:-1], -1)


def find_packed(
    tensors: Mapping[str, SafeTensor],
    found: Quantization,
    width: Callable[[SafeTensor], int | None],
) -> dict[str, PackedModule]:
    """Return every packed matrix by the name of its ``weight``. ``found``: config.json's settings;
    ``width(weight)`` returns the row length K, None if unknown. Raises FileError for missing or
    mismatched parts, UnsupportedError for a format that treadle lacks.
    """
    packed: dict[str, PackedModule] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind in ("scales", "biases") and f"{module}.weight" not in tensors:
            raise tensor.error(f"has no {module}.weight")
        if kind != "weight":
            continue
        scales, biases = (tensors.get(f"{module}.{part}") for part in ("scales", "biases"))
        said = found.modules.get(module)
        if scales is None and biases is None:
            if isinstance(tensor, DerivedTensor):
                continue
            if tensor.dtype == CODES:
                what = "holds packed codes but has no scales"
            elif said not in (None, False):
                what = f"is not packed, but {found.keys.path.name} says it is"
            else:
                continue
            raise tensor.error(what, f"{module}.scales in the same checkpoint")
        if scales is None or biases is None:
            missing, there = ("scales", biases) if scales is None else ("biases", scales)
            assert there is not None
            raise there.error(
                f"has no {module}.{missing}", "scales and biases for each packed weight"
            )
        if said is False:
            raise tensor.error(f"is packed, but {found.keys.path.name} says it is not")
        packed[name] = _pack(tensor, scales, biases, found, width(tensor))
    return packed


def _pack(
    weight: SafeTensor,
    scales: SafeTensor,
    biases: SafeTensor,
    found: Quantization,
    width: int | None,
) -> PackedModule:
    """Return the module of these three tensors. ``width``: K if known, from which bits and group
    size follow; else those of the settings ``found`` apply. Raises FileError if shapes do not match
    each other and the settings.
    """
    module = weight.name.removesuffix(".weight")
    group, bits, where = found.settings(module)
    if weight.dtype != CODES:
        raise weight.error(f"is in {weight.dtype} but has scales", CODES)
    if scales.dtype not in SCALES:
        raise scales.error(f"is in {scales.dtype}", " or ".join(SCALES))
    if len(weight.shape) not in (2, 3) or len(scales.shape) != len(weight.shape):
        bad = weight if len(weight.shape) not in (2, 3) else scales
        raise bad.error(f"shape {list(bad.shape)}", "a matrix, or one of each expert")
    if width and not isinstance(found.modules.get(module), Mapping):
        shown = width / max(1, scales.shape[-1]), weight.shape[-1] * WORD / width
        if shown[0] in GROUPS and shown[1] in BITS:
            group = int(shown[0])
            bits = int(shown[1])
    try:
        fmt = mlx(bits, group, scales.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{found.keys.path}: {where}: {error}") from error
    if biases.dtype != scales.dtype:
        raise biases.error(f"is in {biases.dtype}", f"{scales.dtype}, as the scales are")
    rows = weight.shape[:-1]
    k = scales.shape[-1] * group
    if scales.shape[:-1] != rows:
        said = " x ".join(map(str, rows))
        raise scales.error(f"shape {list(scales.shape)}", f"{said} rows, as the codes have")
    if weight.shape[-1] * WORD != k * bits:
        raise weight.error(
            f"shape {list(weight.shape)} does not fit {bits} bits in groups of {group} ({where})",
            f"{k * bits / WORD:g} words a row, for scales of shape {list(scales.shape)}",
        )
    if biases.shape != scales.shape:
        raise biases.error(f"shape {list(biases.shape)}", f"{list(scales.shape)}, as the scales")
    return PackedModule(weight, scales, biases, fmt, (*rows, k))
