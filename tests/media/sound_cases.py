"""The tiny models of sound in shared/data/media, beside what transformers made of them."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.devices import open_device
from treadle.files.gguf import open_gguf
from treadle.media.clip_config import ClipConfig, read_clip
from treadle.media.families import family_of
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import Projector, open_projector
from treadle.media.sound_family import SoundFamily

RATE = 16000


class SoundCase(NamedTuple):
    """One model. ``text``: the truth's prompt, with ``mark`` for the sound; ``folder``: whether the
    model's safetensors are there; ``n_rows``: rows of the truth's sound of 3 s.
    """

    name: str
    text: tuple[str, str]
    n_rows: int
    folder: bool = True


CASES = [
    SoundCase("qwen2audio", ("", " the cat"), 75, folder=False),
    SoundCase("voxtral", ("[INST]", " the cat[/INST]"), 37),
    SoundCase("qwen3asr", ("", " the cat"), 39),
]
BY_NAME = {case.name: case for case in CASES}


def sound(seconds: float = 3.0) -> np.ndarray:
    """The sound of the truth: ``make/picture.py`` beside the data's README."""
    t = np.arange(int(seconds * RATE)) / RATE
    made = 0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t)
    made += 0.1 * np.sin(2 * np.pi * 1800 * t) * (np.sin(2 * np.pi * 3 * t) > 0)
    made += 0.02 * np.random.default_rng(5).standard_normal(t.shape)
    return made.astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of f32 or int16 samples."""
    width = samples.dtype.itemsize
    data = samples.astype("<i2" if width == 2 else "<f4").tobytes()
    codec = 1 if width == 2 else 3
    form = struct.pack("<HHIIHH", codec, 1, rate, width * rate, width, 8 * width)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def clip_of(name: str, data: Path) -> ClipConfig:
    """The sound part of the model's mmproj.gguf."""
    return read_clip(open_gguf(data / "media" / name / "mmproj.gguf"))["audio"]


def family(clip: ClipConfig) -> SoundFamily:
    made = family_of(clip.projector_type, "the file")(clip)
    assert isinstance(made, SoundFamily)
    return made


def opened(
    name: str, data: Path, *, folder: bool = False, isa: str | None = None, exact: bool = True
) -> Projector:
    """The model's projector, from mmproj.gguf or from its folder."""
    path = data / "media" / name
    device = open_device("cpu", isa, 1, None)
    return open_projector(path if folder else path / "mmproj.gguf", device, exact=exact)


def truth_of(name: str, data: Path) -> dict[str, np.ndarray]:
    with np.load(data / "media" / name / "truth.npz") as arrays:
        return dict(arrays)


def of_truth(case: SoundCase, made: PreparedMedia) -> PreparedMedia:
    """The prepared sound as the truth has it: of Voxtral the first window alone, which is shorter
    than 3 s there.
    """
    layout = [range(case.n_rows) if isinstance(each, range) else each for each in made.layout]
    return replace(
        made,
        inputs=made.inputs[:1],
        layout=tuple(layout),
        n_rows=case.n_rows,
        advance=case.n_rows,
    )
