"""Pictures of families with tiles and of those in their own shape: what is prepared, its place in
the prompt, and its rows, against transformers' truth; what a wrong reading of a file would cost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.media.media_cases import layout_text
from tests.media.picture_cases import (
    BY_NAME,
    CASES,
    PictureCase,
    clip_of,
    made,
    off,
    opened,
    picture,
    prompts,
    truth_of,
)
from treadle.base.fork_safety import UseLock
from treadle.devices import DEVICES
from treadle.devices.protocol import Device
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.metadata import MetadataReader
from treadle.files.tensor import Tensor
from treadle.media.clip_config import ClipConfig
from treadle.media.families import llava
from treadle.media.family import GridInputs, MediaFamily
from treadle.media.pixels import patches
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import MediaTower
from treadle.models.load import load_config
from treadle.models.towers.config import TowerConfig
from treadle.models.towers.stages import ActivationStage

NEAR = 1e-5  # of rows, with keys and values in f32; transformers' own f32 is 1e-6 off
WRONG = 1e-4  # what a wrong reading costs at least

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = DEVICES["cpu"][0]("", None, 1, None)
    yield device
    device.close()


def rows_of(family: MediaFamily, prepared: PreparedMedia, device: Device) -> np.ndarray:
    """Media rows, f32 ``[n_rows, n_embd]``."""
    tower = MediaTower(family, device, UseLock(), exact=True)
    try:
        runs = tower.encode([prepared])
        while True:
            next(runs)
    except StopIteration as done:
        (rows,) = done.value
        made: np.ndarray = rows
        return made
    finally:
        tower.close()


# -- class tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "internvl"])
def test_the_first_position_is_the_class_token_s(name: str, data: Path, device: Device) -> None:
    """Patches of one colour differ by nothing but their positions, so their rows are equal if those
    are, whatever the class token's is. llama.cpp of October 2026 gives it to the first patch, and
    of LLaVA the last row is the class token's (ggml-org/llama.cpp#25814).
    """
    clip = clip_of(BY_NAME[name], data)
    side = clip.image_size
    grey = np.full((side, side, 3), 90, np.uint8)
    table = np.zeros_like(clip.floats("position_embd.weight"))
    flat = table.reshape(-1, clip.n_embd)
    rng = np.random.default_rng(0)
    flat[0] = rng.standard_normal(clip.n_embd)
    family = made(clip.replaced({"position_embd.weight": table}))
    rows = rows_of(family, family.prepare(grey, None), device)
    assert np.abs(rows - rows[0]).max() < NEAR * np.abs(rows).max()
    flat[1] = rng.standard_normal(clip.n_embd)  # the first patch's
    family = made(clip.replaced({"position_embd.weight": table}))
    changed = rows_of(family, family.prepare(grey, None), device)
    most = np.abs(changed - changed[-1]).max(1) / np.abs(changed).max()
    assert most[1:].max() < NEAR < WRONG < most[0]


def test_moondream2_s_norm_stands_behind_one_layer_less(data: Path, device: Device) -> None:
    """Its GGUF file has the last layer twice and no ``feature_layer``: llama.cpp runs a layer less
    and then the norm. Files of LLaVA itself have no norm, and all of their layers count.
    """
    clip = clip_of(BY_NAME["llava"], data)
    assert clip.n_layer == 2
    rng = np.random.default_rng(0)
    norm = {
        "post_ln.weight": 1 + 0.1 * rng.standard_normal(clip.n_embd),
        "post_ln.bias": 0.1 * rng.standard_normal(clip.n_embd),
    }
    found = {}
    for name, layer, file in (
        ("moondream2", None, clip.replaced(norm)),
        ("one layer", [1], clip),
        ("llava", None, clip),
        ("both layers", [2], clip),
    ):
        values = {k: v for k, v in clip.keys.values.items() if k != "feature_layer"}
        if layer is not None:
            values["feature_layer"] = layer
        keys = MetadataReader(values, clip.keys.path, None, clip.keys.prefix)
        family = made(replace(file, keys=keys))
        family.projectors = ()
        found[name] = rows_of(family, family.prepare(picture(56, 56), None), device)
    x = found["one layer"].astype(np.float64)
    x -= x.mean(1, keepdims=True)
    expected = x / np.sqrt((x**2).mean(1, keepdims=True) + clip.norm_eps)
    expected = expected * norm["post_ln.weight"] + norm["post_ln.bias"]
    assert off(found["moondream2"], expected) < NEAR
    assert np.array_equal(found["llava"], found["both layers"])
    assert off(found["one layer"], found["llava"]) > WRONG


# -- preparation ------------------------------------------------------------------------------


def truth_patches(case: PictureCase, clip: ClipConfig, values: np.ndarray) -> list[np.ndarray]:
    """Rows of patches of each input of the tower, from the processor's pixel_values."""
    side = clip.patch_size
    if case.name == "lfm2vl":  # rows of patches, padded; their columns are row, column, colour
        rows = values[0].reshape(-1, side, side, 3)
        return [rows.transpose(0, 3, 1, 2).reshape(len(rows), -1)]
    flat = values.reshape(-1, *values.shape[-3:])
    return [patches(each.transpose(1, 2, 0), side) for each in flat]


