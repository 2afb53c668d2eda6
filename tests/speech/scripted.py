"""A speech model without weights: it writes what a script says, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from treadle.api.speech import SpeechRecognizer
from treadle.speech.config import SpecialIds, SpeechConfig

N_TEXT = 256  # bytes
LANGUAGES = {"en": 258, "de": 259}
SPECIAL = SpecialIds(
    eot=256,
    sot=257,
    translate=260,
    transcribe=261,
    sot_lm=262,
    sot_prev=263,
    no_speech=264,
    no_timestamps=265,
    timestamp_begin=266,
    languages=LANGUAGES,
)
ENGLISH = SpecialIds(**{**vars(SPECIAL), "languages": {}})
N_AUDIO_CTX = 150  # a window has 3 s
N_VOCAB = 266 + 1501
SURE = 30.0
UNSURE = 4.0


def config_of(special: SpecialIds = SPECIAL) -> SpeechConfig:
    return SpeechConfig(
        n_mels=4,
        n_vocab=N_VOCAB,
        n_embd=8,
        n_audio_ctx=N_AUDIO_CTX,
        n_text_ctx=128,
        n_audio_layer=1,
        n_text_layer=1,
        special=special,
        suppress=(1, 2),
        begin_suppress=(3, 256),
        alignment_heads=((0, 0), (0, 1)),
    )


def at(seconds: float) -> int:
    """The id of a timestamp."""
    return SPECIAL.timestamp_begin + round(seconds / 0.02)


def said(*parts: float | str) -> list[int]:
    """Ids of times and texts: ``said(0.0, " hi", 1.0)``."""
    ids: list[int] = []
    for part in parts:
        ids += [*part.encode()] if isinstance(part, str) else [at(part)]
    return ids


@dataclass
class Attempt:
    """What one decoding of a window gives. sure: how far the logit of each id is above those of
    text; UNSURE is a log-probability of -1.7. no_speech: probability of the token.
    """

    ids: list[int]
    sure: float = SURE
    no_speech: float = 0.0


class ByteTokenizer:
    """A token is a byte; special ones have no text."""

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        return [*text.encode()]

    def decode(self, ids: Sequence[int], *, start: bool = True) -> str:
        return bytes(id for id in ids if id < N_TEXT).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id])

    def prepare(self) -> None:
        pass


class ScriptedWindow:
    def __init__(self, model: ScriptedModel, number: int) -> None:
        self.model = model
        self.number = number
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def __enter__(self) -> ScriptedWindow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScriptedBatch:
    """Rows over windows. The ids behind the prompt, which ends with a task or no-timestamps token,
    decide which id of the script is the next.
    """

    def __init__(self, model: ScriptedModel, windows: Sequence[ScriptedWindow]) -> None:
        self.model = model
        self.windows = [*windows]
        self.rows: list[list[int]] = [[] for _ in windows]
        self.attempts = [model.attempt_of(window.number) for window in windows]
        self.is_begun = False
        assert all(window.is_open for window in windows)

    def logits_at(
        self, ids: Sequence[Sequence[int]], places: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        cuts = [(each[: at + 1], each[at + 1 :]) for each, at in zip(ids, places, strict=True)]
        first = self.step([before for before, _ in cuts])
        rest = [behind for _, behind in cuts]
        return first, self.step(rest) if any(rest) else first

    def step(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        assert len(ids) == len(self.rows)
        logits = np.zeros((len(ids), N_VOCAB), np.float32)
        logits[:, SPECIAL.timestamp_begin :] = -5.0
        for row, new, attempt, each in zip(self.rows, ids, self.attempts, logits, strict=True):
            assert len(new)
            assert all(0 <= id < N_VOCAB for id in new)
            row += new
            if row[-1] == SPECIAL.sot:
                self._answer_sot(each, attempt)
            begin = self._begin(row)
            if begin is not None:
                if not row[begin:]:
                    self.model.prompts.append(row[:begin])
                place = len(row) - begin
                wanted = [*attempt.ids, SPECIAL.eot]
                each[wanted[min(place, len(wanted) - 1)]] = attempt.sure
        return logits

    def _answer_sot(self, logits: np.ndarray, attempt: Attempt) -> None:
        logits[LANGUAGES[self.model.language]] = 5.0
        # of the softmax over all: e^x / (e^x + rest) is the probability
        if 0 < attempt.no_speech < 1:
            rest = float(np.exp(logits).sum()) - 1.0
            share = attempt.no_speech / (1 - attempt.no_speech)
            logits[SPECIAL.no_speech] = np.log(rest * share)

    def _begin(self, row: list[int]) -> int | None:
        """Where a row's text begins; None before that."""
        special = self.model.config.special
        ends = {special.no_timestamps, special.transcribe, special.translate}
        if not special.languages:
            ends = {special.no_timestamps, special.sot}
        places = [i for i, id in enumerate(row) if id in ends]
        return places[-1] + 1 if places else None

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [[*self.rows[i]] for i in rows]
        self.windows = [self.windows[i] for i in rows]
        self.attempts = [self.attempts[i] for i in rows]
        self.model.most_rows = max(self.model.most_rows, len(rows))

    def __enter__(self) -> ScriptedBatch:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class ScriptedModel:
    """script: for each window one attempt, or one for each decoding of it; the last one goes on, or
    if it ``repeats`` the first one follows.
    """

    script: list[Attempt | list[Attempt]]
    language: str = "en"
    config: SpeechConfig = field(default_factory=config_of)
    path: Path = Path("scripted.gguf")
    n_threads: int = 1
    repeats: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.gguf = SimpleNamespace(tensors={}, n_bytes=1)
        self.windows: list[ScriptedWindow] = []
        self.mels: list[np.ndarray] = []
        self.prompts: list[list[int]] = []  # of each decoding
        self.n_decoded: dict[int, int] = {}
        self.most_together = 0
        self.most_rows = 0
        self.is_closed = False

    def encode(self, mels: np.ndarray) -> list[ScriptedWindow]:
        config = self.config
        assert mels.shape[1:] == (config.n_mels, config.n_frames)
        assert mels.dtype == np.float32
        self.most_together = max(self.most_together, len(mels))
        self.mels += [*mels]
        made = [ScriptedWindow(self, len(self.windows) + i) for i in range(len(mels))]
        self.windows += made
        return made

    def decoder(self, windows: Sequence[ScriptedWindow]) -> ScriptedBatch:
        return ScriptedBatch(self, windows)

    def attempt_of(self, number: int) -> Attempt:
        """The attempt at a window that is next; the language's is not counted."""
        n_scripted = len(self.script)
        place = number % n_scripted if self.repeats else min(number, n_scripted - 1)
        attempts = self.script[place]
        if isinstance(attempts, Attempt):
            return attempts
        n = self.n_decoded.get(number, 0)
        self.n_decoded[number] = n + 1
        return attempts[min(n, len(attempts) - 1)]

    def alignment(self, window: ScriptedWindow, ids: Sequence[int]) -> np.ndarray:
        """Each id is spoken 4 steps, 80 ms, behind the one before it."""
        weights = np.full((2, len(ids), N_AUDIO_CTX), 1e-4, np.float32)
        for i in range(len(ids)):
            first = max(0, 4 * (i - 4))  # behind sot, language, task and no-timestamps
            weights[:, i, first : first + 4] = 1.0
        return np.asarray(weights / weights.sum(axis=2, keepdims=True))

    def close(self) -> None:
        self.is_closed = True


def recognizer(*script: Attempt | list[Attempt], **settings: Any) -> SpeechRecognizer:
    """A library's model over a script."""
    model: Any = ScriptedModel([*script], **settings)
    return SpeechRecognizer(model, model.path)


def voice(seconds: float, rate: int = 16000) -> np.ndarray:
    """A loud sound, with pauses as speech has."""
    t = np.arange(round(seconds * rate)) / rate
    loud = 0.3 * np.sin(2 * np.pi * 300 * t) * (np.sin(2 * np.pi * 2 * t) > -0.5)
    return np.asarray(loud, np.float32)
