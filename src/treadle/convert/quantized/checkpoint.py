"""Quantised checkpoints of transformers: finds the tensors of each packed matrix and converts them.

``quantization_config`` in config.json names the method; whether a matrix is packed follows from its
tensors, because many checkpoints leave some unquantised. The parts of a matrix are replaced by one
tensor, computed when it is read: ggml blocks with the same numbers if such blocks exist, else
floats. Scales of activations and of the KV cache are dropped: treadle quantises these itself.

::

    fp8, fbgemm_fp8    ``weight`` in F8 with ``weight_scale``, ``weight_scale_inv`` or ``scale``;
                       in I8: pairs of MXFP4 with ``scale``
    compressed-tensors the same; ``weight`` in I8; ``weight_packed``: integers, NVFP4 or MXFP4
    modelopt           ``weight`` in F8, or pairs of NVFP4
    gptq, auto-round   ``qweight`` in words along K, ``qzeros``, ``scales``, ``g_idx``
    awq                ``qweight`` in words along M, in AWQ's own order
    bitsandbytes       ``weight`` of four bits (NF4, FP4) with ``absmax``, of eight with ``SCB``

The layouts are those of the packages that write them: transformers, compressed-tensors, NVIDIA
ModelOpt, GPTQModel, AutoRound, AutoAWQ, bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from treadle.convert.quantized.dequantized_tensor import INT8, INT32, Found, numbers
from treadle.convert.quantized.float_formats import (
    Sizes,
    is_float8,
    read_float4,
    read_float8,
    read_table,
)
from treadle.convert.quantized.integer_formats import (
    GptqLayout,
    read_awq,
    read_bytes,
    read_columns,
    read_rows,
    read_scaled_rows,
)
from treadle.errors import UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import SafeTensor, read_json
from treadle.files.splits import MODELOPT

KEY = "quantization_config"
_OLDER = "compression_config"  # older name of the key in compressed-tensors
_OF_ACTIVATIONS = re.compile(
    r".*[._](?:(?:input|output|activation|[qkv]|kv|prob)_(?:global_)?scale(?:_ub)?"
    r"|(?:input|output|[qkv])_zero_point|weight_format)"
)
_NF4 = re.compile(r"(.+)\.quant_state\.bitsandbytes__(?:nf4|fp4)")


def find_settings(config: MetadataReader, folder: Path) -> MetadataReader | None:
    """Return the checkpoint's quantisation settings, from config.json or ModelOpt's own file; None
    if the method is none of METHODS.
    """
    if config.get(KEY) is None and (folder / MODELOPT).is_file():
        found = MetadataReader(read_json(folder / MODELOPT), folder / MODELOPT).within(
            "quantization"
        )
        return found and MetadataReader({**found.values, "quant_method": "modelopt"}, found.path)
    settings = quantization_section(config)
    return settings if settings and settings.get("quant_method") in METHODS else None


def quantization_section(config: MetadataReader) -> MetadataReader | None:
    """Return the quantisation settings in config.json, of the model or of its text part, whatever
    the method; None if there are none.
    """
    found = config.within(KEY) or config.within(_OLDER)
    if found is None and (text := config.within("text_config")) is not None:
        found = text.within(KEY)
    return found


def unquantised(tensors: Mapping[str, SafeTensor], settings: MetadataReader) -> Found:
    """Return the tensors with packed parts replaced by matrices. ``settings``: as ``find_settings``
    returns them.

    Raises FileError for parts that are missing or do not match, UnsupportedError for a format that
    treadle does not unpack.
    """
    found = dict(tensors)
    METHODS[settings.text("quant_method")](found, settings)
    return {name: t for name, t in found.items() if not _OF_ACTIVATIONS.fullmatch(name)}


def _fp8(found: Found, settings: MetadataReader) -> None:
    for name, tensor in list(found.items()):
        pairs = tensor.dtype == INT8
        beside = name.removesuffix("weight") + "scale"
        if (pairs or is_float8(tensor)) and name.endswith(".weight") and beside in found:
            found[f"{name}_scale"] = found.pop(beside)  # DeepSeek V4's own name
        if pairs and f"{name}_scale" in found:
            read_float4(found, name, replace(tensor, dtype="U8"))
        elif is_float8(tensor):
            read_float8(found, name, tensor, _sizes(settings))


def _compressed(found: Found, settings: MetadataReader) -> None:
    if settings.get("transform_config"):
        settings.refuse("transform_config", "activation transforms (rotations) are not supported")
    sparse = settings.within("sparsity_config")
    if sparse and sparse.values and sparse.text("format", "dense") != "dense":
        sparse.refuse("format", "sparse weights are not supported")
    weights = _weights(settings)
    said = [keys.integer("num_bits", hi=32) for keys in weights]
    sizes = _sizes(*weights)
    shifted = bool(weights) and all(keys.get("symmetric") is False for keys in weights)
    for name, tensor in list(found.items()):
        base = name.removesuffix("_packed")
        whole = tensor.dtype in (INT8, INT32) and f"{base}_scale" in found
        if whole and shifted and f"{base}_zero_point" not in found:
            point = f"{base}_zero_point"
            raise tensor.error(
                f"is quantised but {point} is missing", f"{point} in the same checkpoint"
            )
        if name.endswith("weight_packed"):
            del found[name]
            if tensor.dtype == "U8":
                read_float4(found, base, tensor, f"{base}_global_scale", divides=True)
            else:
                read_rows(found, base, tensor, said, sizes[1])
        elif is_float8(tensor) and name.endswith("weight"):
            read_float8(found, name, tensor, sizes)
        elif tensor.dtype == INT8 and f"{name}_scale" in found:
            read_bytes(found, name, tensor, sizes[1])


def _modelopt(found: Found, settings: MetadataReader) -> None:
    sizes = _sizes(settings, *_weights(settings))
    for name, tensor in list(found.items()):
        if name.endswith(".pre_quant_scale"):
            raise UnsupportedError(
                f"{tensor.path}: {name}: activation scales (pre_quant_scale) are not supported"
            )
        if tensor.dtype == "U8" and f"{name}_scale" in found:
            read_float4(found, name, tensor, f"{name}_scale_2")
        elif is_float8(tensor) and name.endswith("weight"):
            read_float8(found, name, tensor, sizes)


def _gptq(found: Found, settings: MetadataReader) -> None:
    if (kind := settings.text("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        settings.refuse("checkpoint_format", f"{kind!r:.60} is not supported")
    _read_gptq(found, settings, kind == "gptq")


def _read_gptq(found: Found, settings: MetadataReader, first: bool) -> None:
    """Unpack all GPTQ matrices in ``found``. ``first``: version 1, whose stored zero points are 1
    too small.
    """
    meta = settings.within("meta")
    words_lack = first and "gptqmodel" in str(meta.get("quantizer") if meta else None)
    said = GptqLayout(
        settings.integer("bits", hi=32),
        settings.integer("group_size", -1, lo=-1),
        settings.flag("desc_act", False),
        int(first and not words_lack),
        words_lack,
    )
    for name, tensor in _words(found).items():
        read_columns(found, name, tensor, said)


def _awq(found: Found, settings: MetadataReader) -> None:
    if (version := settings.text("version", "gemm").lower()) != "gemm":
        settings.refuse("version", f"is {version!r:.40}: treadle supports only 'gemm'")
    if (bits := settings.integer("bits", 4, hi=32)) != 4:
        settings.refuse("bits", f"is {bits}: treadle supports only 4-bit AWQ weights")
    for name, tensor in _words(found).items():
        read_awq(found, name, tensor)


def _auto_round(found: Found, settings: MetadataReader) -> None:
    packing = settings.text("packing_format", "auto_round:auto_gptq")
    if "awq" in packing:
        _awq(found, settings)
    elif "gptq" in packing:
        _read_gptq(found, settings, "v2" not in packing)
    else:
        settings.refuse("packing_format", f"{packing!r:.60} is not supported")


def _bitsandbytes(found: Found, settings: MetadataReader) -> None:
    for name in list(found):
        if match := _NF4.fullmatch(name):
            read_table(found, match[1], found.pop(name))
        elif name.endswith(".SCB"):
            read_scaled_rows(found, name.removesuffix("SCB") + "weight", found.pop(name))
        elif name.endswith(".weight_format") and numbers(found[name]).any():
            what = (
                "rows are in a GPU-specific layout (weight_format): save the model again in "
                "row-major order"
            )
            raise UnsupportedError(f"{found[name].path}: {name}: {what}")


def _words(found: Found) -> Found:
    """Remove every ``NAME.qweight`` from ``found``, and return them under ``NAME.weight``, the name
    of the unpacked matrix.
    """
    names = [name for name in found if name.endswith(".qweight")]
    return {f"{name.removesuffix('qweight')}weight": found.pop(name) for name in names}


def _weights(settings: MetadataReader) -> list[MetadataReader]:
    """Return compressed-tensors' settings of weights, a reader for each of its
    ``config_groups``.
    """
    groups = settings.within("config_groups")
    each = [groups.within(name) for name in groups.values] if groups else []
    return [weights for keys in each if keys and (weights := keys.within("weights"))]


def _sizes(*settings: MetadataReader) -> Sizes:
    """Return the sizes of scale blocks that any of the ``settings`` state, as two lists: rows of a
    block, and columns.
    """
    rows = list[int]()
    columns = list[int]()
    for keys in settings:
        for key in ("weight_block_size", "block_structure"):
            sizes = keys.get(key)
            if isinstance(sizes, list) and [type(n) for n in sizes] == [int, int]:
                rows = [*rows, sizes[0]]
                columns = [*columns, sizes[1]]
        if keys.get("group_size") is not None:
            columns.append(keys.integer("group_size", lo=-1))
    return rows, columns


METHODS: dict[str, Callable[[Found, MetadataReader], None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
