"""SpeechModel: windows of sound in, logits of texts out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import cached_property
from treadle.convert.whisper.file import WhisperFile
from treadle.convert.whisper.open import open_whisper
from treadle.devices import open_device
from treadle.devices.cpu.mapping_faults import guard_mappings
from treadle.engine.cross_keys import CrossKeys
from treadle.engine.engine import Engine
from treadle.errors import TreadleError
from treadle.machine.topology import usable_threads
from treadle.plan.weights import Weights
from treadle.speech.alignment import cross_weights
from treadle.speech.batch import DecoderBatch, EncodedWindow
from treadle.speech.encoder import SoundEncoder
from treadle.speech.read import WhisperParts, read_parts

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.files.gguf import GGUF
    from treadle.speech.config import SpeechConfig
    from treadle.tokenizer.tokenizer import Tokenizer

__all__ = ["DecoderBatch", "EncodedWindow", "SpeechModel", "open_speech_model"]

Progress = Callable[[str, int, int], None]
KV = "f16"  # keys and values of the decoder; those of the encoder are f32
EXACT_KV = "f32"
MAX_WINDOWS = 8
MAX_ROWS = 40


class SpeechModel:
    """An opened model for speech recognition; ``open_speech_model`` returns one.

    Thread-safe: only one run at a time uses the device.
    """

    def __init__(
        self,
        gguf: GGUF,
        parts: WhisperParts,
        device: Device,
        *,
        max_windows: int,
        max_rows: int,
        exact: bool,
    ) -> None:
        """Take over the file ``gguf``, whose ``parts`` ``read_parts`` has returned, and the device.
        ``max_windows``, ``max_rows``, ``exact``: as in ``open_speech_model``.
        """
        self.gguf = gguf
        self.path = gguf.path
        self.config: SpeechConfig = parts.config
        self.device = device
        self.engine = Engine(
            parts.decoder,
            parts.text,
            device,
            n_ctx=parts.config.n_text_ctx,
            kv=EXACT_KV if exact else KV,
            n_sequences=max_rows,
            n_encoded=max_windows,
        )
        self._encoder = SoundEncoder(parts, device, self.engine.lock, exact=exact)
        weights = Weights(parts.decoder, device)
        n_rows = parts.config.n_audio_ctx
        self._cross = CrossKeys(parts.keys, weights, self.engine.cache, device, n_rows)

    @property
    def n_threads(self) -> int:
        """Number of compute threads."""
        return self.device.n_threads

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built on first use. Special tokens are control tokens, which
        ``decode`` leaves out.
        """
        from treadle.tokenizer.tokenizer import load_tokenizer

        if isinstance(self.gguf, WhisperFile):
            self.gguf.with_merges()
        return load_tokenizer(self.gguf)

    def encode(self, mels: np.ndarray) -> list[EncodedWindow]:
        """Encode windows, f32 ``[n, n_mels, n_frames]`` of ``media.mel.log_mel`` with
        ``config.n_frames`` each, one after the other.

        Raises TreadleError for another shape or values that are not finite, and NoRoomError if
        there is no room for their keys and values: close other windows first.
        """
        config = self.config
        expected = config.n_mels, config.n_frames
        if mels.ndim != 3 or mels.shape[1:] != expected:
            shape = list(mels.shape)
            raise TreadleError(f"mels of shape {shape}: expected [n, {expected[0]}, {expected[1]}]")
        if not np.isfinite(mels).all():
            raise TreadleError("mels with values that are not finite")
        made: list[EncodedWindow] = []
        try:
            for mel in np.asarray(mels, np.float32):
                with self.engine.lock:
                    keys = self.engine.cache.encoded(config.n_audio_ctx)
                made.append(EncodedWindow(self.engine, keys))
                states = self._encoder.run(mel)
                with self.engine.lock:
                    self._cross.store(states, keys)
        except BaseException:
            for window in made:
                window.close()
            raise
        return made

    def decoder(self, windows: Sequence[EncodedWindow]) -> DecoderBatch:
        """Return a batch with an empty row for each window; a window may be given several times.
        Raises TreadleError for a closed window, or one of another model.
        """
        return DecoderBatch(self.engine, windows)

    def alignment(self, window: EncodedWindow, ids: Sequence[int]) -> np.ndarray:
        """Return the cross-attention weights of ``config.alignment_heads`` for each of ``ids``, a
        whole row from ``sot`` on: f32 ``[n_heads, n_ids, n_audio_ctx]``, of which each row sums to
        1. Row ``i`` has the weights with which the decoder read id ``i``, to predict id ``i + 1``.

        Raises TreadleError for no ids or a closed window, and ContextFullError for more than
        ``config.n_text_ctx``.
        """
        return cross_weights(self.engine, window, ids, self.config.alignment_heads)

    def close(self) -> None:
        """Release plans, weights and files. A second call does nothing."""
        with self.engine.lock:
            self._encoder.close()
            self._cross.close()
            self.engine.close()
            self.gguf.close()

    def __enter__(self) -> SpeechModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_speech_model(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_windows: int = MAX_WINDOWS,
    max_rows: int = MAX_ROWS,
    exact: bool = False,
    device: str = "cpu",
    isa: str | None = None,
    progress: Progress | None = None,
) -> SpeechModel:
    """Open a Whisper model: a Hugging Face folder, a folder or ``model.bin`` of CTranslate2, a
    ``ggml-*.bin`` of whisper.cpp, or a GGUF file of ``treadle convert``.

    ``max_windows``: most encoded windows that are open at a time; ``max_rows``: most rows of text
    at a time; memory is used only for those that exist. ``exact``: the encoder's products, and keys
    and values, are f32; otherwise logits of whisper-base are 5e-3 off (the largest is 32).
    ``threads``, ``device``, ``isa``, ``progress``: as in ``treadle.load``.

    Raises FileError for a damaged file, UnsupportedError for another model.
    """
    guard_mappings()
    gguf = open_whisper(path)
    try:
        parts = read_parts(gguf)
        opened = open_device(device, isa, threads or usable_threads()[0], progress)
        sizes = {"max_windows": max_windows, "max_rows": max_rows}
        return SpeechModel(gguf, parts, opened, exact=exact, **sizes)
    except BaseException:
        gguf.close()
        raise
