"""Predictions kept in a file, in the layout that llama.cpp's program writes and reads.

``_logits_``, then int32 ``n_ctx, n_vocab, n_windows``, the tokens int32 ``[n_windows, n_ctx]``, and
for each scored prediction a row: float32 ``scale, low``, then uint16 codes (an even number of
them); a log-probability is ``scale * code + low``. What is more than 16 below the likeliest has
code 0.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError
from treadle.files.mapping import map_file
from treadle.files.target import check_target, new_file
from treadle.perplexity.score import Floats, normalizer
from treadle.perplexity.windows import MIN_CONTEXT, Windows

MAGIC = b"_logits_"
HEAD = struct.Struct("<8s3i")
DEPTH = np.float32(16.0)
TOP = 65535


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as saved logits do."""
    try:
        with open(path, "rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _row_bytes(n_vocab: int) -> int:
    return 8 + 4 * -(-n_vocab // 2)


class SavedLogits:
    """A file of saved predictions, mapped. Raises FileError for a file that is not sound."""

    cut_off = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map = map_file(self.path, "a file of saved logits")
        self._file = np.frombuffer(self._map, np.uint8)
        if len(self._file) < HEAD.size:
            raise self._error("ends inside its header", f"{HEAD.size} bytes")
        magic, n_ctx, n_vocab, n = HEAD.unpack(self._file[: HEAD.size].tobytes())
        if magic != MAGIC:
            raise self._error("is no file of saved logits", f"{MAGIC!r} at its beginning")
        if not (MIN_CONTEXT <= n_ctx <= 1 << 24 and 1 <= n_vocab <= 1 << 24 and n >= 1):
            raise self._error(
                f"says a context of {n_ctx}, {n_vocab} tokens in the vocabulary, {n} windows"
            )
        self._n_vocab: int = n_vocab
        start = HEAD.size + 4 * n * n_ctx
        first = n_ctx // 2
        shape = (n, n_ctx - 1 - first, _row_bytes(n_vocab))
        n_bytes = start + shape[0] * shape[1] * shape[2]
        if len(self._file) != n_bytes:
            raise self._error(f"has {len(self._file)} bytes", f"{n_bytes}, by its header")
        tokens = self._file[HEAD.size : start].view("<i4").reshape(n, n_ctx)
        if not bool(np.all((tokens >= 0) & (tokens < n_vocab))):
            raise self._error("holds a token that is not in the vocabulary")
        self.windows = Windows(np.array(tokens, np.int32), first)
        self._rows = self._file[start:].reshape(shape)

    @property
    def n_vocab(self) -> int:
        """Columns of ``read``."""
        return self._n_vocab

    def read(self, window: int, begin: int, end: int) -> Floats:
        """Log-probabilities of scored predictions ``begin`` to ``end`` of a window, float32
        ``[end - begin, n_vocab]``. Raises FileError.
        """
        rows = np.array(self._rows[window, begin:end])
        self._map.check()
        scale, low = rows[:, :8].copy().view("<f4").T
        if not bool(np.all(np.isfinite(scale) & np.isfinite(low))):
            raise self._error(f"window {window} holds a scale that is not a finite number")
        codes = rows[:, 8:].copy().view("<u2")[:, : self.n_vocab]
        out: Floats = codes * scale[:, None] + low[:, None]
        return out

    def _error(self, found: str, expected: str | None = None) -> FileError:
        return FileError(found, path=self.path, expected=expected)


@contextmanager
def save_logits(
    path: str | os.PathLike[str], windows: Windows, n_vocab: int
) -> Iterator[Callable[[Floats], None]]:
    """Write such a file: gives what appends predictions, float32 ``[n, n_vocab]``.

    The file is there when ``with`` ends without an error. Raises FileError.
    """
    path = Path(path)
    check_target(path, force=True)
    with new_file(path) as file:
        file.write(HEAD.pack(MAGIC, windows.n_ctx, n_vocab, len(windows)))
        file.write(windows.tokens.astype("<i4").tobytes())

        def append(logits: Floats) -> None:
            for row in logits:  # one at a time: codes take as much memory as logits
                file.write(encode(row[None]))

        yield append


def encode(logits: Floats) -> bytes:
    """Rows of the file for logits float32 ``[n, n_vocab]``."""
    n, n_vocab = logits.shape
    top = logits.max(-1, keepdims=True)
    low = np.maximum(logits.min(-1, keepdims=True), top - DEPTH)
    scale = (top - low) / np.float32(TOP)
    steps = np.divide(logits - low, scale, out=np.zeros_like(logits), where=scale > 0)
    codes = np.rint(steps).clip(0, TOP).astype("<u2")
    rows: npt.NDArray[np.uint8] = np.zeros((n, _row_bytes(n_vocab)), np.uint8)
    norm = normalizer(logits)[:, None]
    rows[:, :8] = np.hstack([scale, low - norm]).astype("<f4").view(np.uint8)
    rows[:, 8 : 8 + 2 * n_vocab] = codes.view(np.uint8)
    return rows.tobytes()
