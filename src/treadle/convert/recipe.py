"""Conversion plan: the type of each output tensor, its file and its place there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.convert.llamacpp_differences import reading_differences
from treadle.convert.sources.source import F32, FILE_TYPES, Source, SourceTensor
from treadle.errors import UnsupportedError
from treadle.files.gguf_writer import GgufLayout, GGUFWriter
from treadle.files.metadata import ValueType
from treadle.files.splits import shard_name
from treadle.formats import FORMATS, Format, GGMLType, type_of

QUANTIZATION_VERSION = 2  # of ggml's block layouts, since May 2023
# Tables, routers, convolution taps, and norms of heads or groups: llama.cpp's converter writes them
# in F32, and llama.cpp aborts if some of them have another type. Patch embeddings: llama.cpp rounds
# the pixels to F16 if these are F16.
FLOATS = re.compile(
    r"(position_embd|patch_embd|enc\.conv1d\.[12]|token_types|ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d(_[qkv])?|shortconv\.conv|shortconv_(k|v|attn|mlp)|attn_rel_proj"
    r"|time_mix_(lerp_fused|[wavg][12])|_norm|attn_rel_b|altup_router|altup_predict_coef|altup_correct_coef"
    r"|hc_(attn_|ffn_)?fn|compressor_ape|ffn_gate_tid2eid)"
    r"\.weight"
)
OF_FILES = ("split.no", "split.count", "split.tensors.count", "general.alignment")


@dataclass(frozen=True)
class Options:
    """The user's options of ``treadle convert``.

    type: format of matrices (``--type``); None: the types of the source.
    alignment: of tensors in the file, in bytes. split_max: largest shard in bytes; 0: a single
        file.
    force: replace an existing file. resume: continue the part file of an interrupted run.
    allow_nonfinite: accept weights that are infinite or NaN.
    settings: ``KEY=VALUE`` texts, which set metadata.
    """

    type: Format | None = None  # None: as in the source
    alignment: int = 32
    split_max: int = 0
    force: bool = False
    resume: bool = True
    allow_nonfinite: bool = False
    settings: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class OutputTensor:
    """A tensor of the output. ``encode`` is the format to encode its weights in; None: copy the
    source's bytes unchanged.
    """

    tensor: SourceTensor
    encode: Format | None
    note: str = ""  # why the format differs from the requested one
    instead_of: Format | None = None  # the format whose blocks do not divide the rows

    @property
    def type(self) -> GGMLType:
        """The ggml type in the output. Raises UnsupportedError for a type whose size is unknown."""
        return replace(self.tensor, ggml_type=self.ggml_type).kind

    @property
    def ggml_type(self) -> int:
        """The ggml type number in the output."""
        return self.tensor.ggml_type if self.encode is None else self.encode.ggml_id

    @property
    def n_bytes(self) -> int:
        """The size in the output, in bytes."""
        tensor = self.tensor
        fmt = self.encode
        return tensor.n_bytes if fmt is None else tensor.n_rows * fmt.row_bytes(tensor.k)


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of the output: path, layout (header and tensor offsets), and tensors in the order of
    the file.
    """

    path: Path
    layout: GgufLayout
    entries: list[OutputTensor]


def plan_shards(source: Source, target: Path, options: Options) -> list[Shard]:
    """Choose every tensor's type, file and offset for an output at ``target``. Raises
    UnsupportedError for a type that cannot be written, FileError if the result would be an invalid
    file.
    """
    entries = plan_entries(source, options.type)
    metadata = build_metadata(source, options, entries)
    return lay_out(target, metadata, entries, options.alignment, options.split_max)


def lay_out(
    target: Path,
    metadata: Mapping[str, Any],
    entries: list[OutputTensor],
    alignment: int,
    split_max: int = 0,
) -> list[Shard]:
    """Return the output file ``target``, or its shards if ``split_max`` (bytes) is not 0, with the
    given ``metadata`` and tensors (``entries``) at offsets that are multiples of ``alignment``.
    Raises FileError if the result would be invalid.
    """

    def keys_of(no: int, count: int) -> Mapping[str, Any]:
        """Return the keys of shard ``no`` of ``count``; the first holds all keys of the model."""
        if count == 1:
            return metadata
        return {
            **(metadata if no == 0 else {}),
            "split.no": np.uint16(no),
            "split.tensors.count": np.int32(len(entries)),
            "split.count": np.uint16(count),
        }

    groups = [entries]
    if split_max:
        heads = [len(_layout(target, alignment, keys_of(no, 2), []).header) for no in (0, 1)]
        groups = split(entries, alignment, split_max, *heads)
    shards = []
    for no, group in enumerate(groups):
        path = target
        if len(groups) > 1:
            path = target.with_name(shard_name(target.name.removesuffix(".gguf"), no, len(groups)))
        layout = _layout(path, alignment, keys_of(no, len(groups)), group)
        shards.append(Shard(path, layout, group))
    return shards


