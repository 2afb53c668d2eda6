"""The importance matrix, and its files: llama.cpp's GGUF layout, and the older binary one.

For a weight matrix of K columns it has, summed over tokens, the square of each of the K inputs, and
the number of tokens. A tensor of several experts has a row of sums and a count for each expert.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError
from treadle.files.gguf import GGUF, GGUFArray, GGUFWriter, ValueType, open_gguf
from treadle.files.reader import FileReader, read_head

SUMS = ".in_sum2"
COUNTS = ".counts"
KIND = "imatrix"  # general.type
# binary layout: beyond these it is another file
MAX_NAME = 1 << 12
MAX_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False)
class ImatrixEntry:
    """Squared-input sums and token counts of one weight tensor of K columns; ``n_expert`` is 1 for
    a tensor without experts.
    """

    sums: npt.NDArray[np.float64]  # of squares [n_expert, K]
    counts: npt.NDArray[np.float64]  # tokens [n_expert]

    def weights(self) -> npt.NDArray[np.float32]:
        """Return the mean squares, float32 [n_expert, K]; 1 for an expert that no token chose."""
        seen = self.counts[:, None] > 0
        mean = self.sums / np.where(seen, self.counts[:, None], 1.0)
        return np.where(seen, mean, 1.0).astype(np.float32)

    def __add__(self, other: ImatrixEntry) -> ImatrixEntry:
        return ImatrixEntry(self.sums + other.sums, self.counts + other.counts)


@dataclass(frozen=True, eq=False)
class ImportanceMatrix:
    """An importance matrix: ``entries`` by the name of the weight tensor, and in ``datasets`` the
    names of the texts that they come from. ``n_chunks``: windows of ``chunk_size`` tokens that were
    run; ``path``: the file that it was read from.
    """

    entries: Mapping[str, ImatrixEntry]
    datasets: tuple[str, ...] = ()
    n_chunks: int = 0
    chunk_size: int = 0  # tokens
    path: Path | None = field(default=None)

    def __add__(self, other: ImportanceMatrix) -> ImportanceMatrix:
        """Return the matrix whose sums and counts are those of both. Raises FileError if a tensor
        has another shape in the other.
        """
        entries = dict(self.entries)
        for name, entry in other.entries.items():
            own = entries.get(name)
            if own is not None and own.sums.shape != entry.sums.shape:
                raise FileError(
                    f"has {entry.sums.shape} importances",
                    path=other.path or "",
                    where=name,
                    expected=f"{own.sums.shape}, as in {self.path or 'the matrix it is added to'}",
                )
            entries[name] = entry if own is None else own + entry
        return ImportanceMatrix(
            entries,
            tuple(dict.fromkeys((*self.datasets, *other.datasets))),
            self.n_chunks + other.n_chunks,
            self.chunk_size or other.chunk_size,
            self.path,
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file in llama.cpp's GGUF layout, whole or not at all. Raises FileError if it
        cannot be written.
        """
        writer = GGUFWriter(path)
        writer.add("general.type", KIND)
        writer.add("imatrix.datasets", list(self.datasets), ValueType.STRING)
        writer.add("imatrix.chunk_count", self.n_chunks, ValueType.UINT32)
        writer.add("imatrix.chunk_size", self.chunk_size, ValueType.UINT32)
        for name, entry in sorted(self.entries.items()):
            sums = entry.sums.astype(np.float32)
            counts = entry.counts.astype(np.float32)
            writer.add_tensor(name + SUMS, sums.shape, "F32", sums)
            writer.add_tensor(name + COUNTS, (len(counts), 1), "F32", counts)
        writer.write()


