"""Projector files that ``convert`` makes of Hugging Face folders, beside those of llama.cpp's
converter, and those that ``quantize`` makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media import media_cases, picture_cases, sound_cases
from tests.media.test_towers import check_rows
from treadle.convert.recipe import Options
from treadle.convert.writer import convert
from treadle.devices import open_device
from treadle.errors import FileError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.metadata import GGUFArray
from treadle.formats import by_name
from treadle.media.llamacpp_projectors import EXACT_GELU, projector_differences
from treadle.media.projector import Projector, open_projector
from treadle.media.projector_source import open_projector_source
from treadle.quantize.mixes import MIXES
from treadle.quantize.plan import make_recipe
from treadle.quantize.write import write

NEAR = 1e-5  # of rows; a wrong activation is 1e-4 off, other mistakes 1e-2 and more
FOLDERS = (
    *(case.name for case in media_cases.CASES if case.folder),
    *("smolvlm", "mistral3", "internvl"),
    *(case.name for case in sound_cases.CASES if case.folder),
)

# -- beside llama.cpp's files -----------------------------------------------------------------

# Keys of llama.cpp's converter that describe nothing that a program reads.
LACKING = {"general.size_label", "general.quantization_version"}
BOUNDS = {"image_min_pixels", "image_max_pixels"}  # llama.cpp has its own
# Keys that llama.cpp's converter does not write, by case, without "clip." and "vision.".
OWN: Mapping[str, set[str]] = {
    "gemma3": {"projector.scale_factor"},  # written there unless it is 4
    "gemma4": {"projector.scale_factor", "image_max_pixels", "use_gelu"},  # quick GELU without
    "gemma4u": {"projector.scale_factor", "image_max_pixels"},
    "qwen25vl": {"spatial_merge_size", "window_size", *BOUNDS},  # windows of 56 pixels, not 112
    "qwen3vl": BOUNDS,
    "qwen35": BOUNDS,
    "smolvlm": set(),
    "mistral3": {"projector.layer_norm_epsilon"},  # 1e-6 beside the tower's 1e-5
    "internvl": {"preproc_min_tiles", "preproc_max_tiles"},  # there of older folders alone
    "voxtral": set(),
    "qwen3asr": set(),
}
# llama.cpp requires it; its converter leaves it out of folders of transformers 5.
BREAK = "v.token_embd.img_break"
every_folder = pytest.mark.parametrize("name", FOLDERS)
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The projector file of a folder, written once."""
    root = tmp_path_factory.mktemp("projectors")

    def make(name: str) -> Path:
        path = root / f"{name}.gguf"
        return path if path.exists() else write_projector(data / "media" / name, path)

    return make


def write_projector(folder: Path, to: Path, matrices: str = "F16") -> Path:
    source = open_projector_source(folder, by_name(matrices))
    try:
        assert convert(source, to, Options()) == [to]
    finally:
        source.close()
    return to


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, GGUFArray) else value


@every_folder
def test_keys_are_those_of_llama_cpp(name: str, made: Make, data: Path) -> None:
    """With the type that llama.cpp asks for."""
    ours = open_gguf(made(name))
    theirs = open_gguf(data / "media" / name / "mmproj.gguf")
    own = {key.removeprefix("clip.").removeprefix("vision.") for key in ours.metadata}
    there = {key.removeprefix("clip.").removeprefix("vision.") for key in theirs.metadata}
    assert own - there == OWN[name]
    assert there - own == LACKING
    assert ours.metadata["general.name"] == name
    for key, value in theirs.metadata.items():
        if key in LACKING or key == "general.name":
            continue
        assert ours.types[key] == theirs.types[key], key
        expected = plain(value)
        if not isinstance(expected, str):
            expected = pytest.approx(expected, rel=1e-6)
        assert plain(ours.metadata[key]) == expected, key


