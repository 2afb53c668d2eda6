"""Saved predictions, in the file layout of llama.cpp's perplexity program.

``_logits_``, then int32 ``n_ctx, n_vocab, n_windows``, the tokens int32 ``[n_windows, n_ctx]``, and
one row per scored prediction: float32 ``scale, low``, then uint16 codes (an even number of them). A
log-probability is ``scale * code + low``. Values more than 16 below the likeliest have code 0.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treadle.evaluate.score import Floats, normalizer
from treadle.evaluate.windows import MIN_CONTEXT, TokenWindows
from treadle.files.reader import MappedReader
from treadle.files.target import check_target, new_file

MAGIC = b"_logits_"
HEAD = struct.Struct("<8s3i")
DEPTH = np.float32(16.0)
TOP = 65535


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Whether a file has the magic number of saved logits."""
    try:
        with open(path, "rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _row_bytes(n_vocab: int) -> int:
    return 8 + 4 * -(-n_vocab // 2)


class SavedLogits(MappedReader):
    """A memory-mapped file of saved predictions. Raises FileError for an invalid file."""

    cut_off = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path), "a file of saved logits")
        self.check_inside(0, HEAD.size, "its header")
        magic, n_ctx, n_vocab, n = HEAD.unpack(self.file[: HEAD.size].tobytes())
        if magic != MAGIC:
            raise self.error("is not a file of saved logits", 0, expected=f"{MAGIC!r}")
        if not (MIN_CONTEXT <= n_ctx <= 1 << 24 and 1 <= n_vocab <= 1 << 24 and n >= 1):
            raise self.error(
                f"declares a context of {n_ctx}, {n_vocab} tokens in the vocabulary, {n} windows"
            )
        self.n_vocab: int = n_vocab  # columns of ``read``
        start = HEAD.size + 4 * n * n_ctx
        first = n_ctx // 2
        shape = (n, n_ctx - 1 - first, _row_bytes(n_vocab))
        n_bytes = start + shape[0] * shape[1] * shape[2]
        if len(self.file) != n_bytes:
            raise self.error(
                f"has {len(self.file)} bytes", expected=f"{n_bytes}, as its header declares"
            )
        tokens = self.file[HEAD.size : start].view("<i4").reshape(n, n_ctx)
        if not bool(np.all((tokens >= 0) & (tokens < n_vocab))):
            raise self.error("has a token that is not in the vocabulary")
        self.windows = TokenWindows(np.array(tokens, np.int32), first)
        self._rows = self.file[start:].reshape(shape)

    def read(self, window: int, begin: int, end: int) -> Floats:
        """Return log-probabilities of scored predictions ``begin`` to ``end`` (exclusive) of window
        number ``window``, float32 ``[end - begin, n_vocab]``. Raises FileError if the file has
        changed or a scale is not finite.
        """
        rows = np.array(self._rows[window, begin:end])
        self.map.check()
        scale, low = rows[:, :8].copy().view("<f4").T
        if not bool(np.all(np.isfinite(scale) & np.isfinite(low))):
            raise self.error(f"window {window} has a scale that is not a finite number")
        codes = rows[:, 8:].copy().view("<u2")[:, : self.n_vocab]
        out: Floats = codes * scale[:, None] + low[:, None]
        return out


@contextmanager
def save_logits(
    path: str | os.PathLike[str], windows: TokenWindows, n_vocab: int
) -> Iterator[Callable[[Floats], None]]:
    """Create a file of saved predictions of ``windows``; yield a function that appends logits,
    float32 ``[n, n_vocab]``, in the order of ``schedule``.

    The file appears when ``with`` ends without an error. Raises FileError if it cannot be written.
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
    """Encode logits, float32 ``[n, n_vocab]``, as rows of the file; return their bytes."""
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