@each_case
def test_pixels_are_those_of_the_processor(case: PictureCase, data: Path) -> None:
    clip = clip_of(case, data)
    family = made(clip)
    truth = truth_of(case, data)
    for prefix, pictures in prompts(truth, "pixel_values"):
        prepared = [family.prepare(pixels, case.max_rows) for pixels in pictures]
        inputs = [each for one in prepared for each in one.inputs]
        values = truth[f"{prefix}pixel_values"]
        if case.name == "pixtral":  # pictures of one batch are padded
            sizes = truth[f"{prefix}image_sizes"]
            found = [
                patches(v[:, :h, :w].transpose(1, 2, 0), clip.patch_size)
                for v, (h, w) in zip(values, sizes, strict=True)
            ]
        else:
            found = truth_patches(case, clip, values)
        assert len(inputs) == len(found)
        for one, expected in zip(inputs, found, strict=True):
            n = one.grid[0] * one.grid[1]
            rows = {"first": one.patches[1:], "last": one.patches[:-1]}.get(
                getattr(family, "class_row", "none"), one.patches
            )
            assert len(rows) == n
            assert np.array_equal(rows, expected[:n])
            assert not expected[n:].any()


@each_case
def test_layout_gives_the_processor_s_ids(case: PictureCase, data: Path) -> None:
    family = made(clip_of(case, data))
    tokenizer = Tokenizer.from_file(str(data / "media" / case.name / "tokenizer.json"))
    truth = truth_of(case, data)
    for prefix, pictures in prompts(truth, "input_ids"):
        text = case.text + f" and {case.mark} on" * (len(pictures) - 1)
        assert case.mark in family.placeholders
        before, *behind = text.split(case.mark)
        for pixels, rest in zip(pictures, behind, strict=True):
            prepared = family.prepare(pixels, case.max_rows)
            before += layout_text(family, prepared) + rest
            ranges = [part for part in prepared.layout if isinstance(part, range)]
            assert ranges[0].start == 0
            assert ranges[-1].stop == prepared.n_rows
            assert all(a.stop == b.start for a, b in pairwise(ranges))
        ids = tokenizer.encode(before, add_special_tokens=False).ids
        assert ids == truth[f"{prefix}input_ids"][0].tolist()
        for token in family.marks:
            assert tokenizer.token_to_id(token) is not None or "row_" in token, token


@each_case
def test_digest_tells_pictures_and_preparations_apart(case: PictureCase, data: Path) -> None:
    family = made(clip_of(case, data))
    one = family.prepare(picture(97, 61), None)
    again = family.prepare(picture(97, 61), None)
    other = family.prepare(picture(96, 61), None)
    assert one.digest == again.digest
    assert one.digest != other.digest
    changed = made(replace(clip_of(case, data), identity=b"another file"))
    assert changed.prepare(picture(97, 61), None).digest != one.digest