def test_mistral_s_break_is_the_decoder_s_embedding(made: Make, data: Path, tmp_path: Path) -> None:
    """llama.cpp opens no file without it, and ends each row of a picture with it."""
    row = open_gguf(made("mistral3")).tensors[BREAK]
    text = open_gguf(data / "media" / "mistral3" / "text.gguf").tensors["token_embd.weight"]
    assert row.type_name == "F32"
    assert np.array_equal(row.dequantize(), text.dequantize()[281])
    with closing(opened(made("mistral3"))) as projector:
        projector.family("image")
    folder = edited(data, "mistral3", tmp_path)
    added = [{"id": 320, "content": "[IMG_BREAK]"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with pytest.raises(FileError, match=r"shape \[320, 64\] .*a row 320, that of \[IMG_BREAK\]"):
        open_projector_source(folder, by_name("F16"))
    (folder / "tokenizer.json").unlink()
    with closing(open_projector_source(folder, by_name("F16"))) as source:
        assert BREAK not in source.tensors
        assert any("llama.cpp will not open this file" in note for note in source.notes)


@every_folder
def test_tensors_are_those_of_llama_cpp(name: str, made: Make, data: Path) -> None:
    """Patch embeddings are F32 here in all files, there in those of Gemma 3 and Idefics 3 alone."""
    ours = open_gguf(made(name)).tensors
    theirs = open_gguf(data / "media" / name / "mmproj.gguf").tensors
    assert ours.keys() - theirs.keys() == ({BREAK} if name == "mistral3" else set())
    assert theirs.keys() <= ours.keys()
    for tensor, there in theirs.items():
        here = ours[tensor]
        assert here.shape == there.shape, tensor
        assert here.type_name == ("F32" if "patch_embd" in tensor else there.type_name), tensor
        if (name, tensor) == ("qwen3asr", "a.position_embd.weight"):  # computed, see below
            continue
        assert np.array_equal(here.dequantize(), there.dequantize()), tensor


def test_sinusoids_are_those_of_llama_cpp(made: Make, data: Path) -> None:
    """The frequencies' last bits differ between libraries, at most by one: of 1500 positions, 13
    are read.
    """
    files = made("qwen3asr"), data / "media" / "qwen3asr" / "mmproj.gguf"
    ours, theirs = (
        open_gguf(file).tensors["a.position_embd.weight"].dequantize() for file in files
    )
    most = np.abs(ours - theirs).max(axis=1)
    assert (most <= 2.0**-23 * np.maximum(np.arange(1500), 1)).all()


def opened(path: Path | GGUF) -> Projector:
    return open_projector(path, open_device("cpu", None, 1, None), exact=True)


@every_folder
def test_rows_of_a_file_are_the_truth_s(name: str, made: Make, data: Path) -> None:
    """Its settings are the folder's: a picture's size without a bound too."""
    check_truth(name, opened(made(name)), data)


def check_truth(name: str, projector: Projector, data: Path) -> None:
    if name in media_cases.BY_NAME:
        case = media_cases.BY_NAME[name]
        own = case if name == "gemma4u" else case._replace(max_rows=None)
        truth = media_cases.truth_of(case, data)
        check_rows(own, projector, truth)
        if name == "gemma4u":
            sound = projector.prepare(truth["input_features"].ravel(), None, "audio")
            rows = projector.encode(sound)
            assert media_cases.off(rows, truth["projected.sound"][0]) < NEAR
        return
    found, expected = rows_of(name, projector, data)
    assert media_cases.off(found, expected) < NEAR


def rows_of(name: str, projector: Projector, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the truth's first picture, without deepstack, and the truth."""
    pixels = media_cases.picture()
    if name in sound_cases.BY_NAME:
        listened = sound_cases.BY_NAME[name]
        truth = sound_cases.truth_of(name, data)["projected"]
        sound = projector.prepare(sound_cases.sound(), None, "audio")
        found = projector.encode(sound_cases.of_truth(listened, sound))
    elif name in media_cases.BY_NAME:
        case = media_cases.BY_NAME[name]
        truth = media_cases.truth_of(case, data)[case.projected]
        found = projector.encode(projector.prepare(pixels, case.max_rows))
    else:
        which = picture_cases.BY_NAME[name]
        truth = picture_cases.truth_of(which, data)["projected"]
        found = projector.encode(projector.prepare(pixels, which.max_rows))
    width = truth.shape[-1]
    return found[:, :width], truth.reshape(-1, width)


@pytest.mark.parametrize("name", ["qwen3vl", "mistral3", "qwen3asr"])
@pytest.mark.parametrize("matrices", ["F32", "BF16"])
def test_matrices_of_another_format(name: str, matrices: str, data: Path, tmp_path: Path) -> None:
    """The data's weights are exact in all three."""
    path = write_projector(data / "media" / name, tmp_path / "made.gguf", matrices)
    tensors = open_gguf(path).tensors
    prefix = "a" if name in sound_cases.BY_NAME else "v"
    assert tensors[f"{prefix}.blk.0.ffn_up.weight"].type_name == matrices
    first = "a.position_embd.weight" if prefix == "a" else "v.patch_embd.weight"
    assert tensors[first].type_name == "F32"
    check_truth(name, opened(path), data)


# -- folders with other settings --------------------------------------------------------------


def edited(data: Path, name: str, to: Path, **vision: Any) -> Path:
    """A copy of a folder with other values in config.json's vision_config; None: without."""
    source = data / "media" / name
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["vision_config"] |= vision
    for key, value in vision.items():
        if value is None:
            del config["vision_config"][key]
    (to / "config.json").write_text(json.dumps(config), "utf-8")
    for file in ("preprocessor_config.json", "model.safetensors"):
        (to / file).symlink_to(source / file)
    return to


def keys_of(folder: Path) -> dict[str, Any]:
    source = open_projector_source(folder, by_name("F16"))
    source.close()
    return {key.removeprefix("clip.vision."): v for key, v in source.metadata.items()}


@pytest.mark.parametrize(
    ("whole", "pattern", "listed"),
    [
        ([1, 3], 2, None),
        ([0, 1, 2, 3], 1, None),
        ([3], 4, None),
        ([2], 3, None),  # of four layers
        ([1], None, [1]),
        ([0, 3], None, [0, 3]),
        ([], None, []),
    ],
)
def test_layers_without_windows(
    whole: list[int], pattern: int | None, listed: list[int] | None, data: Path, tmp_path: Path
) -> None:
    """llama.cpp reads every n-th layer; the others keep their list."""
    keys = keys_of(edited(data, "qwen25vl", tmp_path, fullatt_block_indexes=whole))
    assert keys.get("n_wa_pattern") == pattern
    assert keys.get("wa_layer_indexes") == listed


def test_windows_of_the_usual_size(data: Path, tmp_path: Path) -> None:
    keys = keys_of(edited(data, "qwen25vl", tmp_path, window_size=112))
    assert "window_size" not in keys
    assert "is_deepstack_layers" not in keys


def test_layers_without_windows_that_are_no_numbers(data: Path, tmp_path: Path) -> None:
    folder = edited(data, "qwen25vl", tmp_path, fullatt_block_indexes=["all"])
    with pytest.raises(FileError, match=r"fullatt_block_indexes: is \['all'\]"):
        open_projector_source(folder, by_name("F16"))


def test_deepstack_s_order_is_the_folder_s(data: Path, tmp_path: Path) -> None:
    """The merger that is first in the folder is of the layer that is listed first."""
    folder = edited(data, "qwen3vl", tmp_path, deepstack_visual_indexes=[1, 0])
    source = open_projector_source(folder, by_name("F16"))
    usual = open_gguf(data / "media" / "qwen3vl" / "mmproj.gguf")
    name = "v.deepstack.{}.fc1.bias"
    found = source.tensors[name.format(1)].read().view("<u2").astype(np.uint32) << 16
    assert np.array_equal(found.view(np.float32), usual.tensors[name.format(0)].dequantize())
    assert source.metadata["clip.vision.is_deepstack_layers"] == [True, True, False]
    source.close()


def test_a_folder_without_such_parts(data: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = edited(data, "gemma3", tmp_path)
    (folder / "model.safetensors").unlink()
    save_file({"language_model.norm.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    with pytest.raises(FileError, match="no tensors of a picture or sound part"):
        open_projector_source(folder, by_name("F16"))
    with pytest.raises(FileError, match=r"mmproj.gguf: is not a folder"):
        open_projector_source(data / "media" / "gemma3" / "mmproj.gguf", by_name("F16"))


# -- what llama.cpp reads differently ---------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"projector_type": "gemma3"}, ""),
        ({"vision.projector_type": "gemma4v"}, ""),
        ({"projector_type": "qwen3vl_merger"}, "GELU's tanh form"),
        ({"projector_type": "idefics3", "vision.window_size": 56}, "112 pixels wide"),
        ({"projector_type": "glm4v", "vision.wa_layer_indexes": [0, 3]}, "every n-th (here 0, 3)"),
        ({"projector_type": "llama4"}, "column by column"),
        (
            {"projector_type": "mlp", "vision.image_grid_pinpoints": [336, 672]},
            "keep their padding",
        ),
        ({"projector_type": "mlp"}, "middle square"),
    ],
)
def test_differences(keys: dict[str, Any], said: str) -> None:
    texts = projector_differences({f"clip.{key}": value for key, value in keys.items()})
    assert all(text.startswith("llama.cpp will read this file differently: ") for text in texts)
    expected = bool(said) + (keys.get("projector_type") in EXACT_GELU and "GELU" not in said)
    assert len(texts) == expected
    assert any(said in text for text in texts) or not said


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mlp", "its neighbour's position, and the first one the class token's, whose row"),
        ("internvl", "its neighbour's position"),
        ("llama4", ""),
    ],
)
def test_differences_of_class_tokens(kind: str, said: str) -> None:
    keys = {"clip.projector_type": kind}
    without = projector_differences(keys, {"v.patch_embd.weight"})
    found = projector_differences(keys, {"v.patch_embd.weight", "v.class_embd"})
    assert found[: len(without)] == without
    assert len(found) == len(without) + bool(said)
    assert not said or said in found[-1]


# -- quantised --------------------------------------------------------------------------------

# Rounding to steps of a block's largest value / 127 is 0.0047 of normal values' deviation (it is
# 2.07 of it in blocks of 32); of weights and of activations, so 0.0067 a product, and the errors of
# the up to 18 products behind each other add up as their squares do.
Q8_OFF = 0.0067 * 18**0.5


def quantised(made: Make, name: str, mix: str, to: Path) -> Path:
    with open_gguf(made(name)) as gguf:
        write(gguf, make_recipe(gguf, MIXES[mix]), to, n_threads=1)
    return to


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square of the differences, by that of the values."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@every_folder
def test_rows_of_a_quantised_file(name: str, made: Make, data: Path, tmp_path: Path) -> None:
    path = quantised(made, name, "Q8_0", tmp_path / "q.gguf")
    with open_gguf(path) as gguf:
        for tensor in gguf.tensors.values():
            product = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
            kept = "patch_embd" in tensor.name or "position_embd" in tensor.name
            if name == "gemma3" and tensor.name == "mm.input_projection.weight":
                expected = "F16"  # it is stored transposed
            elif not product or kept:
                expected = "F32"
            elif ".conv1d." in tensor.name or ".conv2d." in tensor.name:
                expected = "F16"  # rows of 3 values
            else:
                expected = "F16" if tensor.shape[-1] % 32 else "Q8_0"
            assert tensor.type_name == expected, tensor.name
    found, expected_rows = rows_of(name, opened(path), data)
    assert 1e-3 < deviation(found, expected_rows) < Q8_OFF


def test_fewer_bits_are_less_exact(made: Make, data: Path, tmp_path: Path) -> None:
    """Each bit less doubles the error of weights."""
    off = {}
    for mix in ("Q8_0", "Q5_0", "Q4_0"):
        path = quantised(made, "internvl", mix, tmp_path / f"{mix}.gguf")
        off[mix] = deviation(*rows_of("internvl", opened(path), data))
    assert 4 * off["Q8_0"] < off["Q5_0"] < 16 * off["Q8_0"]
    assert 1.5 * off["Q5_0"] < off["Q4_0"] < 3 * off["Q5_0"]


def test_mixes_count_a_tower_s_layers(made: Make) -> None:
    """Q4_K_M gives the first, the last and every third layer's values more bits."""
    with open_gguf(made("internvl")) as gguf:  # four layers, rows of 64: Q6_K becomes Q8_0
        recipe = make_recipe(gguf, MIXES["Q4_K_M"])
    types = {target.tensor.name: target.type.name for target in recipe.targets}
    values = [types[f"v.blk.{i}.attn_v.weight"] for i in range(4)]
    assert values == ["Q5_0", "Q5_0", "Q8_0", "Q8_0"]
    assert types["v.position_embd.weight"] == types["v.patch_embd.weight"] == "F32"


def test_floats_of_a_transposed_matrix(made: Make) -> None:
    with open_gguf(made("gemma3")) as gguf:
        recipe = make_recipe(gguf, MIXES["F32"])
    assert {target.type.name for target in recipe.targets} == {"F32"}
