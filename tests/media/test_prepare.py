"""Preparation of pictures beside that of transformers: pixels, prompts, positions, sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.media.media_cases import (
    BY_NAME,
    CASES,
    Case,
    layout_text,
    opened,
    picture,
    positions_of,
    prompt_of,
    prompts,
    truth_of,
)
from treadle.errors import TreadleError
from treadle.media import pixels as px
from treadle.media.families.qwen_vl import BlockFamily, Qwen25Vl
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import Projector

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def values_of(projector: Projector, made: PreparedMedia) -> np.ndarray:
    """The patches of a picture in the order of transformers' processors."""
    family = projector.family("image")
    (only,) = made.inputs
    if isinstance(family, Qwen25Vl):  # joining undoes the order of the windows
        return family.projector_input(only.patches, only.grid).reshape(only.patches.shape)
    return only.patches


def expected_of(case: Case, truth: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    """The truth's patches, each in the order colour, row, column."""
    values = truth[f"{prefix}pixel_values"]
    if case.name == "gemma3":
        return np.concatenate([px.patches(each.transpose(1, 2, 0), 14) for each in values])
    if case.name.startswith("gemma4"):
        (rows,) = values
        rows = rows[truth["image_position_ids"][0, :, 0] >= 0]
        side = {"gemma4": 8, "gemma4u": 12}[case.name]
        colours = rows.reshape(-1, side, side, 3).transpose(0, 3, 1, 2).reshape(rows.shape)
        return np.asarray(colours * 2 - 1 if case.name == "gemma4" else colours)
    frames = values.reshape(len(values), 3, 2, -1)  # both frames of a still picture are equal
    assert np.array_equal(frames[:, :, 0], frames[:, :, 1])
    return np.asarray(frames[:, :, 0].reshape(len(values), -1))


@every
def test_pixels_are_those_of_transformers(case: Case, data: Path) -> None:
    truth = truth_of(case, data)
    projector = opened(case, data)
    for prefix, pictures in prompts(truth):
        made = [projector.prepare(each, case.max_rows) for each in pictures]
        found = np.concatenate([values_of(projector, each) for each in made])
        assert np.array_equal(found, expected_of(case, truth, prefix))
        assert [each.size for each in made] == [each.shape[:2] for each in pictures]
        if (grids := truth.get(f"{prefix}image_grid_thw")) is not None:
            assert [each.inputs[0].grid for each in made] == [tuple(row[1:]) for row in grids]


@every
def test_the_prompt_is_that_of_transformers(case: Case, data: Path) -> None:
    truth = truth_of(case, data)
    projector = opened(case, data)
    for prefix, pictures in prompts(truth):
        made = [projector.prepare(each, case.max_rows) for each in pictures]
        ids, where = prompt_of(case, projector, made, data)
        assert ids == truth[f"{prefix}input_ids"][0].tolist()
        assert len(where) == sum(each.n_rows for each in made)
        expected = truth.get(f"{prefix}position_ids", np.tile(np.arange(len(ids)), (3, 1)))
        assert np.array_equal(positions_of(len(ids), where, made), expected)
        spans = [each.bidirectional for each in made]
        if case.name.startswith("gemma"):
            kinds = truth.get(f"{prefix}token_type_ids", truth.get("mm_token_type_ids"))
            assert kinds is not None
            assert where == np.flatnonzero(kinds[0] == 1).tolist()
            assert spans == [((0, each.n_rows),) for each in made]
        else:
            assert not any(spans)


@every
def test_the_layout_is_sound(case: Case, data: Path) -> None:
    """Ranges cover all rows in order, and every special token is among the family's marks."""
    projector = opened(case, data)
    family = projector.family("image")
    made = projector.prepare(picture(), case.max_rows)
    rows = [i for part in made.layout if isinstance(part, range) for i in part]
    assert rows == list(range(made.n_rows))
    assert family.row_mark in family.marks
    for part in made.layout:
        if isinstance(part, str):
            assert part.strip() in family.marks
    shown = layout_text(family, made).replace(family.row_mark * made.n_rows, family.row_mark)
    if case.name != "gemma3":  # there the text of one row is never in a prompt
        assert shown == family.placeholders[0]


def test_a_picture_at_the_very_beginning(data: Path) -> None:
    """Positions count from 0, and the text behind stands at the longer side, not behind all rows:
    its shift is negative.
    """
    made = opened(BY_NAME["qwen3vl"], data).prepare(picture(), 16)
    assert made.positions is not None
    h, w = (n // 2 for n in made.inputs[0].grid)
    assert made.positions[:, 0].tolist() == [0, 0, 0]
    assert made.positions[:, -1].tolist() == [0, h - 1, w - 1]
    assert made.advance == max(h, w) < made.n_rows
    found = positions_of(made.n_rows + 2, list(range(made.n_rows)), [made])
    assert found[:, -2:].tolist() == [[made.advance, made.advance + 1]] * 3


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "step", "least", "most", "expected"),
    [
        # transformers 5.24, qwen2_vl.image_processing_qwen2_vl.smart_resize
        ((61, 97), 28, 3136, 12845056, (56, 84)),
        ((14, 14), 28, 3136, 12845056, (56, 56)),
        ((1080, 1920), 28, 3136, 1003520, (728, 1316)),
        ((1080, 1920), 32, 65536, 16777216, (1088, 1920)),
        ((42, 42), 28, 784, 12845056, (56, 56)),  # 1.5 steps: rounded to even
        ((70, 70), 28, 784, 12845056, (56, 56)),  # 2.5 steps: rounded to even
        ((20, 3000), 28, 3136, 12845056, (28, 2996)),
        ((10, 294), 32, 8192, 589824, (32, 512)),  # the height is rounded to 0: enlarged
        ((2933, 16), 32, 8192, 589824, (1248, 32)),
    ],
)
def test_area_size(
    size: tuple[int, int], step: int, least: int, most: int, expected: tuple[int, int]
) -> None:
    assert px.area_size(size, step, least, most) == expected


