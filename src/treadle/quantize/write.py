"""Carrying a recipe out: one file read, one written, a strip of rows at a time on every core."""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.convert.finite import is_finite
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter
from treadle.files.target import check_target as check_path
from treadle.files.target import files_of
from treadle.formats import Format, by_name
from treadle.runtime.sigbus import guard_mappings

if TYPE_CHECKING:
    from treadle.files.tensor import Tensor
    from treadle.imatrix.matrix import ImportanceMatrix
    from treadle.quantize.plan import Recipe, Target

STRIP = 1 << 18  # weights a thread takes at a time: its temporaries stay in cache
AHEAD = 3  # strips a thread may be ahead of the file
QUANTIZATION_VERSION = 2  # of ggml's block layouts: general.quantization_version
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
MAX_STRING = 4096  # bytes of a name that is noted in the file

Progress = Callable[[str, int, int], None]
Bytes = npt.NDArray[np.uint8]
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
    progress: Progress | None = None,
) -> None:
    """Write ``gguf``'s tensors as ``recipe`` says into one new file, whole or not at all.

    ``progress(stage, done, total)`` counts bytes read. Memory is bounded by a few strips a thread.

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
    writer = GGUFWriter(path, gguf.alignment)
    for key, value in gguf.metadata.items():
        if key not in SPLIT_KEYS and key != "general.alignment":
            writer.add(key, value, gguf.types[key])
    if recipe.file_type is not None:
        writer.add("general.file_type", recipe.file_type)
    if recipe.quantized:
        writer.add("general.quantization_version", QUANTIZATION_VERSION)
    if imatrix is not None:
        _note_importances(writer, imatrix)
    total = sum(target.tensor.n_bytes for target in recipe.targets)
    done = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress("quantizing", done, total)

    with ThreadPoolExecutor(n_threads, "quantize") as pool:
        for target in recipe.targets:
            tensor = target.tensor
            job = _Job(gguf, target, imatrix, pool, AHEAD * n_threads, count)
            writer.add_tensor(tensor.name, tensor.shape, target.type.name, job.pieces)
        try:
            writer.write(lambda: gguf.check(now=True))
        except FileError:
            gguf.check(now=True)  # where bytes of the source are gone, writing them fails too
            raise


class _Job:
    """One tensor on its way; ``pieces`` is called when the file has come to it."""

    def __init__(
        self,
        gguf: GGUF,
        target: Target,
        imatrix: ImportanceMatrix | None,
        pool: ThreadPoolExecutor,
        ahead: int,
        count: Callable[[int], None],
    ) -> None:
        self.gguf, self.target, self.pool, self.ahead = gguf, target, pool, ahead
        self.count, self.imatrix = count, imatrix

    def pieces(self) -> Iterator[Bytes]:
        """The tensor's bytes in their new format, in order."""
        tensor, data = self.target.tensor, self.target.tensor.data
        if not self.target.changes or not data.size:
            yield data
            self.count(tensor.n_bytes)
            return
        source, fmt = tensor.format, by_name(self.target.type.name)
        assert source is not None  # check_sources has seen to it
        k = tensor.shape[-1]
        rows = data.reshape(-1, source.row_bytes(k))
        weights = self._weights(fmt, len(rows))
        step = max(1, STRIP // k)

        def strip(at: int) -> Bytes:
            x = source.dequantize_rows(rows[at : at + step])
            try:
                return quantize_rows(fmt, x, weights and weights(at, at + len(x)))
            except ValueError as error:  # says what; where is known only here
                where = f"{tensor.name}: rows {at} to {at + len(x) - 1}"
                raise FileError(str(error), path=tensor.path, where=where) from error

        waiting: deque[Future[Bytes]] = deque()
        try:
            for at in range(0, len(rows), step):
                waiting.append(self.pool.submit(strip, at))
                if len(waiting) > self.ahead:
                    yield self._next(waiting, rows.shape[1])
            while waiting:
                yield self._next(waiting, rows.shape[1])
        finally:
            for future in waiting:
                future.cancel()

    def _next(self, waiting: deque[Future[Bytes]], row_bytes: int) -> Bytes:
        piece = waiting.popleft().result()
        self.gguf.check()
        self.count(len(piece) * row_bytes)
        return piece

    def _weights(self, fmt: Format, n_rows: int) -> Callable[[int, int], Floats] | None:
        """A function from first and last row to their importances, float32 [n or 1, K]."""
        entry = self.imatrix and self.imatrix.entries.get(self.target.tensor.name)
        if not entry or not takes_weights(fmt):
            return None
        table = entry.weights()
        per = n_rows // len(table)  # rows of one expert's matrix
        if len(table) == 1:
            return lambda begin, end: table
        return lambda begin, end: table[np.arange(begin, end) // per]


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


def takes_weights(fmt: Format) -> bool:
    """Whether a format's quantiser makes use of importances."""
    return "weights" in inspect.signature(fmt.quantize).parameters


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


def _note_importances(writer: GGUFWriter, imatrix: ImportanceMatrix) -> None:
    """Say in the file what it was quantised with, under llama.cpp's keys."""
    if imatrix.path is not None:
        writer.add("quantize.imatrix.file", str(imatrix.path)[:MAX_STRING])
    if imatrix.datasets:
        writer.add("quantize.imatrix.dataset", imatrix.datasets[0][:MAX_STRING])
    writer.add("quantize.imatrix.entries_count", len(imatrix.entries))
    writer.add("quantize.imatrix.chunks_count", imatrix.n_chunks)


def gguf_bytes(recipe: Recipe, gguf: GGUF) -> int:
    """About how large the file will be: its tensors with their padding, and today's header."""
    pad = gguf.alignment
    tensors = sum(-(-target.n_bytes // pad) * pad for target in recipe.targets)
    header = min((t.tensor.offset for t in recipe.targets), default=gguf.n_bytes)
    return tensors + header
