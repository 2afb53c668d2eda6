"""A speech model, opened: windows of sound in, logits of texts out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.speech.config import SpeechConfig
    from treadle.tokenizer.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]


class EncodedWindow:
    """A window's keys and values in the decoder's cross-attention layers. ``close`` frees them;
    batches that use it hold them too.
    """

    def close(self) -> None:
        """Release the keys and values, once no batch uses them."""
        raise NotImplementedError

    def __enter__(self) -> EncodedWindow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DecoderBatch:
    """Rows of text, each over its window. Use it as a context manager, or ``close`` it."""

    def __len__(self) -> int:
        """Number of rows."""
        raise NotImplementedError

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each row that were run: prompts and texts."""
        raise NotImplementedError

    def step(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Append ``ids[i]`` to row ``i``; return the logits behind the last of each, f32
        ``[n_rows, n_vocab]``, a copy. Rows may get different numbers of ids, each at least one:
        prompts first, then mostly one.

        Raises TreadleError for a row without ids, an id that is not in the vocabulary, or another
        number of rows; ContextFullError for more than ``config.n_text_ctx`` ids in a row.
        """
        raise NotImplementedError

    def logits_at(self, ids: Sequence[Sequence[int]], place: int) -> np.ndarray:
        """As ``step``, and return the logits behind id ``place`` of each row's ``ids`` instead, as
        those behind the ``sot`` token, which tell whether there is speech.
        """
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows with these numbers, in this order; a number given twice duplicates its
        row, which costs one page.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the rows. The windows stay."""
        raise NotImplementedError

    def __enter__(self) -> DecoderBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpeechModel:
    """A model that transcribes sound; see ``open_speech_model``.

    Thread-safe: threads take turns, run by run.
    """

    config: SpeechConfig
    tokenizer: Tokenizer
    n_threads: int

    def encode(self, mels: np.ndarray) -> list[EncodedWindow]:
        """Encode windows: f32 ``[n, n_mels, n_frames]`` of ``media.mel.log_mel``, all of
        ``config.n_frames``. They are run together.

        Raises TreadleError for another shape, and NoRoomError if there is no room for their keys
        and values: close others first.
        """
        raise NotImplementedError

    def decoder(self, windows: Sequence[EncodedWindow]) -> DecoderBatch:
        """Return a batch with an empty row for each window; a window may be given several times."""
        raise NotImplementedError

    def alignment(self, window: EncodedWindow, ids: Sequence[int]) -> np.ndarray:
        """Return the cross-attention weights of ``config.alignment_heads`` for each of ``ids``, a
        whole row from ``sot`` on: f32 ``[n_heads, n_ids, n_audio_ctx]``, each sums to 1. Row ``i``
        holds what the decoder attended to when it read id ``i``, to write id ``i + 1``.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release plans, weights and files."""
        raise NotImplementedError

    def __enter__(self) -> SpeechModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_speech_model(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_windows: int = 8,
    max_rows: int = 40,
    device: str = "cpu",
    isa: str | None = None,
    progress: Progress | None = None,
) -> SpeechModel:
    """Open a Whisper model: a Hugging Face folder, a folder or ``model.bin`` of CTranslate2, a
    ``ggml-*.bin`` of whisper.cpp, or a GGUF file of ``treadle convert``.

    ``max_windows``: encoded windows at a time; ``max_rows``: rows of text at a time; their memory
    is used once they are. ``threads``, ``device``, ``isa``, ``progress``: as in ``treadle.load``.

    Raises FileError for a damaged file, UnsupportedError for another model.
    """
    raise NotImplementedError