def _layout(
    path: Path, alignment: int, keys: Mapping[str, Any], entries: list[OutputTensor]
) -> GgufLayout:
    """Return the layout of a file with these keys and tensors."""
    writer = GGUFWriter(path, alignment)
    for key, value in keys.items():
        writer.add(key, value, _empty_type(value))
    for entry in entries:
        writer.add_tensor(entry.tensor.name, entry.tensor.shape, entry.ggml_type, b"")
    return writer.layout()


def too_large(shards: Sequence[Shard], most: int) -> str:
    """Return a message about the largest tensor above the shard limit ``most`` (bytes), or about a
    header above it; "" if all shards keep the limit.
    """
    over = [e for shard in shards for e in shard.entries if e.n_bytes > most]
    if not over:
        large = [shard for shard in shards if shard.layout.n_bytes > most]
        if not large:
            return ""
        n = large[0].layout.n_bytes
        keys = len(large[0].layout.header)
        return f"{large[0].path.name} has {n} bytes, more than {most}; its header alone has {keys}"
    worst = max(over, key=lambda entry: entry.n_bytes)
    others = f" ({len(over)} such tensors)" if len(over) > 1 else ""
    has = f"{worst.tensor.name} has {worst.n_bytes} bytes, more than a shard's {most}"
    return f"{has}; a tensor cannot be split{others}"


def _empty_type(value: Any) -> ValueType | None:
    """Return STRING for an empty list, whose element type cannot be inferred, else None."""
    return ValueType.STRING if isinstance(value, (list, tuple)) and not value else None


# -- types ----------------------------------------------------------------------------------------


def plan_entries(source: Source, wanted: Format | None) -> list[OutputTensor]:
    """Choose each tensor's output format.

    With ``wanted``, matrices get that format, other unquantised tensors F32. With None tensors keep
    their types (or take ``SourceTensor.written``), except that small tensors, those whose names
    match FLOATS, become F32 unless the source is a GGUF file.
    """
    _check_rows(source, wanted)

    def choose(tensor: SourceTensor) -> Format | None:
        if wanted is None and (source.verbatim or not FLOATS.search(tensor.name)):
            return None if tensor.written is None else FORMATS[tensor.written]
        if wanted is not None and is_matrix(tensor):
            return wanted
        own = FORMATS.get(tensor.ggml_type)  # integers and the like keep their type
        return F32 if own is not None and own.block == 1 else None

    return [entry_of(tensor, choose(tensor)) for tensor in source.tensors.values()]


def entry_of(tensor: SourceTensor, wanted: Format | None, note: str = "") -> OutputTensor:
    """Return the output tensor in format ``wanted``; None keeps the source's. ``note``: why the
    format differs from the requested one, for the user. Raises UnsupportedError if treadle cannot
    decode the source's format, so that it cannot change.
    """
    if wanted is None or wanted.ggml_id == tensor.ggml_type:
        return OutputTensor(tensor, None, note)
    if tensor.ggml_type not in FORMATS:
        what = f"{tensor.kind.name} weights are not supported yet, so their type cannot change"
        raise UnsupportedError(f"{tensor.origin}: {what}")
    return OutputTensor(tensor, wanted, note)


def is_matrix(tensor: SourceTensor) -> bool:
    """Return whether ``--type`` applies to the tensor: a ``.weight`` of two or more axes whose name
    does not match FLOATS.
    """
    name = tensor.name
    return len(tensor.shape) >= 2 and name.endswith(".weight") and not FLOATS.search(name)


def _check_rows(source: Source, wanted: Format | None) -> None:
    """Raise UnsupportedError if a row of some matrix is not whole blocks of ``wanted``; the message
    names the nearest format that fits every matrix.
    """
    if wanted is None:
        return
    matrices = [tensor for tensor in source.tensors.values() if is_matrix(tensor)]
    for tensor in matrices:
        if tensor.k % wanted.block:
            near = nearest_format(wanted, (m.k for m in matrices))
            raise UnsupportedError(
                f"{tensor.origin}: {wanted.name} needs rows that are multiples of {wanted.block}; "
                f"these have {tensor.k} weights; use {near.name}, which fits every matrix"
            )