def read(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Read an importance matrix from a file of either layout.

    Raises FileError for a file that is neither, or whose numbers cannot be sums of squares.
    """
    path = Path(path)
    if read_head(path, 4, "an importance matrix") == b"GGUF":
        with open_gguf(path) as gguf:
            return _from_gguf(gguf)
    return _from_binary(_Reader(path, "an importance matrix"))


def _from_gguf(gguf: GGUF) -> ImportanceMatrix:
    path = gguf.path
    meta = gguf.metadata
    if meta.get("general.type") != KIND:
        raise FileError(
            f"is a GGUF file of type {meta.get('general.type', 'model')!r}",
            path=path,
            where="general.type",
            expected=f"{KIND!r}",
        )
    entries = {}
    for name in gguf.tensors:
        if not name.endswith(SUMS):
            continue
        stem = name.removesuffix(SUMS)
        if stem + COUNTS not in gguf.tensors:
            raise FileError("is missing", path=path, where=stem + COUNTS)
        sums = _floats(gguf, name)
        counts = _floats(gguf, stem + COUNTS).reshape(-1)
        entries[stem] = _checked(sums.reshape(-1, sums.shape[-1]), counts, path, stem)
    if not entries:
        raise FileError("holds no importances", path=path, expected=f"tensors named *{SUMS}")
    datasets = meta.get("imatrix.datasets", ())
    names = tuple(str(n) for n in datasets) if isinstance(datasets, GGUFArray) else ()
    chunks = meta.get("imatrix.chunk_count", 0)
    size = meta.get("imatrix.chunk_size", 0)
    return ImportanceMatrix(
        entries,
        names,
        chunks if isinstance(chunks, int) else 0,
        size if isinstance(size, int) else 0,
        path,
    )


def _floats(gguf: GGUF, name: str) -> npt.NDArray[np.float64]:
    tensor = gguf.tensors[name]
    if tensor.format is None or tensor.format.block > 1 or not tensor.shape:
        raise FileError(
            f"is {tensor.type_name}", path=gguf.path, where=name, expected="floats, such as F32"
        )
    if not tensor.n_bytes:
        raise FileError("is empty", path=gguf.path, where=name, expected="one number per column")
    return tensor.dequantize().astype(np.float64)


def _checked(
    sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64], path: Path, name: str
) -> ImatrixEntry:
    if len(counts) != len(sums):
        raise FileError(
            f"{len(counts)} counts", path=path, where=name, expected=f"{len(sums)}, one per matrix"
        )
    for values in (sums, counts):
        if not bool(np.all(np.isfinite(values) & (values >= 0.0))):
            raise FileError(
                "holds a number that cannot be a sum of squares",
                path=path,
                where=name,
                expected="finite numbers of at least 0",
            )
    return ImatrixEntry(sums, counts)


def _from_binary(reader: _Reader) -> ImportanceMatrix:
    """Read the layout of ``imatrix.dat``: little-endian int32 and float32, without a magic.

    It has ``n_entries``; then per entry ``len, name, n_calls, n_values, values``, where values are
    mean squares times ``n_calls``; then, in later files, ``n_chunks, len, name of the text``.
    """
    entries: dict[str, ImatrixEntry] = {}
    for _ in range(reader.integer("number of entries", MAX_ENTRIES)):
        at = reader.at
        stem = reader.text(reader.integer("length of a name", MAX_NAME), "a name", at)
        calls = reader.integer(f"{stem}: number of calls")
        values = reader.take(4 * reader.count(f"{stem}: number of values", 4, 4), stem)
        sums = np.frombuffer(values, "<f4").astype(np.float64)[None]
        entries[stem] = _checked(sums, np.array([float(calls)]), reader.path, stem)
    if not entries:
        raise reader.error("no entries")
    chunks = 0
    datasets = ""
    if reader.at < len(reader.file):
        chunks = reader.integer("number of chunks")
        text = reader.take(reader.integer("length of the text's name", MAX_NAME), "its name")
        datasets = text.decode("utf-8", "replace")
    return ImportanceMatrix(entries, (datasets,) if datasets else (), chunks, 0, reader.path)


class _Reader(FileReader):
    """Reader of the older layout, from front to back."""

    def integer(self, what: str, most: int = (1 << 31) - 1) -> int:
        """Read an int32, called ``what`` in messages. Raises FileError unless it is from 0 to
        ``most``: the format has no magic, so the file may be of another kind.
        """
        value = int.from_bytes(self.take(4, what), "little", signed=True)
        if not 0 <= value <= most:
            expected = f"0 to {most}, in an importance matrix"
            raise self.error(f"{what} is {value}", self.at - 4, expected=expected)
        return value


def missing(matrix: ImportanceMatrix, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that the matrix has no entry for."""
    return [name for name in names if name not in matrix.entries]
