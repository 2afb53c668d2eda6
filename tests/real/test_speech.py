"""whisper-base on eleven seconds of speech: the ids that transformers writes greedily."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real.conftest import Fetched
from treadle.cli import main
from treadle.media.limits import MediaLimits
from treadle.media.mel import log_mel
from treadle.media.sound_file import decode_sound
from treadle.speech.model import SpeechModel, open_speech_model


@pytest.fixture(scope="module")
def speech(data: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Samples, and what is said."""
    folder = data / "media" / "whisper_base"
    samples = decode_sound((folder / "jfk.mp3").read_bytes(), MediaLimits(), "jfk.mp3")
    return samples, json.loads((folder / "expected.json").read_text())


def greedy(model: SpeechModel, samples: np.ndarray, prompt: list[int]) -> list[int]:
    """The most probable ids behind a prompt, of text tokens and the end."""
    config = model.config
    mel = log_mel(samples, config.n_mels, config.n_samples)
    (window,) = model.encode(mel[None])
    found: list[int] = []
    with window, model.decoder([window]) as batch:
        logits = batch.step([prompt])[0]
        while config.special.eot not in found and len(found) < 60:
            found.append(int(logits[: config.special.sot].argmax()))
            logits = batch.step([found[-1:]])[0]
    return found


def test_text_of_a_folder_of_ctranslate2(
    fetched: Fetched, speech: tuple[np.ndarray, dict[str, Any]]
) -> None:
    samples, expected = speech
    with open_speech_model(fetched("whisper-base"), threads=1) as model:
        config = model.config
        found = greedy(model, samples, expected["prompt_ids"])
        assert found == expected["greedy_ids"]
        assert model.tokenizer.decode(found) == expected["text"]
        assert len(config.special.languages) == 99
        assert config.special.languages["en"] == 50259
        assert (config.special.sot_prev, config.special.no_speech) == (50361, 50362)
        assert config.special.timestamp_begin == 50364
        assert len(config.suppress) == 88


@pytest.mark.whole_real
@pytest.mark.parametrize("mix", ["F16", "Q8_0", "Q5_0", "Q4_K_M"])
def test_text_of_gguf(
    fetched: Fetched, speech: tuple[np.ndarray, dict[str, Any]], tmp_path: Path, mix: str
) -> None:
    samples, expected = speech
    path = tmp_path / "base.gguf"
    assert main(["convert", str(fetched("whisper-base")), str(path)]) == 0
    if mix != "F16":
        assert main(["quantize", str(path), str(tmp_path / "small.gguf"), mix]) == 0
        path = tmp_path / "small.gguf"
    with open_speech_model(path, threads=1) as model:
        found = greedy(model, samples, expected["prompt_ids"])
        assert model.tokenizer.decode(found) == expected["text"]
