"""The tiny models of pictures in shared/data/media, beside what transformers made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.media.media_cases import SIZES, off, picture
from treadle.devices import open_device
from treadle.files.gguf import open_gguf
from treadle.media.clip_config import ClipConfig, read_clip
from treadle.media.families import family_of
from treadle.media.family import MediaFamily
from treadle.media.projector import Projector, open_projector

__all__ = ["BY_NAME", "CASES", "PictureCase", "clip_of", "made", "off", "opened", "picture"]


class PictureCase(NamedTuple):
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
    PictureCase("smolvlm", *IMAGE),
    PictureCase("llava", *IMAGE),
    PictureCase("llavanext", *IMAGE),
    PictureCase("pixtral", *IMG),
    PictureCase("mistral3", *IMG),
    PictureCase("internvl", f"the cat {CONTEXT} is in the hat", CONTEXT, 20),
    PictureCase("lfm2vl", f"the cat {MARKED} is in the hat", MARKED, None, 4 * 32**2, 16 * 32**2),
    PictureCase("llama4", "the cat <|image|> is in the hat", "<|image|>", 12),
]
BY_NAME = {case.name: case for case in CASES}


def clip_of(case: PictureCase, data: Path) -> ClipConfig:
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


def opened(case: PictureCase, data: Path, isa: str | None = None) -> Projector:
    """The model's projector, from mmproj.gguf."""
    gguf = open_gguf(data / "media" / case.name / "mmproj.gguf")
    bounds = {"image_min_pixels": case.min_pixels, "image_max_pixels": case.max_pixels}
    keys = {f"clip.vision.{key}": value for key, value in bounds.items() if value}
    gguf.metadata = {**gguf.metadata, **keys}
    return open_projector(gguf, open_device("cpu", isa, 1, None), exact=True)


def truth_of(case: PictureCase, data: Path) -> dict[str, np.ndarray]:
    with np.load(data / "media" / case.name / "truth.npz") as arrays:
        return dict(arrays)


def prompts(truth: dict[str, np.ndarray], name: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Prefixes of those of a case's prompts that the truth has ``name`` of, and their pictures."""
    for prefix, sizes in SIZES.items():
        if prefix + name in truth:
            yield prefix, [picture(*size) for size in sizes]
