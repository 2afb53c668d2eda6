"""The tiny models in shared/data/media, and what their projectors are opened with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.matrix_rounding import sharp_isa
from treadle.convert.open import open_model
from treadle.devices import open_device
from treadle.files.gguf import GGUF, open_gguf
from treadle.media.family import MediaFamily
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import Projector, open_projector
from treadle.tokenizer.tokenizer import load_tokenizer

SHARP = sharp_isa()  # the limits of tests hold for products in f32
NO_KEYS: Mapping[str, object] = {}
SIZES = {"": [(97, 61)], "two.": [(97, 61), (50, 120)]}  # width and height, by prefix in truth.npz


class Case(NamedTuple):
    """One model. ``max_rows``, ``keys``: settings of the truth that its file lacks;
    ``folder``: whether the model's safetensors are there; ``projected``: the name of the truth's
    media rows.
    """

    name: str
    max_rows: int | None = None
    keys: Mapping[str, int] = {}
    folder: bool = True
    projected: str = "tower.pooled"


CASES = [
    Case("qwen2vl", 64, folder=False),
    Case("qwen25vl", 64, keys={"clip.vision.window_size": 56}),
    Case("qwen3vl", 16),
    Case("qwen35", 16),
    Case("glm4v", keys={"clip.vision.image_min_pixels": 4 * 28**2}, folder=False),
    Case("gemma3", projected="projected"),
    Case("gemma4", 70, projected="projected"),
    Case("gemma4u", 45, projected="projected"),
]
BY_NAME = {case.name: case for case in CASES}


def picture(width: int = 97, height: int = 61) -> np.ndarray:
    """The picture of the truth: ``make/picture.py`` beside the data's README."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    red = 127 + 90 * np.sin(x / 7) * np.cos(y / 11)
    green = 127 + 110 * np.sin((x + 2 * y) / 13)
    blue = 255 * ((x // 9 + y // 7) % 2)
    pixels = np.stack([red, green, blue], -1)
    pixels[10:30, 20:50] = (240, 20, 30)
    pixels[35:50, 60:90, 1] = 255
    return np.asarray(np.clip(np.rint(pixels), 0, 255), np.uint8)


def file_of(case: Case, data: Path, keys: Mapping[str, object] = NO_KEYS) -> GGUF:
    """The model's mmproj.gguf, with the keys that it lacks, and others; without those of None."""
    gguf = open_gguf(data / "media" / case.name / "mmproj.gguf")
    merged: dict[str, Any] = {**gguf.metadata, **case.keys, **keys}
    gguf.metadata = {key: value for key, value in merged.items() if value is not None}
    return gguf


def opened(
    case: Case,
    data: Path,
    keys: Mapping[str, object] = NO_KEYS,
    *,
    folder: bool = False,
    isa: str | None = SHARP,
    exact: bool = True,
) -> Projector:
    """The model's projector, from mmproj.gguf or from its folder. ``isa=None`` is the default."""
    device = open_device("cpu", isa, 1, None)
    if folder:
        return open_projector(data / "media" / case.name, device, exact=exact)
    return open_projector(file_of(case, data, keys), device, exact=exact)


def truth_of(case: Case, data: Path) -> dict[str, np.ndarray]:
    with np.load(data / "media" / case.name / "truth.npz") as arrays:
        return dict(arrays)


def prompts(truth: Mapping[str, np.ndarray]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Prefixes of the names of a case's prompts in the truth, and their pictures."""
    for prefix, sizes in SIZES.items():
        if f"{prefix}input_ids" in truth:
            yield prefix, [picture(*size) for size in sizes]


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference by the largest value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def layout_text(family: MediaFamily, prepared: PreparedMedia) -> str:
    """The layout as text, with the mark of a row for each media row."""
    layout = prepared.layout
    return "".join(
        part if isinstance(part, str) else family.row_mark * len(part) for part in layout
    )


def prompt_of(
    case: Case, projector: Projector, made: list[PreparedMedia], data: Path
) -> tuple[list[int], list[int]]:
    """The ids of the truth's prompt with its media, and where rows of pictures stand."""
    family = projector.family("image")
    texts = [layout_text(family, each) for each in made]
    whole = f"the cat {texts[0]} is in the hat" + "".join(f" and {each} on" for each in texts[1:])
    if case.name == "gemma4u":
        sound = projector.prepare(np.zeros(8000, np.float32), kind="audio")
        whole += " " + layout_text(projector.family("audio"), sound)
    tokenizer = load_tokenizer(open_model(data / "media" / case.name / "text.gguf"))
    ids = tokenizer.encode(whole, bos=False, special=True)
    (mark,) = tokenizer.encode(family.row_mark, bos=False, special=True)
    return ids, [i for i, token in enumerate(ids) if token == mark]


def positions_of(n: int, where: list[int], made: list[PreparedMedia]) -> np.ndarray:
    """The positions, int64 [3, n], of a prompt whose media rows stand at ``where``."""
    positions = np.zeros((3, n), np.int64)
    firsts = np.cumsum([0, *(each.n_rows for each in made)])
    begins = {where[first]: each for first, each in zip(firsts, made, strict=False)}
    index = position = 0
    while index < n:
        if (each := begins.get(index)) is None:
            positions[:, index] = position
            index += 1
            position += 1
            continue
        rows = each.positions if each.positions is not None else np.arange(each.n_rows)
        positions[:, index : index + each.n_rows] = position + rows
        index += each.n_rows
        position += each.advance
    return positions