SMALLEST = {  # media rows of one tile, or one row
    "smolvlm": 4,
    "llava": 16,
    "llavanext": 16,
    "pixtral": 1,
    "mistral3": 1,
    "internvl": 4,
    "lfm2vl": 1,
    "llama4": 4,
}


@each_case
def test_rows_are_bounded(case: PictureCase, data: Path) -> None:
    """A bound holds for pictures of any shape, or is refused where one tile has more rows."""
    family = made(clip_of(case, data))
    smallest = SMALLEST[case.name]
    for size in ((97, 61), (200, 20), (20, 200), (300, 300), (1, 1)):
        pixels = np.zeros((*size, 3), np.uint8)
        whole = family.prepare(pixels, 100_000).n_rows
        assert family.prepare(pixels, whole).n_rows == whole
        for most in (1, 4, 15, 17, 33, 60):
            if most < smallest:
                with pytest.raises(TreadleError, match="tokens with this projector"):
                    family.prepare(pixels, most)
            else:
                assert 1 <= family.prepare(pixels, most).n_rows <= most


@each_case
def test_extreme_shapes_are_refused(case: PictureCase, data: Path) -> None:
    family = made(clip_of(case, data))
    with pytest.raises(TreadleError, match="1001 x 5"):
        family.prepare(np.zeros((5, 1001, 3), np.uint8), None)


# -- rows -------------------------------------------------------------------------------------


def check_rows(case: PictureCase, data: Path, isa: str | None = None) -> None:
    """Compare the rows of the pictures of all prompts with the truth's."""
    projector = opened(case, data, isa)
    truth = truth_of(case, data)
    for prefix, pictures in prompts(truth, "projected"):
        prepared = [projector.prepare(pixels, case.max_rows) for pixels in pictures]
        rows = np.concatenate([projector.encode(each) for each in prepared])
        expected = truth[f"{prefix}projected"]
        if case.name == "llavanext":
            expected = packed(projector.family("image"), expected)
        assert rows.dtype == np.float32
        assert off(rows, expected.reshape(-1, expected.shape[-1])) < NEAR


@each_case
def test_rows_are_the_truth_s(case: PictureCase, data: Path) -> None:
    check_rows(case, data)


@pytest.mark.parametrize("name", ["pixtral", "internvl", "llama4"])
def test_rows_on_another_instruction_set(name: str, data: Path) -> None:
    check_rows(BY_NAME[name], data, "avx2")


@each_case
def test_they_fit_their_decoder(case: PictureCase, data: Path) -> None:
    projector = opened(case, data)
    config = load_config(open_gguf(data / "media" / case.name / "text.gguf"))
    projector.check(config)
    with pytest.raises(TreadleError, match="rows have 64 values; the model's have 128"):
        projector.check(replace(config, n_embd=128))
    if case.name in ("lfm2vl", "llama4"):
        with pytest.raises(TreadleError, match="this model is gemma3"):
            projector.check(replace(config, arch=replace(config.arch, name="gemma3")))


@pytest.mark.parametrize("name", ["smolvlm", "pixtral", "internvl", "lfm2vl"])
def test_states_are_the_truth_s(name: str, data: Path, device: Device) -> None:
    case = BY_NAME[name]
    family = made(clip_of(case, data))
    truth = truth_of(case, data)["tower"]
    family.projectors = ()
    family.projector_input = lambda states, grid: states  # type: ignore[method-assign]
    prepared = family.prepare(picture(97, 61), case.max_rows)
    assert off(rows_of(family, prepared, device), truth.reshape(-1, truth.shape[-1])) < NEAR


