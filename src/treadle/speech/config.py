"""Sizes and special tokens of a model that transcribes sound."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.base.fast_dataclass import dataclass


@dataclass(frozen=True)
class SpecialIds:
    """The ids of Whisper's special tokens.

    languages: by code such as "en"; empty for a model of English alone, which has no language token
        in its prompt.
    sot_prev: begins the text before a window; sot_lm: begins a text without sound.
    timestamp_begin: the id of 0.00 s; the ids behind it count in steps of 0.02 s.
    """

    eot: int
    sot: int
    translate: int
    transcribe: int
    sot_lm: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    languages: Mapping[str, int]


@dataclass(frozen=True)
class SpeechConfig:
    """A speech model's sizes, special tokens, and what its file says about decoding.

    n_audio_ctx: rows of an encoded window: 1500 for 30 s. A window has ``n_frames`` frames.
    n_text_ctx: most ids of a row, its prompt included: 448.
    suppress: ids that are never chosen; begin_suppress: not as the first id after the prompt.
    alignment_heads: layer and head of the decoder's heads whose weights follow the words' times;
        those of the file, else all heads of the upper half of the layers.
    """

    n_mels: int
    n_vocab: int
    n_embd: int
    n_audio_ctx: int
    n_text_ctx: int
    n_audio_layer: int
    n_text_layer: int
    special: SpecialIds
    suppress: tuple[int, ...]
    begin_suppress: tuple[int, ...]
    alignment_heads: tuple[tuple[int, int], ...]

    @property
    def n_frames(self) -> int:
        """Frames of a window's mel spectrogram: two for each row."""
        return 2 * self.n_audio_ctx

    @property
    def n_samples(self) -> int:
        """Samples of a window at 16 kHz."""
        return 160 * self.n_frames

    @property
    def multilingual(self) -> bool:
        """Whether prompts have a language and a task."""
        return bool(self.special.languages)
