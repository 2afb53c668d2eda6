"""Sizes and special tokens of a model that transcribes sound."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.base.fast_classes import dataclass


@dataclass(frozen=True)
class SpecialIds:
    """The ids of Whisper's special tokens; -1 for those that the vocabulary lacks.

    languages: ids by code such as "en"; empty for English-only models, whose prompts have no
        language.
    eot: ends a text. sot: begins a transcript. translate, transcribe: name the task in a prompt.
    sot_prev: begins the previous text in a prompt. sot_lm: begins a text without sound.
    no_speech: stands for a window without speech. no_timestamps: ends a prompt for text without
        timestamps.
    timestamp_begin: the timestamp of 0.00 s; each following id is 0.02 s later.
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
    """A speech model's sizes, special tokens and decoding rules.

    n_mels: mel bins of a frame. n_embd: width of the states of encoder and decoder.
    n_audio_layer, n_text_layer: layers of the encoder, and of the decoder.
    n_audio_ctx: rows of an encoded window: 1500 for 30 s. A window has ``n_frames`` mel frames.
    n_text_ctx: most ids of a row, with its prompt: 448.
    suppress: ids that are never chosen. begin_suppress: ids that are not chosen first after the
        prompt.
    alignment_heads: (layer, head) of the decoder's heads whose weights follow the words in time:
        those that the file lists, else ``alignment_heads.usual_heads``.
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
        """Number of mel frames of a window: two for each row."""
        return 2 * self.n_audio_ctx

    @property
    def n_samples(self) -> int:
        """Number of samples of a window, at 16 kHz."""
        return 160 * self.n_frames

    @property
    def multilingual(self) -> bool:
        """Whether prompts have a language and a task."""
        return bool(self.special.languages)