def packed(family: MediaFamily, projected: np.ndarray) -> np.ndarray:
    """LLaVA 1.6's rows by hand: the whole picture, and the 8 x 8 rows of 2 x 2 tiles, of which the
    first and the last line are black canvas, each line with the newline behind it.
    """
    assert isinstance(family, llava.Llava)
    assert family.newline is not None
    tiles = projected.reshape(5, 4, 4, -1)
    width = tiles.shape[-1]
    lines = [
        np.concatenate([tiles[1 + 2 * (y // 4)][y % 4], tiles[2 + 2 * (y // 4)][y % 4]])
        for y in range(1, 7)
    ]
    ends = [np.concatenate([line, family.newline[None]]) for line in lines]
    return np.concatenate([tiles[0].reshape(-1, width), *ends])


def test_llava_1_6_has_neither_canvas_nor_tiles_in_a_row(data: Path, device: Device) -> None:
    """llama.cpp puts the tiles one behind the other (trap 8 of the design)."""
    case = BY_NAME["llavanext"]
    family = made(clip_of(case, data))
    truth = truth_of(case, data)["projected"]
    rows = rows_of(family, family.prepare(picture(97, 61), None), device)
    flat = truth.reshape(-1, truth.shape[-1])
    assert len(rows) == 16 + 6 * 9
    assert off(rows, flat[: len(rows)]) > 0.5
    assert isinstance(family, llava.Llava)
    assert family.newline is not None
    assert np.array_equal(rows[24::9], np.tile(family.newline, (6, 1)))


def test_llava_1_6_without_room_for_tiles_has_the_whole_picture(data: Path, device: Device) -> None:
    case = BY_NAME["llavanext"]
    family = made(clip_of(case, data))
    truth = truth_of(case, data)["projected"]
    prepared = family.prepare(picture(97, 61), 20)
    rows = rows_of(family, prepared, device)
    assert prepared.layout == (range(17),)
    assert off(rows[:16], truth.reshape(5, 16, -1)[0]) < NEAR
    assert isinstance(family, llava.Llava)
    assert family.newline is not None
    assert np.array_equal(rows[16], family.newline)


# -- what a wrong reading of a file costs -----------------------------------------------------


def with_activation(config: TowerConfig, fn: str) -> TowerConfig:
    """The configuration with another activation in its layers and stages."""

    def other(stage: Any) -> Any:
        return replace(stage, fn=fn) if isinstance(stage, ActivationStage) else stage

    return replace(
        config,
        arch=replace(config.arch, activation=fn),
        stem=tuple(map(other, config.stem)),
        tail=tuple(map(other, config.tail)),
    )


TOWERS = {  # the activation of the tower's layers, and one it might be taken for
    "smolvlm": ("gelu", "gelu_quick"),
    "llava": ("gelu_quick", "gelu"),
    "llavanext": ("gelu_quick", "gelu"),
    "pixtral": ("silu", "gelu"),
    "internvl": ("gelu_erf", "gelu"),
    "lfm2vl": ("gelu", "gelu_erf"),
    "llama4": ("gelu_erf", "gelu"),
}


@pytest.mark.parametrize("name", TOWERS)
def test_activation_of_the_tower(name: str, data: Path, device: Device) -> None:
    """The forms of GELU differ by more than the tolerance (trap 1 of the design)."""
    case = BY_NAME[name]
    family = made(clip_of(case, data))
    right, wrong = TOWERS[name]
    assert family.tower.arch.activation == right
    prepared = family.prepare(picture(97, 61), case.max_rows)
    rows = rows_of(family, prepared, device)
    family.tower = with_activation(family.tower, wrong)
    assert off(rows_of(family, prepared, device), rows) > 2 * NEAR


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "smolvlm"], ids=lambda c: c.name)
def test_activation_of_the_projector_is_exact_gelu(
    case: PictureCase, data: Path, device: Device
) -> None:
    """llama.cpp has the form with tanh there (trap 1 of the design)."""
    family = made(clip_of(case, data))
    (projector,) = family.projectors
    fns = {stage.fn for stage in projector.stem if isinstance(stage, ActivationStage)}
    assert fns == {"gelu_erf"}
    prepared = family.prepare(picture(97, 61), case.max_rows)
    rows = rows_of(family, prepared, device)
    family.projectors = (with_activation(projector, "gelu"),)
    assert off(rows_of(family, prepared, device), rows) > 5 * NEAR


@pytest.mark.parametrize("name", ["pixtral", "mistral3", "llama4"])
def test_pairs_that_turn_are_neighbours(name: str, data: Path, device: Device) -> None:
    """Converters reorder queries and keys of Pixtral (trap 11 of the design)."""
    case = BY_NAME[name]
    family = made(clip_of(case, data))
    assert family.tower.arch.rope == "norm"
    prepared = family.prepare(picture(97, 61), case.max_rows)
    rows = rows_of(family, prepared, device)
    family.tower = replace(family.tower, arch=replace(family.tower.arch, rope="neox"))
    assert off(rows_of(family, prepared, device), rows) > 100 * WRONG


def test_marks_between_rows_are_tokens_of_the_text(data: Path) -> None:
    """Rows of breaks in a projector file, ``v.token_embd.img_break``, are not used: the decoder has
    them (trap 11 of the design).
    """
    for name, n_lines in (("pixtral", 8), ("mistral3", 4)):
        family = made(clip_of(BY_NAME[name], data))
        layout = family.prepare(picture(97, 61), None).layout
        assert layout[1::2] == ("[IMG_BREAK]",) * (n_lines - 1) + ("[IMG_END]",)


def test_mistral_3_joins_values_before_patches(data: Path, device: Device) -> None:
    case = BY_NAME["mistral3"]
    family = made(clip_of(case, data))
    truth = truth_of(case, data)["projected"]
    joined = family.projector_input

    def wrong(states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        rows = joined(states, grid)
        return rows.reshape(len(rows), -1, 4).transpose(0, 2, 1).reshape(rows.shape)

    family.projector_input = wrong  # type: ignore[method-assign]
    prepared = family.prepare(picture(97, 61), None)
    assert off(rows_of(family, prepared, device), truth) > 100 * WRONG


def test_llama_4_s_class_token_does_not_turn(data: Path, device: Device) -> None:
    """Rotations matter by distances only, so that positions from 1 show in this token alone."""
    case = BY_NAME["llama4"]
    family = made(clip_of(case, data))
    prepared = family.prepare(picture(97, 61), case.max_rows)
    rows = rows_of(family, prepared, device)
    inputs = family.grid_inputs((4, 4))
    turned = inputs.ropes[0].copy()
    turned[-1] = turned[0]
    family.grid_inputs = lambda grid: replace(inputs, ropes=(turned,))  # type: ignore[method-assign]
    assert off(rows_of(family, prepared, device), rows) > WRONG


# -- variants of files ------------------------------------------------------------------------


def edited(
    clip: ClipConfig, rename: Callable[[str], str] = str, keys: Mapping[str, Any] | None = None
) -> ClipConfig:
    """The file with other names of tensors ("": without it), and other keys (None: without)."""
    view = copy.copy(clip.gguf)
    view.tensors = {}
    for name, tensor in clip.gguf.tensors.items():
        if rename(name):
            view.tensors[rename(name)] = tensor
    values = {k: v for k, v in {**clip.keys.values, **(keys or {})}.items() if v is not None}
    reader = MetadataReader(values, clip.keys.path, None, clip.keys.prefix, clip.keys.missing)
    return replace(clip, gguf=view, keys=reader)


def reshaped(clip: ClipConfig, name: str, *shape: int) -> ClipConfig:
    """The file with another shape of one tensor."""
    view = copy.copy(clip.gguf)
    tensor: Tensor = view.tensors[name]
    n = int(np.prod(shape))
    data = np.zeros(4 * n, np.uint8)
    f32 = next(t.format for t in view.tensors.values() if t.type_name == "F32")
    assert f32 is not None
    view.tensors = {**view.tensors, name: tensor.in_memory(name, shape, f32, data)}
    return replace(clip, gguf=view)


def test_llama_4_file_of_an_older_converter(data: Path, device: Device) -> None:
    """The norm before the FFN was ``ln2``; today's converter has ``attn_post_norm``, which is that
    norm only where there is no ``ln2`` (trap 3 of the design).
    """
    case = BY_NAME["llama4"]
    clip = clip_of(case, data)
    assert clip.has("blk.0.post_attention_norm.weight")
    older = edited(clip, lambda name: name.replace("post_attention_norm", "ffn_norm"))
    prepared = made(clip).prepare(picture(97, 61), case.max_rows)
    rows = rows_of(made(clip), prepared, device)
    assert np.array_equal(rows_of(made(older), prepared, device), rows)


def test_llava_files_of_2023_and_later(data: Path, device: Device) -> None:
    """Old files have ``ffn_up`` and ``ffn_down`` swapped, and do not count the layers behind the
    features (trap 7 of the design).
    """
    case = BY_NAME["llava"]
    clip = clip_of(case, data)
    assert clip.gguf.tensors["blk.0.ffn_down.weight"].shape == (clip.n_ff, clip.n_embd)
    assert clip.n_layer == 2
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def swapped(name: str) -> str:
        return ".".join(swap.get(part, part) for part in name.split("."))

    prepared = made(clip).prepare(picture(97, 61), None)
    rows = rows_of(made(clip), prepared, device)
    later = edited(clip, swapped)
    assert np.array_equal(rows_of(made(later), prepared, device), rows)
    silent = edited(clip, keys={"feature_layer": None})
    assert np.array_equal(rows_of(made(silent), prepared, device), rows)
    from_behind = edited(clip, keys={"feature_layer": [-1]})
    assert np.array_equal(rows_of(made(from_behind), prepared, device), rows)
    first = edited(clip, keys={"feature_layer": [1]})
    assert off(rows_of(made(first), prepared, device), rows) > WRONG


def test_llava_canvases_are_width_and_height_in_the_file(data: Path) -> None:
    family = made(clip_of(BY_NAME["llavanext"], data))
    assert isinstance(family, llava.Llava)
    assert family.canvases == ((56, 112), (112, 56), (112, 112), (168, 56), (56, 168))


def test_llava_1_6_without_a_newline_has_all_tiles(data: Path, device: Device) -> None:
    clip = edited(
        clip_of(BY_NAME["llavanext"], data), lambda name: "" if "newline" in name else name
    )
    family = made(clip)
    prepared = family.prepare(picture(97, 61), None)
    truth = truth_of(BY_NAME["llavanext"], data)["projected"]
    assert prepared.n_rows == 5 * 16
    assert off(rows_of(family, prepared, device), truth.reshape(80, -1)) < NEAR


def test_llava_merges_as_the_file_says(data: Path) -> None:
    clip = clip_of(BY_NAME["llavanext"], data)
    assert clip.keys.text("mm_patch_merge_type") == "spatial_unpad"
    flat = made(edited(clip, keys={"mm_patch_merge_type": "flat"}))
    assert flat.prepare(picture(97, 61), None).n_rows == 5 * 16
    with pytest.raises(UnsupportedError, match="mm_patch_merge_type: 'maxpool2x2'"):
        made(edited(clip, keys={"mm_patch_merge_type": "maxpool2x2"}))


@pytest.mark.parametrize("turned", [False, True])
def test_llava_pads_where_the_file_says_so(turned: bool, data: Path) -> None:
    """The mean colour above and below a wide picture, beside a high one; its corner is cut off
    without.
    """
    clip = edited(clip_of(BY_NAME["llava"], data), keys={"image_aspect_ratio": "pad"})
    pixels = np.zeros((28, 112, 3), np.uint8)
    pixels[:, :10] = 255
    square = llava.padded_square(pixels.swapaxes(0, 1) if turned else pixels, 56, clip.mean)
    square = square.swapaxes(0, 1) if turned else square
    assert square.shape == (56, 56, 3)
    for edge in (square[:21], square[35:]):
        assert (edge == [122, 116, 104]).all()
    assert square[21:35, :3].min() == 255
    assert square[21:35, 8:].max() == 0
    assert llava.padded_square(np.zeros((1, 20_000, 3), np.uint8), 56, clip.mean).shape[0] == 56
    found = made(clip).prepare(pixels, None)
    assert found.inputs[0].patches[1:].max() > 1.9
    assert made(clip_of(BY_NAME["llava"], data)).prepare(pixels, None).inputs[0].patches.max() == 0


def test_llava_without_a_second_product(data: Path, device: Device) -> None:
    """LLaVA 1's projector is one product."""
    clip = edited(clip_of(BY_NAME["llava"], data), lambda name: "" if "mm.2" in name else name)
    family = made(clip)
    prepared = family.prepare(picture(97, 61), None)
    rows = rows_of(family, prepared, device)
    family.projectors = ()
    states = rows_of(family, prepared, device).astype(np.float64)
    expected = states @ clip.floats("mm.0.weight").T + clip.floats("mm.0.bias")
    assert off(rows, expected) < NEAR


def test_internvl_s_class_token_may_stand_anywhere(data: Path, device: Device) -> None:
    """Its position is the table's first row; attention has no order (trap 13 of the design)."""
    case = BY_NAME["internvl"]
    clip = clip_of(case, data)
    family = made(clip)
    inputs = family.grid_inputs((4, 4))
    table = clip.floats("position_embd.weight")[0]
    bias = clip.floats("patch_embd.bias")
    assert np.allclose(
        inputs.rows["positions"][0], table[0] + clip.floats("class_embd")[0, 0] - bias
    )
    assert np.array_equal(inputs.rows["positions"][1:], table[1:])

    prepared = family.prepare(picture(97, 61), case.max_rows)
    rows = rows_of(family, prepared, device)
    moved = made(clip)
    rolled = {name: np.roll(each, -1, axis=0) for name, each in inputs.rows.items()}
    moved.grid_inputs = lambda grid: GridInputs(rolled)  # type: ignore[method-assign]
    moved.class_row = "last"  # type: ignore[attr-defined]
    again = moved.prepare(picture(97, 61), case.max_rows)
    assert not again.inputs[0].patches[-1].any()
    assert off(rows_of(moved, again, device), rows) < NEAR


def test_internvl_s_layer_scales_are_part_of_the_products(data: Path, device: Device) -> None:
    case = BY_NAME["internvl"]
    clip = clip_of(case, data)
    scaled = made(clip).clip
    gains = clip.floats("blk.2.ls1.weight")
    for kind in ("weight", "bias"):
        name = f"blk.2.attn_output.{kind}"
        expected = (clip.floats(name).T * gains).T
        assert np.array_equal(scaled.floats(name), expected)
    without = edited(clip, lambda name: "" if ".ls" in name else name)
    prepared = made(clip).prepare(picture(97, 61), case.max_rows)
    rows = [rows_of(made(each), prepared, device) for each in (clip, without)]
    assert off(*rows) > WRONG


def test_lfm2_positions_of_the_table_s_own_size_are_the_table(data: Path) -> None:
    clip = clip_of(BY_NAME["lfm2vl"], data)
    inputs = made(clip).grid_inputs((8, 8))
    assert np.array_equal(inputs.rows["positions"], clip.floats("position_embd.weight"))


def test_lfm2_cuts_large_pictures(data: Path, device: Device) -> None:
    """Tiles and the smaller whole picture behind them go through the tower in runs of their own;
    each has the rows that it has alone.
    """
    case = BY_NAME["lfm2vl"]
    clip = edited(clip_of(case, data), keys={"preproc_image_size": 128})
    family = made(clip)
    pixels = picture(300, 200)
    prepared = family.prepare(pixels, None)
    grids = [each.grid for each in prepared.inputs]
    assert len(set(grids)) == 2
    assert grids[0] == (8, 8)
    layout = prepared.layout
    assert layout[0] == "<|image_start|><|img_row_1_col_1|>"
    assert layout[-3] == "<|img_thumbnail|>"
    rows = rows_of(family, prepared, device)
    alone = made(clip_of(case, data)).prepare(pixels, 16)
    assert np.array_equal(alone.inputs[0].patches, prepared.inputs[-1].patches)
    assert off(rows[-alone.n_rows :], rows_of(family, alone, device)) < 1e-6


# -- damaged files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("smolvlm", "patch_embd.weight"),
        ("smolvlm", "position_embd.weight"),
        ("smolvlm", "mm.model.fc.weight"),
        ("llava", "blk.1.attn_k.weight"),
        ("llava", "mm.0.weight"),
        ("pixtral", "blk.2.ffn_gate.weight"),
        ("mistral3", "mm.patch_merger.weight"),
        ("internvl", "class_embd"),
        ("internvl", "blk.0.attn_output.weight"),
        ("internvl", "mm.model.mlp.3.weight"),
        ("lfm2vl", "post_ln.weight"),
        ("llama4", "pre_ln.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, data: Path, device: Device) -> None:
    case = BY_NAME[name]
    clip = edited(clip_of(case, data), lambda each: "" if each == tensor else each)
    with pytest.raises(FileError, match=f"{tensor}.*missing"):
        rows_of(family := made(clip), family.prepare(picture(97, 61), case.max_rows), device)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("smolvlm", "position_embd.weight", (65, 64)),
        ("llava", "position_embd.weight", (16, 64)),
        ("llava", "class_embd", (63,)),
        ("internvl", "blk.1.ls2.weight", (60,)),
        ("lfm2vl", "position_embd.weight", (60, 64)),
        ("llavanext", "image_newline", (60,)),
        ("mistral3", "mm.input_norm.weight", (60,)),
        ("llama4", "mm.model.mlp.1.weight", (80, 64)),
    ],
)
def test_a_wrong_shape_is_named(
    name: str, tensor: str, shape: tuple[int, ...], data: Path, device: Device
) -> None:
    case = BY_NAME[name]
    clip = reshaped(clip_of(case, data), tensor, *shape)
    with pytest.raises(FileError, match=f"{tensor}.*shape"):
        rows_of(family := made(clip), family.prepare(picture(97, 61), case.max_rows), device)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("smolvlm", "projector.scale_factor", 0),
        ("smolvlm", "preproc_image_size", 100_000),
        ("pixtral", "treadle.rope_halves", "neox"),
        ("llava", "feature_layer", [3]),
        ("llava", "feature_layer", "two"),
        ("llavanext", "image_grid_pinpoints", [112, 56, 56]),
        ("llavanext", "image_grid_pinpoints", [112, 57]),
        ("llavanext", "image_grid_pinpoints", []),
        ("pixtral", "spatial_merge_size", 9),
        ("internvl", "preproc_max_tiles", 0),
        ("lfm2vl", "preproc_image_size", 100),
    ],
)
def test_a_wrong_key_is_named(name: str, key: str, value: Any, data: Path) -> None:
    clip = edited(clip_of(BY_NAME[name], data), keys={key: value})
    with pytest.raises(FileError, match=f"clip.vision.{key}"):
        made(clip)


def test_a_square_that_is_not_whole_blocks_is_refused(data: Path) -> None:
    clip = edited(clip_of(BY_NAME["smolvlm"], data), keys={"projector.scale_factor": 3})
    with pytest.raises(FileError, match=r"is 64: 8 patches a side \(expected a multiple of 3\)"):
        made(clip)


def test_features_of_several_layers_are_refused(data: Path) -> None:
    clip = edited(clip_of(BY_NAME["llava"], data), keys={"feature_layer": [1, 2]})
    with pytest.raises(UnsupportedError, match="features of 2 layers are not supported"):
        made(clip)