def nearest_format(wanted: Format, widths: Iterable[int]) -> Format:
    """Return the format nearest to ``wanted`` in bits per weight whose blocks divide rows of all
    these widths.
    """
    rows = list(widths)

    def bits(fmt: Format) -> float:
        return 8 * fmt.dtype.itemsize / fmt.block

    fit = [fmt for fmt in FORMATS.values() if not any(k % fmt.block for k in rows)]
    return min(fit, key=lambda fmt: (abs(bits(fmt) - bits(wanted)), -bits(fmt)))


# -- metadata -------------------------------------------------------------------------------------


def build_metadata(source: Source, options: Options, entries: list[OutputTensor]) -> dict[str, Any]:
    """Return the output file's metadata: the source's keys, the file type of ``entries``, and the
    user's ``KEY=VALUE`` settings.
    """
    metadata = kept_metadata(source)
    if not source.verbatim or options.type is not None:
        metadata.update(_types(entries))
    for text in options.settings:
        set_key(metadata, text)
    return metadata


def kept_metadata(source: Source) -> dict[str, Any]:
    """Return the source's keys without those that describe its own files, such as shard counts."""
    return {key: value for key, value in source.metadata.items() if key not in OF_FILES}


def notes(source: Source, options: Options) -> list[str]:
    """Return notes for the user: the reader's assumptions, and keys that llama.cpp reads
    differently.

    A source that is a GGUF file keeps its keys, so the second kind is not listed for it.
    """
    said = list(source.notes)
    if not source.verbatim:
        said += reading_differences(build_metadata(source, options, []), source.tensors)
    return said


def _types(entries: list[OutputTensor]) -> dict[str, Any]:
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


def set_key(metadata: dict[str, Any], text: str) -> None:
    """Set a metadata key as ``KEY=VALUE`` says. An existing key keeps its type: UnsupportedError if
    the value does not fit.
    """
    key, equals, word = text.partition("=")
    if not equals or not key:
        raise UnsupportedError(f"--set {text!r:.80}: not KEY=VALUE")
    metadata[key] = _value(key, metadata.get(key), word)


def _value(key: str, before: Any, word: str) -> Any:
    """Parse ``word`` as the type of ``before``, the key's existing value. If that is None (a new
    key), the word gives the type: bool, int, float or str. Raises UnsupportedError if it does not
    fit.
    """
    try:
        value: Any = json.loads(word)
    except (ValueError, RecursionError):
        value = word
    if before is None:
        return value if isinstance(value, (bool, int, float)) else word
    if isinstance(before, str):
        return word
    kind = type(before)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(before, (bool, np.bool_)):
        name = "true or false"
        fits = isinstance(value, bool)
    elif isinstance(before, np.integer):
        least = int(np.iinfo(kind).min)
        most = int(np.iinfo(kind).max)
        name = f"{kind.__name__}, from {least} to {most}"
        fits = whole and least <= value <= most
    elif isinstance(before, int):
        name = "an integer"
        fits = whole
    elif isinstance(before, (float, np.floating)):
        largest = float(np.finfo(kind).max)
        fits = whole or isinstance(value, float)
        name = "a number"
        fits = fits and not largest < abs(value) < math.inf
    else:
        name = "a key that is not an array (--set cannot replace arrays)"
        fits = False
    if not fits:
        raise UnsupportedError(f"--set {key}={word:.60}: expected {name}")
    return kind(value)


# -- places ---------------------------------------------------------------------------------------


def split(
    entries: list[OutputTensor], alignment: int, split_max: int, first_head: int = 0, head: int = 0
) -> list[list[OutputTensor]]:
    """Group tensors, in order, into files of at most ``split_max`` bytes; a tensor that is larger
    gets a file of its own. ``first_head`` and ``head``: header bytes of the first and of other
    files, without tensor infos.
    """
    groups: list[list[OutputTensor]] = [[]]
    n_head = first_head
    n_data = 0
    for entry in entries:
        said = _INFO_BYTES + len(entry.tensor.name.encode()) + 8 * len(entry.tensor.shape)
        padded = _aligned(entry.n_bytes, alignment)
        over = _aligned(n_head + said, alignment) + n_data + padded > split_max
        # The first file's header may alone exceed the limit; a later file has fewer keys.
        if over and (groups[-1] or _aligned(head + said, alignment) + padded <= split_max):
            groups.append([])
            n_head = head
            n_data = 0
        groups[-1].append(entry)
        n_head += said
        n_data += padded
    return groups


_INFO_BYTES = 8 + 4 + 4 + 8  # of a tensor's header entry, without its name and dimensions


def _aligned(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
