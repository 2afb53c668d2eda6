"""Several sounds, long ones among them, in one prompt: logits beside transformers' in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media.decoder_cases import error
from tests.media.sound_cases import sound
from tests.media.test_end_to_end import encode, marked, opened, sound_pieces
from tests.models.hf_tiny import float64_only, require_transformers
from treadle.media.mel_input import MelInput
from treadle.scheduler.request import MediaPrompt

TOLERANCE = 2e-5


def features(prompt: MediaPrompt, name: str) -> dict[str, Any]:
    """The frames of a prompt's sounds as transformers' classes take them."""
    import torch

    inputs = [encoder.prepared.inputs for encoder in prompt.encoders.values()]
    assert all(isinstance(one, MelInput) for each in inputs for one in each)
    if name == "voxtral":  # each window is a row of the batch
        windows = [one.patches.T for each in inputs for one in each]
        return {"input_features": torch.from_numpy(np.stack(windows).astype(np.float64))}
    whole = [each[0].sound.frames for each in inputs]
    n_frames = -(-max(map(len, whole)) // 100) * 100
    padded = np.zeros((len(whole), 128, n_frames))
    mask = np.zeros((len(whole), n_frames), np.int64)
    for i, frames in enumerate(whole):
        padded[i, :, : len(frames)] = frames.T
        mask[i, : len(frames)] = 1
    found = {"input_features": torch.from_numpy(padded)}
    return {**found, "input_features_mask": torch.from_numpy(mask)}


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("voxtral", (2.0, 4.0)), ("qwen3asr", (2.5, 9.3)), ("qwen3asr", (0.2, 1.0))],
)
def test_several_sounds(name: str, seconds: tuple[float, float], data: Path) -> None:
    require_transformers()
    import torch
    import transformers

    kind = {"voxtral": "Voxtral", "qwen3asr": "Qwen3ASR"}[name]
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    judge = model_class.from_pretrained(
        data / "media" / name, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    sounds = [sound(seconds[0]), sound(seconds[1])[::-1].copy()]
    with opened(name, data, real=True) as (model, media):
        prompt = media.raw_ids(sound_pieces(name, *sounds))
        ids = torch.tensor([marked(model, media, prompt)])
        with float64_only(), torch.no_grad():
            expected = judge(input_ids=ids, **features(prompt, name)).logits[0].numpy()
        encode(prompt)
        with model.session() as session:
            assert error(session.logits(list(prompt)), expected) < TOLERANCE
