"""Writes a quantised file: a conversion (``convert/writer.py``) with a type for each tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.convert import writer
from treadle.convert.page_cache import PageCache
from treadle.convert.recipe import QUANTIZATION_VERSION, OutputTensor, Shard, kept_metadata, lay_out
from treadle.convert.sources.check_finite import is_finite
from treadle.convert.sources.gguf import gguf_source
from treadle.convert.sources.source import Bytes, SourceTensor
from treadle.devices.cpu.mapping_faults import guard_mappings
from treadle.devices.cpu.weight_quantizer import quantize_rows
from treadle.errors import FileError, UnsupportedError
from treadle.files.target import check_target as check_path
from treadle.files.target import files_of
from treadle.formats import FORMATS

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.lora import Adapter
    from treadle.quantize.imatrix.matrix import ImatrixEntry as Importances
    from treadle.quantize.imatrix.matrix import ImportanceMatrix
    from treadle.quantize.plan import Recipe

STAGE = "quantizing"
Merged: TypeAlias = "Sequence[tuple[Adapter, float]]"
MAX_STRING = 4096  # characters of a name recorded in the file

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
    merged: Merged = (),
    progress: writer.Progress = lambda stage, done, total: None,
    say: writer.Say = lambda text: None,
) -> None:
    """Write ``gguf``'s tensors as ``recipe`` says into one new file, whole or not at all.

    An interrupted run leaves its partial file next to ``path``; the same call resumes it and
    reports so through ``say``. ``progress(stage, done, total)`` counts bytes read. Memory is
    bounded by a few strips per thread. ``merged``: adapters to add to the weights, each with its
    scale.

    Raises FileError (``path`` exists and ``overwrite`` is false; a weight that is not finite, or
    too large for its format; importances of another shape; a full disk; an input file that shrank
    or was written to while it was read), UnsupportedError (a format that treadle cannot read or has
    no quantiser for; weights that are already quantised, unless ``allow_requantize``).
    """
    path = Path(path)
    guard_mappings()
    recipe = with_merged(recipe, merged)
    check_target(gguf, path, overwrite, imatrix, merged)
    check_sources(gguf, recipe, allow_requantize)
    if imatrix is not None:
        check_importances(gguf, recipe, imatrix)
    source = gguf_source(gguf)
    known = imatrix.entries if imatrix is not None else {}
    work = writer.WriteJob(
        source,
        plan_shards(gguf, recipe, path, imatrix),
        _encode(known, merged),
        lambda entry, rows, begin: None,
        _digest(known, merged),
        n_threads,
        STAGE,
    )
    writer.write(work, progress, say, PageCache(()))


def plan_shards(
    gguf: GGUF, recipe: Recipe, path: Path, imatrix: ImportanceMatrix | None = None
) -> list[Shard]:
    """Return the layout of the new file at ``path``: its metadata, and the place of each tensor.
    ``imatrix``: recorded in the metadata.
    """
    metadata = kept_metadata(gguf_source(gguf))
    if recipe.file_type is not None:
        metadata["general.file_type"] = recipe.file_type
    if recipe.quantized:
        metadata["general.quantization_version"] = QUANTIZATION_VERSION
    if imatrix is not None:
        metadata |= _importance_keys(imatrix)
    return lay_out(path, metadata, list(recipe.targets), gguf.alignment)


def with_merged(recipe: Recipe, merged: Merged) -> Recipe:
    """Return ``recipe`` with every tensor that an adapter in ``merged`` changes re-encoded, in the
    tensor's own format if no other is requested. Raises UnsupportedError for a tensor whose
    product's output has a scale factor.
    """
    ranks = {name: low for adapter, _ in merged for name, low in adapter.ranks.items()}
    for entry in recipe.targets:
        stem = entry.tensor.name.removesuffix(".scale")
        low = ranks.get(f"{stem}.weight") if stem != entry.tensor.name else None
        # One factor, or one per expert; not Gemma 4's router scale, which applies to its input.
        if low and (prod(entry.tensor.shape) == 1 or len(low.b_shape) > 2):
            what = f"it scales the output of {stem}.weight, but not that of an adapter"
            raise UnsupportedError(f"{entry.tensor.origin}: {what}")

    def anew(entry: OutputTensor) -> OutputTensor:
        if entry.encode is not None or entry.tensor.name not in ranks:
            return entry
        return replace(entry, encode=FORMATS[entry.tensor.ggml_type])

    return replace(recipe, targets=tuple(map(anew, recipe.targets)))


def _encode(entries: Mapping[str, Importances], merged: Merged = ()) -> writer.Change:
    """Return the function that quantises rows of a tensor, after adding the adapters ``merged``.
    ``entries``: importances by tensor name, which weight the errors of columns where there are any.
    """

    @lru_cache(maxsize=2)
    def added(name: str) -> list[tuple[Floats, Floats]]:
        """Return, for each adapter of the tensor, its A, and its B times scale."""
        ranks = [(low, scale) for one, scale in merged if (low := one.ranks.get(name)) is not None]
        return [(low.a(), low.b() * np.float32(low.factor * scale)) for low, scale in ranks]

    @lru_cache(maxsize=2)  # this tensor and the next: a table of experts is large
    def table(name: str) -> Floats | None:
        return entries[name].weights() if name in entries else None

    def encode(entry: OutputTensor, rows: Bytes, begin: int) -> Bytes:
        tensor = entry.tensor
        fmt = entry.encode
        assert fmt is not None
        x = FORMATS[tensor.ggml_type].dequantize_rows(rows.reshape(-1, tensor.row_bytes))
        at = begin // tensor.row_bytes
        end = at + len(x)
        for a, b in added(tensor.name):
            x = x + _product(a, b, at, end)
        weights = table(tensor.name)
        if weights is not None:
            per = tensor.n_rows // len(weights)  # rows per expert
            weights = weights[np.arange(at, end) // per]
        what = "holds a weight that is not a finite number"
        if np.isfinite(x).all():
            result = quantize_rows(fmt, x, weights).reshape(-1)
            if is_finite(fmt, result, tensor.k):
                return result
            what = f"holds {np.abs(x).max():g}, too large for {fmt.name}"
        raise tensor.error(what, where=f"rows {at} to {end - 1}")

    return encode


def _product(a: Floats, b: Floats, at: int, end: int) -> Floats:
    """Return rows ``at`` to ``end`` (exclusive) of the product B A. With experts, ``a`` and ``b``
    have a matrix for each, and the rows of one expert's product follow those of the one before.
    """
    if b.ndim == 2:
        return b[at:end] @ a
    m = b.shape[1]
    first = at // b.shape[1]
    last = (end - 1) // b.shape[1]
    rows = [b[e, max(at - e * m, 0) : end - e * m] @ a[e] for e in range(first, last + 1)]
    return np.concatenate(rows)


def _digest(entries: Mapping[str, Importances], merged: Merged = ()) -> bytes:
    """Return a digest of the importances and adapters, which the new file's header does not show: a
    run is resumed only with equal ones.
    """
    state = hashlib.sha256(b"quantize")
    for adapter, scale in merged:
        state.update(adapter.mark + repr(scale).encode())
    for name, entry in entries.items():
        state.update(name.encode("utf-8", "surrogateescape"))
        state.update(entry.sums.tobytes() + entry.counts.tobytes())
    return state.digest()


# -- checks before a byte is written ------------------------------------------------------------


def check_target(
    gguf: GGUF,
    path: Path,
    overwrite: bool,
    imatrix: ImportanceMatrix | None = None,
    merged: Merged = (),
) -> None:
    """Raise FileError if a file exists at ``path`` and ``overwrite`` is false, or if it is one of
    the files to be read: the model's, the importance matrix' or an adapter's.
    """
    beside = [imatrix.path if imatrix else None, *(adapter.path for adapter, _ in merged)]
    read = [*gguf.paths, *files_of(*beside)]
    check_path(path, read, force=overwrite)


def check_sources(gguf: GGUF, recipe: Recipe, allow_requantize: bool) -> None:
    """Raise FileError if ``gguf`` has only a header, UnsupportedError if weights that ``recipe``
    encodes are already quantised and ``allow_requantize`` is false.
    """
    if gguf.header_only:
        raise FileError("has only a header: there are no weights to quantize", path=gguf.path)
    for target in recipe.targets:
        if target.encode and target.tensor.kind.block > 1 and not allow_requantize:
            raise UnsupportedError(
                f"{target.tensor.origin} is {target.tensor.kind.name}, already quantized: start "
                "from the F16, BF16 or F32 file, or accept the loss of both roundings with "
                "--allow-requantize (allow_requantize=True)"
            )


def check_importances(gguf: GGUF, recipe: Recipe, imatrix: ImportanceMatrix) -> None:
    """Raise FileError if ``imatrix`` has importances of another shape than a tensor of ``recipe``,
    or none for any of them.
    """
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


def _importance_shape(tensor: SourceTensor) -> tuple[int, int]:
    return prod(tensor.shape[:-2]), tensor.shape[-1]


def _importance_keys(imatrix: ImportanceMatrix) -> dict[str, Any]:
    """Return the metadata by which llama.cpp records the importance matrix in the file."""
    keys: dict[str, Any] = {}
    if imatrix.path is not None:
        keys["quantize.imatrix.file"] = str(imatrix.path)[:MAX_STRING]
    if imatrix.datasets:
        keys["quantize.imatrix.dataset"] = imatrix.datasets[0][:MAX_STRING]
    keys["quantize.imatrix.entries_count"] = len(imatrix.entries)
    keys["quantize.imatrix.chunks_count"] = imatrix.n_chunks
    return keys
