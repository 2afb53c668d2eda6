"""What each tensor of a checkpoint becomes, and in which file it goes where."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.convert.elsewhere import read_otherwise
from treadle.convert.opened import F32, n_bytes_of, set_key
from treadle.convert.source import FileRange, Source, SourceTensor
from treadle.errors import UnsupportedError
from treadle.files.gguf_array import ValueType
from treadle.files.gguf_writer import GGUFWriter, Layout
from treadle.formats import FORMATS, Format, type_of

# general.file_type, which says what most weights are in, by the name of the format.
FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32,
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18,
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38,
}  # fmt: skip
QUANTIZATION_VERSION = 2  # of ggml's block layouts, since May 2023


@dataclass(frozen=True)
class Options:
    """What the user asked for. ``alignment`` in bytes; ``split_max`` bytes of a shard, 0: one file.

    ``settings`` are ``KEY=VALUE`` for the metadata.
    """

    type: Format | None = None  # None: as in the source
    alignment: int = 32
    split_max: int = 0
    force: bool = False
    resume: bool = True
    allow_nonfinite: bool = False
    settings: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of the output. ``encode`` None: its bytes are the source's."""

    tensor: SourceTensor
    ggml_type: int
    encode: Format | None
    n_bytes: int  # in the output
    row_bytes: int  # in the source


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of the output."""

    path: Path
    layout: Layout
    entries: list[Entry]


def plan_shards(source: Source, target: Path, options: Options) -> list[Shard]:
    """Decide on every tensor's type and place. UnsupportedError for what cannot be done."""
    entries = plan_entries(source, options.type)
    metadata = build_metadata(source, options, entries)
    groups = split(entries, options)
    shards = []
    for no, group in enumerate(groups):
        path = target
        keys = metadata
        if len(groups) > 1:
            stem = target.name.removesuffix(".gguf")
            path = target.with_name(f"{stem}-{no + 1:05d}-of-{len(groups):05d}.gguf")
            keys = (metadata if no == 0 else {}) | {
                "split.no": np.uint16(no),
                "split.tensors.count": np.int32(len(entries)),
                "split.count": np.uint16(len(groups)),
            }
        writer = GGUFWriter(path, options.alignment)
        for key, value in keys.items():
            writer.add(key, value, _empty_type(value))
        for entry in group:
            writer.add_tensor(entry.tensor.name, entry.tensor.shape, entry.ggml_type, b"")
        shards.append(Shard(path, writer.layout(), group))
    return shards


def _empty_type(value: Any) -> ValueType | None:
    """An empty list tells no type of its elements."""
    return ValueType.STRING if isinstance(value, (list, tuple)) and not value else None


# -- types ----------------------------------------------------------------------------------------


