"""Carrying a recipe out: a conversion (``convert/output.py``) with a type for each tensor."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.convert import output
from treadle.convert.finite import is_finite
from treadle.convert.gguf import gguf_source
from treadle.convert.pagecache import PageCache
from treadle.convert.recipe import QUANTIZATION_VERSION, Entry, entry_of, kept_metadata, lay_out
from treadle.convert.source import Bytes
from treadle.errors import FileError, UnsupportedError
from treadle.files.target import check_target as check_path
from treadle.files.target import files_of
from treadle.formats import FORMATS, Format, by_name
from treadle.runtime.sigbus import guard_mappings

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.imatrix.matrix import Entry as Importances
    from treadle.imatrix.matrix import ImportanceMatrix
    from treadle.quantize.plan import Recipe

STAGE = "quantizing"
MAX_STRING = 4096  # bytes of a name that is noted in the file

Floats = npt.NDArray[np.float32]


def write(
    gguf: GGUF,
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    n_threads: int,
    imatrix: ImportanceMatrix | None = None,
    overwrite: bool = False,
    allow_requantize: bool = False,
    progress: output.Progress = lambda stage, done, total: None,
    say: output.Say = lambda text: None,
) -> None:
    """Write ``gguf``'s tensors as ``recipe`` says into one new file, whole or not at all.

    A run that was stopped leaves its part beside ``path``, and the same call continues it; ``say``
    is told. ``progress(stage, done, total)`` counts bytes read. Memory is bounded by a few strips a
    thread.

    Raises FileError (``path`` exists and ``overwrite`` is false; a weight that is not finite, or
    too large for its format; importances of another shape; a disk that is full; a file that shrank
    or was written to while it was read), UnsupportedError
    (a format that treadle cannot read, or has no quantiser for; weights that were quantised before,
    unless ``allow_requantize``).
    """
    path = Path(path)
    guard_mappings()
    check_target(gguf, path, overwrite, imatrix)
    check_sources(gguf, recipe, allow_requantize)
    if imatrix is not None:
        check_importances(gguf, recipe, imatrix)
    source = gguf_source(gguf)
    metadata = kept_metadata(source)
    if recipe.file_type is not None:
        metadata["general.file_type"] = recipe.file_type
    if recipe.quantized:
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
    if imatrix is not None:
        metadata |= _importance_keys(imatrix)
    entries = [
        entry_of(source.tensors[t.tensor.name], by_name(t.type.name) if t.changes else None)
        for t in recipe.targets
    ]
    shards = lay_out(path, metadata, entries, gguf.alignment)
    known = imatrix.entries if imatrix is not None else {}
    work = output.Work(
        source, shards, _encode(known), lambda entry, rows, begin: None, _digest(known), n_threads,
        STAGE,
    )  # fmt: skip
    output.write(work, progress, say, PageCache(()))


def _encode(entries: Mapping[str, Importances]) -> output.Change:
    """A quantiser of rows, by the importances of their columns where there are some."""

    @lru_cache(maxsize=2)  # of a tensor and the next: with experts a table is large
    def table(name: str, quantize: Callable[..., Any]) -> Floats | None:
        if name not in entries or "weights" not in inspect.signature(quantize).parameters:
            return None
        return entries[name].weights()

    def encode(entry: Entry, rows: Bytes, begin: int) -> Bytes:
        tensor, fmt = entry.tensor, entry.encode
        assert fmt is not None
        x = FORMATS[tensor.ggml_type].dequantize_rows(rows.reshape(-1, tensor.row_bytes))
        at = begin // tensor.row_bytes
        end = at + len(x)
        weights = table(tensor.name, fmt.quantize)
        if weights is not None and len(weights) > 1:
            per = tensor.n_rows // len(weights)  # rows of one expert's matrix
            weights = weights[np.arange(at, end) // per]
        try:
            return quantize_rows(fmt, x, weights).reshape(-1)
        except ValueError as error:  # says what; where is known only here
            raise tensor.error(str(error), where=f"rows {at} to {end - 1}") from error

    return encode


def _digest(entries: Mapping[str, Importances]) -> bytes:
    """Of the importances, which no header tells."""
    state = hashlib.sha256(b"quantize")
    for name, entry in entries.items():
        state.update(name.encode("utf-8", "surrogateescape"))
        state.update(entry.sums.tobytes() + entry.counts.tobytes())
    return state.digest()


def quantize_rows(fmt: Format, x: Floats, weights: Floats | None = None) -> Bytes:
    """float32 ``[n, K]`` to the format's bytes, uint8 ``[n, row_bytes]``.

    ``weights``, float32 ``[n or 1, K]``, say how much an error in each place counts. Raises
    ValueError for numbers that are not finite, or would not be in that format.
    """
    if not np.isfinite(x).all():
        raise ValueError("holds a weight that is not a finite number")
    blocks = x.reshape(len(x), -1, fmt.block)
    if weights is None:
        out = fmt.quantize(blocks)
    else:
        shared = np.broadcast_to(weights.reshape(len(weights), -1, fmt.block), blocks.shape)
        out = fmt.quantize(blocks, shared)
    made: Bytes = np.ascontiguousarray(out).reshape(len(x), -1).view(np.uint8)
    if not is_finite(fmt, made):
        raise ValueError(f"holds {np.abs(x).max():g}, which is too large for {fmt.name}")
    return made


# -- what can be known before a byte is written -------------------------------------------------


def check_target(
    gguf: GGUF, path: Path, overwrite: bool, imatrix: ImportanceMatrix | None = None
) -> None:
    """Raise FileError for a target that exists, or that is one of the files to be read."""
    read = [*gguf.paths, *files_of(imatrix.path if imatrix else None)]
    check_path(path, read, force=overwrite)


def check_sources(gguf: GGUF, recipe: Recipe, allow_requantize: bool) -> None:
    """Raise UnsupportedError where a tensor can be neither read nor written as planned."""
    if gguf.header_only:
        raise FileError("is a header alone: there are no weights to quantize", path=gguf.path)
    for target in recipe.targets:
        if not target.changes:
            continue
        tensor = target.tensor
        if tensor.format is None:
            raise UnsupportedError(
                f"{tensor.path}: {tensor.name} is {tensor.type_name}, which treadle cannot read yet"
            )
        if tensor.format.block > 1 and not allow_requantize:
            raise UnsupportedError(
                f"{tensor.path}: {tensor.name} is {tensor.type_name}, quantized already: start "
                "from the F16, BF16 or F32 file, or accept the loss of both roundings with "
                "--allow-requantize (allow_requantize=True)"
            )
        try:
            quantizer = by_name(target.type.name).quantize
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{tensor.name} is to become {target.type.name}: {error}"
            ) from error
        if quantizer is None:
            raise UnsupportedError(
                f"{tensor.name} is to become {target.type.name}, which treadle reads but has no "
                "quantizer for"
            )


def check_importances(gguf: GGUF, recipe: Recipe, imatrix: ImportanceMatrix) -> None:
    """Raise FileError for importances of another shape, or of another model altogether."""
    here = {t.tensor.name: t.tensor for t in recipe.targets}
    if not imatrix.entries.keys() & here.keys():
        raise FileError(
            f"has no importances for any tensor of {gguf.path.name}",
            path=imatrix.path or "importance matrix",
            expected=f"names such as {next(iter(here), 'blk.0.attn_q.weight')}",
        )
    for name, entry in imatrix.entries.items():
        if name in here and entry.sums.shape != (wanted := _importance_shape(here[name])):
            raise FileError(
                f"has importances of shape {list(entry.sums.shape)}",
                path=imatrix.path or "importance matrix",
                where=name,
                expected=f"{list(wanted)}, for a weight of shape {list(here[name].shape)}",
            )


def _importance_shape(tensor: Tensor) -> tuple[int, int]:
    return prod(tensor.shape[:-2]), tensor.shape[-1]


def _importance_keys(imatrix: ImportanceMatrix) -> dict[str, Any]:
    """Say in the file what it was quantised with, under llama.cpp's keys."""
    keys: dict[str, Any] = {}
    if imatrix.path is not None:
        keys["quantize.imatrix.file"] = str(imatrix.path)[:MAX_STRING]
    if imatrix.datasets:
        keys["quantize.imatrix.dataset"] = imatrix.datasets[0][:MAX_STRING]
    keys["quantize.imatrix.entries_count"] = len(imatrix.entries)
    keys["quantize.imatrix.chunks_count"] = imatrix.n_chunks
    return keys


def gguf_bytes(recipe: Recipe, gguf: GGUF) -> int:
    """About how large the file will be: its tensors with their padding, and today's header."""
    pad = gguf.alignment
    tensors = sum(-(-target.n_bytes // pad) * pad for target in recipe.targets)
    header = min((t.tensor.offset for t in recipe.targets), default=gguf.n_bytes)
    return tensors + header
