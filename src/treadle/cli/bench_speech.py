"""``treadle bench`` of speech models: encoding, decoding, and the speed against real time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.cli.speech import load_recognizer
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, print_table, say

if TYPE_CHECKING:
    from treadle.api.speech import SpeechRecognizer

N_TEXT = 100
"""Tokens of a window's text: those of 30 s of ordinary speech."""


@dataclass(frozen=True)
class SpeechResult:
    """Times of one model, medians of the repetitions.

    window_s: seconds of sound in a window. encode_s: seconds to encode one. tok_s: tokens a second
    of decoding one text. times_faster: seconds of sound over seconds of work, for a window with
    N_TEXT tokens or, if a sound is given, for its transcription. sound: that file's name, ""
    without one. sound_s: its seconds.
    """

    model: str
    threads: int
    window_s: float
    encode_s: float
    tok_s: float
    times_faster: float
    sound: str = ""
    sound_s: float | None = None


def bench_speech(
    paths: Sequence[Path],
    names: Sequence[str],
    threads: Sequence[int | None],
    repeat: int,
    device: str | None,
    sound: Path | None,
    progress: ProgressBar,
) -> list[SpeechResult]:
    """Time each model with each number of threads (None: the default), and return a result for each
    pair. ``names``: the models' names in results; ``sound``: a file to transcribe too, or None.
    """
    results: list[SpeechResult] = []
    for path, name in zip(paths, names, strict=True):
        for n_threads in threads:
            settings = {"threads": n_threads, "device": device}
            with load_recognizer(path, progress, settings) as recognizer:
                results.append(time_recognizer(recognizer, name, repeat, sound, progress))
    return results


def time_recognizer(
    recognizer: SpeechRecognizer,
    name: str,
    repeat: int,
    sound: Path | None,
    progress: ProgressBar,
) -> SpeechResult:
    """Time encoding and decoding of one window of noise, ``repeat`` times, and the transcription of
    the file ``sound`` once, if one is given.
    """
    from treadle.media.mel import log_mel
    from treadle.media.sound_buffer import RATE
    from treadle.speech.warm import warm_model

    model = recognizer.model
    config = model.config
    warm_model(model)
    random = np.random.default_rng(0)
    samples = random.standard_normal(config.n_samples).astype(np.float32) * 0.1
    prompt = [config.special.sot] * 3
    n_text = min(N_TEXT, config.n_text_ctx - len(prompt))
    encode_s: list[float] = []
    decode_s: list[float] = []
    for i in range(repeat):
        progress("timing", i, repeat)
        began = time.perf_counter()
        mel = log_mel(samples, config.n_mels, config.n_samples)
        (window,) = model.encode(mel[None])
        encoded = time.perf_counter()
        with window, model.decoder([window]) as batch:
            batch.step([prompt])
            for _ in range(n_text):
                batch.step([[config.special.sot]])
        encode_s.append(encoded - began)
        decode_s.append(time.perf_counter() - encoded)
    progress("timing", repeat, repeat)
    window_s = config.n_samples / RATE
    factor = window_s / (median(encode_s) + median(decode_s))
    sound_s: float | None = None
    if sound is not None:
        began = time.perf_counter()
        sound_s = recognizer.transcribe(sound).finish().seconds
        factor = sound_s / (time.perf_counter() - began)
    return SpeechResult(
        model=name,
        threads=recognizer.n_threads,
        window_s=window_s,
        encode_s=median(encode_s),
        tok_s=n_text / median(decode_s),
        times_faster=factor,
        sound="" if sound is None else sound.name,
        sound_s=sound_s,
    )


def print_speech(results: Sequence[SpeechResult], as_json: bool) -> None:
    """Print the results, as a table or as JSON."""
    if as_json:
        print_json([asdict(result) for result in results])
        return
    rows = [
        (
            result.model,
            str(result.threads),
            f"{result.encode_s:.2f} s",
            f"{result.tok_s:.1f}",
            f"{result.times_faster:.1f}",
        )
        for result in results
    ]
    print_table(["model", "threads", "window", "tok/s", "times faster"], rows)
    first = results[0]
    what = f"with {N_TEXT} tokens of text a window"
    if first.sound:
        what = f"of {first.sound}, {first.sound_s:.0f} s"
    say(f"window: time of encoding {first.window_s:.0f} s. Times faster than the sound {what}.")