def plan_entries(source: Source, wanted: Format | None) -> list[Entry]:
    """What each tensor becomes: matrices ``wanted``, vectors F32; without it, what they are."""
    _check_rows(source, wanted)
    entries = []
    for tensor in source.tensors.values():
        kind, target = type_of(tensor.ggml_type), wanted
        if kind is None:
            raise UnsupportedError(f"{tensor.origin}: ggml type {tensor.ggml_type} has no size")
        if wanted is None and tensor.written is not None:
            target = FORMATS[tensor.written]
        if wanted is not None and not is_matrix(tensor):
            own = FORMATS.get(tensor.ggml_type)  # whole numbers and the like stay what they are
            target = F32 if own is not None and own.block == 1 else None
        n_bytes = n_bytes_of(tensor)
        k = tensor.shape[-1] if tensor.shape else 1
        row_bytes = max(1, k // kind.block * kind.n_bytes)
        if target is None or target.ggml_id == tensor.ggml_type:
            entries.append(Entry(tensor, tensor.ggml_type, None, n_bytes, row_bytes))
            continue
        if tensor.ggml_type not in FORMATS:
            what = f"treadle cannot read {kind.name} weights yet, and so not change their type"
            raise UnsupportedError(f"{tensor.origin}: {what}")
        n_rows = n_bytes // row_bytes
        entries.append(
            Entry(tensor, target.ggml_id, target, n_rows * target.row_bytes(k), row_bytes)
        )
    return entries


def is_matrix(tensor: SourceTensor) -> bool:
    """Whether ``--type`` is for it."""
    return len(tensor.shape) >= 2 and tensor.name.endswith(".weight")


def _check_rows(source: Source, wanted: Format | None) -> None:
    """Refuse a format whose blocks do not divide the rows, and say which would do."""
    if wanted is None:
        return
    if wanted.quantize is None:
        raise UnsupportedError(f"treadle reads {wanted.name}, but has no quantiser for it")
    matrices = [tensor for tensor in source.tensors.values() if is_matrix(tensor)]
    for tensor in matrices:
        k = tensor.shape[-1]
        if k % wanted.block:
            near = nearest_format(wanted, (m.shape[-1] for m in matrices))
            raise UnsupportedError(
                f"{tensor.origin}: {wanted.name} cannot hold rows of {k} weights, which its blocks "
                f"of {wanted.block} do not divide; the nearest format that fits every matrix is "
                f"{near.name}"
            )


def nearest_format(wanted: Format, widths: Iterable[int]) -> Format:
    """The format nearest in bits for each weight whose blocks divide rows of all these widths."""
    rows = list(widths)

    def bits(fmt: Format) -> float:
        return 8 * fmt.dtype.itemsize / fmt.block

    made = [fmt for fmt in FORMATS.values() if fmt.quantize is not None]
    fit = [fmt for fmt in made if not any(k % fmt.block for k in rows)]
    return min(fit, key=lambda fmt: (abs(bits(fmt) - bits(wanted)), -bits(fmt)))


# -- metadata -------------------------------------------------------------------------------------


def build_metadata(source: Source, options: Options, entries: list[Entry]) -> dict[str, Any]:
    """The source's keys, without what is true of its files alone, and what is true of this one."""
    own = ("split.no", "split.count", "split.tensors.count", "general.alignment")
    metadata = {key: value for key, value in source.metadata.items() if key not in own}
    if not getattr(source, "verbatim", False) or options.type is not None:
        metadata.update(_types(entries))
    for text in options.settings:
        set_key(metadata, text)
    return metadata


def notes(source: Source, options: Options) -> list[str]:
    """What the user should know: what the reader assumed, and what other programs read otherwise.

    A GGUF file that is passed on says all that it said before.
    """
    said = list(getattr(source, "notes", ()))
    if not getattr(source, "verbatim", False):
        said += read_otherwise(build_metadata(source, options, []), source.tensors)
    return said


def _types(entries: list[Entry]) -> dict[str, Any]:
    sizes: dict[int, int] = {}
    for entry in entries:
        if is_matrix(entry.tensor):
            sizes[entry.ggml_type] = sizes.get(entry.ggml_type, 0) + entry.n_bytes
    if not sizes:
        return {}
    found: dict[str, Any] = {}
    most = type_of(max(sizes, key=lambda ggml_type: sizes[ggml_type]))
    if most is not None and most.name in FILE_TYPES:
        found["general.file_type"] = FILE_TYPES[most.name]
    kinds = (type_of(ggml_type) for ggml_type in sizes)
    if any(kind is not None and kind.block > 1 for kind in kinds):
        found["general.quantization_version"] = QUANTIZATION_VERSION
    return found


# -- places ---------------------------------------------------------------------------------------


def split(entries: list[Entry], options: Options) -> list[list[Entry]]:
    """Groups of tensors in their order, each at most ``split_max`` bytes where one tensor is."""
    groups: list[list[Entry]] = [[]]
    n_bytes = 0
    for entry in entries:
        padded = -(-entry.n_bytes // options.alignment) * options.alignment
        if options.split_max and groups[-1] and n_bytes + padded > options.split_max:
            groups.append([])
            n_bytes = 0
        groups[-1].append(entry)
        n_bytes += padded
    return groups


def mapped_range(tensor: SourceTensor, data: npt.NDArray[np.uint8]) -> FileRange | None:
    """Where in a file the bytes of ``data`` lie just so; None for bytes that were made.

    A tensor says what it reads, but not whether it changes that: so ``data`` itself is asked
    whether it is a view of the mapping, and of that place in it.
    """
    if len(tensor.ranges) != 1 or tensor.ranges[0].n_bytes != data.nbytes:
        return None
    base: Any = data
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap) or not data.flags.c_contiguous:
        return None
    start = np.frombuffer(base, np.uint8)
    offset = data.ctypes.data - start.ctypes.data
    return tensor.ranges[0] if offset == tensor.ranges[0].offset else None