@pytest.mark.parametrize(
    ("name", "size", "rows", "expected"),
    [
        # transformers 5.24, glm4v.image_processing_glm4v.smart_resize of two frames, and
        # gemma4.image_processing_gemma4.get_aspect_ratio_preserving_size
        ("glm4v", (61, 97), 16, (84, 112)),
        ("glm4v", (1080, 1920), 16, (84, 140)),
        ("glm4v", (1080, 1920), 576, (504, 896)),
        ("glm4v", (5, 4), 576, (112, 84)),
        ("glm4v", (3, 500), 576, (28, 4676)),
        ("glm4v", (900, 7), 576, (3612, 28)),
        ("glm4v", (27, 27), 16, (84, 84)),
        ("gemma4", (61, 97), 70, (144, 240)),
        ("gemma4", (5, 4), 70, (216, 168)),
        ("gemma4", (27, 27), 70, (192, 192)),
        ("gemma4", (480, 640), 70, (168, 216)),
    ],
)
def test_sizes_of_families(
    name: str, size: tuple[int, int], rows: int, expected: tuple[int, int], data: Path
) -> None:
    """The files' patches: 14 pixels in blocks of 2, 8 in squares of 3."""
    case = BY_NAME[name]._replace(keys={})
    made = opened(case, data).prepare(np.zeros((*size, 3), np.uint8), rows)
    assert made.resized == expected


