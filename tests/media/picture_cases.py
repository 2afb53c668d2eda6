"""The tiny models of pictures in shared/data/media, beside what transformers made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.files.gguf import open_gguf
from treadle.media.clip_config import ClipConfig, read_clip
from treadle.media.families import family_of
from treadle.media.family import MediaFamily

SIZES = {"": [(97, 61)], "two.": [(97, 61), (50, 120)]}  # width and height, by prefix in truth.npz


class Case(NamedTuple):
    """One model. ``text``: the prompt before pictures are put into it; ``mark``: what stands for
    one; ``max_rows``: the bound with which the truth was made.
    """

    name: str
    text: str
    mark: str
    max_rows: int | None = None
    min_pixels: int = 0
    max_pixels: int = 0


IMAGE = "the cat <image> is in the hat", "<image>"
IMG = "the cat [IMG] is in the hat", "[IMG]"
CONTEXT = "<img><IMG_CONTEXT></img>"
MARKED = "<|image_start|><image><|image_end|>"
CASES = [
    Case("smolvlm", *IMAGE),
    Case("llava", *IMAGE),
    Case("llavanext", *IMAGE),
    Case("pixtral", *IMG),
    Case("mistral3", *IMG),
    Case("internvl", f"the cat {CONTEXT} is in the hat", CONTEXT, 20),
    Case("lfm2vl", f"the cat {MARKED} is in the hat", MARKED, None, 4 * 32**2, 16 * 32**2),
    Case("llama4", "the cat <|image|> is in the hat", "<|image|>", 12),
]
BY_NAME = {case.name: case for case in CASES}


def picture(width: int, height: int) -> np.ndarray:
    """The picture of the truth: ``make/picture.py`` beside the data's README."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    red = 127 + 90 * np.sin(x / 7) * np.cos(y / 11)
    green = 127 + 110 * np.sin((x + 2 * y) / 13)
    blue = 255 * ((x // 9 + y // 7) % 2)
    pixels = np.stack([red, green, blue], -1)
    pixels[10:30, 20:50] = (240, 20, 30)
    pixels[35:50, 60:90, 1] = 255
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def clip_of(case: Case, data: Path) -> ClipConfig:
    """The picture part of the model's mmproj.gguf."""
    gguf = open_gguf(data / "media" / case.name / "mmproj.gguf")
    clip = read_clip(gguf)["vision"]
    return replace(
        clip,
        min_pixels=case.min_pixels or clip.min_pixels,
        max_pixels=case.max_pixels or clip.max_pixels,
    )


def made(clip: ClipConfig) -> MediaFamily:
    """The family of a file."""
    return family_of(clip.projector_type, "the file")(clip)


def truth_of(case: Case, data: Path) -> dict[str, np.ndarray]:
    with np.load(data / "media" / case.name / "truth.npz") as arrays:
        return dict(arrays)


def prompts(truth: dict[str, np.ndarray], name: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Prefixes of those of a case's prompts that the truth has ``name`` of, and their pictures."""
    for prefix, sizes in SIZES.items():
        if prefix + name in truth:
            yield prefix, [picture(*size) for size in sizes]


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference by the largest value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