def test_no_size_exceeds_the_rows_allowed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        h = int(rng.integers(1, 3000))
        w = int(rng.integers(max(1, -(-h // 200)), min(200 * h, 4000) + 1))
        most = int(rng.integers(1, 600))
        a, b = px.area_size((h, w), 28, 4 * 784, most * 784)
        assert a % 28 == b % 28 == 0 < min(a, b)
        assert a * b <= most * 784, (h, w, most)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (0, 5)])
def test_a_picture_too_long_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(TreadleError, match="200"):
        px.area_size(size, 28, 784, 78400)


@every
def test_rows_are_bounded(case: Case, data: Path) -> None:
    """Fewer rows than a picture of fixed size has are refused; others hold the bound."""
    projector = opened(case, data)
    long = [] if case.name.startswith("gemma4") else [(400, 3), (3, 400)]
    for size in ((97, 61), (61, 97), (1, 1), (640, 480), *long):
        if case.name == "gemma3":
            with pytest.raises(TreadleError, match="16 rows, more than 7"):
                projector.prepare(picture(*size), 7)
            assert projector.prepare(picture(*size), 16).n_rows == 16
            continue
        for most in (1, 7, 20):
            made = projector.prepare(picture(*size), most)
            assert 1 <= made.n_rows <= most
            h, w = made.resized
            assert made.inputs[0].patches.size == h * w * 3


def test_more_patches_than_positions(data: Path) -> None:
    """The table has 32 positions on a side here, real files' have 10240."""
    with pytest.raises(TreadleError, match="has positions for 32 on a side"):
        opened(BY_NAME["gemma4"], data).prepare(picture(500, 3), 70)


@every
def test_small_pictures_are_enlarged(case: Case, data: Path) -> None:
    projector = opened(case, data)
    family = projector.family("image")
    made = projector.prepare(picture(5, 4), 16)
    if isinstance(family, BlockFamily):
        least = {"qwen3vl": 16, "qwen35": 16}.get(case.name, 4)
        assert made.n_rows >= least
    else:
        assert made.n_rows >= 12


# -- digests ----------------------------------------------------------------------------------


def test_digests_tell_what_differs(data: Path) -> None:
    """Pixels, bounds and the file; not the object, nor how often it is prepared."""
    case = BY_NAME["qwen3vl"]
    first = opened(case, data)
    one = first.prepare(picture(), 16).digest
    assert len(one) == 32
    assert first.prepare(picture(), 16).digest == one
    assert opened(case, data).prepare(picture(), 16).digest == one
    other = picture()
    other[3, 4, 1] ^= 1
    turned = picture().transpose(1, 0, 2)
    several = [
        first.prepare(other, 16).digest,
        first.prepare(turned, 16).digest,
        first.prepare(picture(), 4).digest,
        opened(BY_NAME["qwen35"], data).prepare(picture(), 16).digest,
        opened(case, data, {"clip.use_silu": True}).prepare(picture(), 16).digest,
    ]
    assert len({one, *several}) == 6
    # as many bytes, in another shape
    flat = picture().reshape(97, 61, 3)
    assert first.prepare(flat, 16).digest not in {one, *several}


# -- pieces -----------------------------------------------------------------------------------


def test_patches_are_in_a_convolution_s_order() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 9, 3)).astype(np.float32)
    found = px.patches(values, 3)
    assert found.shape == (6, 27)
    for row in range(2):
        for column in range(3):
            square = values[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            expected = [square[i, j, c] for c in range(3) for i in range(3) for j in range(3)]
            assert found[3 * row + column].tolist() == expected


def test_block_order() -> None:
    assert px.block_order((2, 4), 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_without_pillow(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    projector = opened(BY_NAME["gemma3"], data)
    with pytest.raises(TreadleError, match=r'pip install "treadle\[pictures\]"'):
        projector.prepare(picture(), None)


def test_a_picture_of_the_right_size_needs_no_resizing(data: Path) -> None:
    made = opened(BY_NAME["gemma3"], data).prepare(picture(224, 224), None)
    expected = picture(224, 224).astype(np.float32) / 127.5 - 1
    assert np.array_equal(made.inputs[0].patches, px.patches(expected, 14))


def test_sound(data: Path) -> None:
    """Rows of 640 samples, the last one padded; causal."""
    projector = opened(BY_NAME["gemma4u"], data)
    samples = np.arange(1300, dtype=np.float32)
    made = projector.prepare(samples, None, "audio")
    assert (made.kind, made.n_rows, made.bidirectional, made.advance) == ("audio", 3, (), 3)
    (only,) = made.inputs
    assert np.array_equal(only.patches.ravel(), np.pad(samples, (0, 620)))
    assert replace(made, inputs=()).layout == ("<|audio>", range(3), "<audio|>")
    with pytest.raises(TreadleError, match="3 rows, more than 2"):
        projector.prepare(samples, 2, "audio")
    with pytest.raises(TreadleError, match="without samples"):
        projector.prepare(samples[:0], None, "audio")
    with pytest.raises(TreadleError, match="reads no audio, only image"):
        opened(BY_NAME["gemma3"], data).prepare(samples, None, "audio")
