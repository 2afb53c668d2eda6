"""Hugging Face folders of picture families: their own rows, and the names of their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.matrix_rounding import sharp_isa
from tests.media.picture_cases import BY_NAME, off, picture, truth_of
from tests.models.hf_tiny import require_transformers
from treadle.devices import open_device
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.media.families import hf_names_of, internvl, lfm2, llava
from treadle.media.projector import Projector, open_projector

NEAR = 1e-5  # of rows; transformers' own f32 is 1e-6 off
SAME = 2e-6  # of rows of the same weights in f32 and f16, whose products differ in order


def opened(source: Path | GGUF) -> Projector:
    return open_projector(source, open_device("cpu", sharp_isa(), 1, None), exact=True)


@pytest.mark.parametrize("name", ["smolvlm", "mistral3", "internvl"])
def test_rows_of_a_folder_are_the_truth_s(name: str, data: Path) -> None:
    case = BY_NAME[name]
    projector = opened(data / "media" / name)
    prepared = projector.prepare(picture(97, 61), case.max_rows)
    truth = truth_of(case, data)["projected"]
    assert off(projector.encode(prepared), truth.reshape(-1, truth.shape[-1])) < NEAR
    file = opened(data / "media" / name / "mmproj.gguf")
    again = file.prepare(picture(97, 61), case.max_rows)
    assert again.layout == prepared.layout
    assert all(
        np.array_equal(a.patches, b.patches)
        for a, b in zip(prepared.inputs, again.inputs, strict=True)
    )
    assert again.digest != prepared.digest  # another file


@pytest.mark.parametrize("name", ["smolvlm", "mistral3", "internvl"])
def test_a_folder_is_a_projector_file(name: str, data: Path) -> None:
    """Names and values are those of the file that llama.cpp's converter makes."""
    file = open_gguf(data / "media" / name / "mmproj.gguf")
    found = opened(data / "media" / name).gguf
    assert set(found.tensors) == set(file.tensors)
    for tensor, ours in found.tensors.items():
        theirs = file.tensors[tensor].dequantize()
        if name == "mistral3" and tensor.endswith((".attn_q.weight", ".attn_k.weight")):
            theirs = in_folder("pixtral", tensor, theirs)
        assert np.array_equal(ours.dequantize().ravel(), theirs.ravel()), tensor
    keys = ("embedding_length", "block_count", "patch_size", "image_size", "projection_dim")
    for key in (*keys, "feed_forward_length", "attention.head_count"):
        assert found.metadata[f"clip.vision.{key}"] == file.metadata[f"clip.vision.{key}"]


@pytest.mark.parametrize("name", ["smolvlm", "mistral3"])
def test_a_folder_is_prepared_as_its_processor_does(name: str, data: Path) -> None:
    """Without a bound too: the limits are those of preprocessor_config.json."""
    prepared = opened(data / "media" / name).prepare(picture(97, 61))
    ids = truth_of(BY_NAME[name], data)["input_ids"][0]
    assert prepared.n_rows == (ids == 280).sum()


def test_a_folder_s_number_of_tiles(data: Path) -> None:
    projector = opened(data / "media" / "internvl")
    family = projector.family("image")
    assert isinstance(family, internvl.InternVl)
    assert (family.min_tiles, family.max_tiles) == (1, 4)
    assert projector.prepare(picture(97, 61)).n_rows == 12


# -- folders made of the projector files ------------------------------------------------------

# Names in mmproj.gguf of tensors that the table gives today's name.
OLDER = {
    "llava": {"mm.1": "mm.0", "ffn_up": "ffn_down", "ffn_down": "ffn_up"},
    "llavanext": {"mm.1": "mm.0", "ffn_up": "ffn_down", "ffn_down": "ffn_up"},
    "llama4": {"ln2": "attn_post_norm"},
}


def stored(gguf: GGUF, case: str, name: str) -> np.ndarray | None:
    """A tensor of mmproj.gguf by the name in a table; None: the file lacks it."""
    for today, then in OLDER.get(case, {}).items():
        if f"{today}." in name:
            name = name.replace(f"{today}.", f"{then}.")
            break
    tensor = gguf.tensors.get(name) or gguf.tensors.get(f"{name}.weight")
    return None if tensor is None else tensor.dequantize()


def in_folder(case: str, name: str, values: np.ndarray) -> np.ndarray:
    """A tensor of a projector file as it is in a folder: pairs that turn lie half a head apart."""
    if case == "pixtral" and name.endswith((".attn_q.weight", ".attn_k.weight")):
        pairs = values.reshape(2, 16, 2, 64)  # heads, pairs, both of a pair, columns
        return pairs.swapaxes(1, 2).reshape(values.shape)
    if case == "lfm2vl" and name == "v.patch_embd.weight":
        return values.transpose(0, 2, 3, 1).reshape(len(values), -1)
    return values


def names_of_transformers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of the model that a folder's config.json describes."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    (name,) = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    return {key: tuple(value.shape) for key, value in model.named_parameters()}


def write_folder(case: str, data: Path, to: Path, names: Mapping[str, tuple[int, ...]]) -> None:
    """Write a folder with the parameters ``names``, their values from mmproj.gguf: zeros for those
    of layers that it lacks.
    """
    from safetensors.numpy import save_file

    folder = data / "media" / case
    config = json.loads((folder / "config.json").read_text("utf-8"))
    table = hf_names_of(config["model_type"], "config.json")
    gguf = open_gguf(folder / "mmproj.gguf")
    arrays = {}
    for theirs, shape in names.items():
        name = theirs.removeprefix("model.")
        if not name.startswith(table.prefixes):
            continue
        if name in table.unread:
            arrays[theirs] = np.full(shape, 3.0, np.float32)
            continue
        found = table.name_of(name, {})
        assert found, theirs
        values = stored(gguf, case, found)
        if values is None:
            assert ".blk.2." in found, found
            values = np.zeros(shape, np.float32)
        values = in_folder(case, found, values)
        assert values.size == np.prod(shape), (theirs, found)
        arrays[theirs] = np.ascontiguousarray(values.reshape(shape))
    assert len(arrays) >= len(gguf.tensors)
    save_file(arrays, to / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())


@pytest.mark.slow  # importing transformers' models takes half a minute
@pytest.mark.parametrize(
    ("case", "published"),
    [
        ("llava", False),
        ("llava", True),
        ("llavanext", True),
        ("pixtral", False),
        ("lfm2vl", True),
        ("llama4", False),
    ],
)
def test_names_are_those_of_transformers(
    case: str, published: bool, data: Path, tmp_path: Path
) -> None:
    """All tensors of the model's class have a name, and with the file's values the file's rows.
    ``published``: as in folders of transformers 4.
    """
    require_transformers()
    names = names_of_transformers(data / "media" / case)
    if published:
        older = "vision_tower.vision_model."
        names = {
            name.replace("vision_tower.", older).removeprefix("model."): shape
            for name, shape in names.items()
        }
    write_folder(case, data, tmp_path, names)
    projector = opened(tmp_path)
    file = opened(data / "media" / case / "mmproj.gguf")
    bound = BY_NAME[case].max_rows
    prepared = projector.prepare(picture(97, 61), bound)
    assert off(projector.encode(prepared), file.encode(prepared)) < SAME
    # LLaVA's features are taken before the last norm. llama.cpp applies one that a file has.
    assert ("v.post_ln.weight" in projector.gguf.tensors) == (case in ("lfm2vl", "llama4"))


def test_names_of_internvl_s_first_folders(data: Path, tmp_path: Path) -> None:
    """Their queries, keys and values are one matrix."""
    from safetensors.numpy import save_file

    gguf = open_gguf(data / "media" / "internvl" / "mmproj.gguf")
    ours = {value: key for key, value in internvl.INTERNVL_CHAT.names.items()}
    arrays = {}
    for name, tensor in gguf.tensors.items():
        stem, _, kind = name.rpartition(".")
        if ".attn_q" in name or ".attn_k" in name or ".attn_v" in name:
            stem = stem[:-2] + "_qkv"
            three = [gguf.tensors[f"{stem[:-4]}_{part}.{kind}"].dequantize() for part in "qkv"]
            values = np.concatenate(three)
        else:
            values = tensor.dequantize()
        number = name.split(".")[2] if name.startswith("v.blk.") else ""
        spelled = stem.replace(f".{number}.", ".{}.") if number else stem
        if f"{spelled}.{kind}" in ours:
            theirs = ours[f"{spelled}.{kind}"]
        elif name in ours:
            theirs = ours[name]
        else:
            theirs = f"{ours[spelled]}.{kind}"
        arrays[theirs.format(number)] = values
    save_file(arrays, tmp_path / "model.safetensors")
    config = json.loads((data / "media" / "internvl" / "config.json").read_text("utf-8"))
    vision = config["vision_config"] | {"image_size": 56, "patch_size": 14}
    chat = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "vision_config": vision,
        "llm_config": config["text_config"],
        "downsample_ratio": 0.5,
        "max_dynamic_patch": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(chat), "utf-8")
    projector = opened(tmp_path)
    prepared = projector.prepare(picture(97, 61))
    truth = truth_of(BY_NAME["internvl"], data)["projected"]
    assert off(projector.encode(prepared), truth.reshape(12, -1)) < NEAR


# -- settings of folders ----------------------------------------------------------------------


def edited(data: Path, name: str, to: Path, **changes: Any) -> Path:
    """A copy of a folder of ``data`` with other values in config.json, "a.b" for those within."""
    source = data / "media" / name
    config = json.loads((source / "config.json").read_text("utf-8"))
    preprocessor = json.loads((source / "preprocessor_config.json").read_text("utf-8"))
    for key, value in changes.items():
        *path, last = key.split("__")
        at = preprocessor if path[:1] == ["preprocessor"] else config
        for part in path[1:] if path[:1] == ["preprocessor"] else path:
            at = at[part]
        at[last] = value
    (to / "config.json").write_text(json.dumps(config), "utf-8")
    (to / "preprocessor_config.json").write_text(json.dumps(preprocessor), "utf-8")
    (to / "model.safetensors").symlink_to(source / "model.safetensors")
    return to


def test_a_folder_that_cuts_no_tiles(data: Path, tmp_path: Path) -> None:
    folder = edited(data, "smolvlm", tmp_path, preprocessor__do_image_splitting=False)
    assert opened(folder).prepare(picture(97, 61)).n_rows == 4


def test_another_base_of_rotations_is_refused(data: Path, tmp_path: Path) -> None:
    folder = edited(data, "mistral3", tmp_path, vision_config__rope_parameters={"rope_theta": 100})
    with pytest.raises(UnsupportedError, match=r"rope_theta: expected 10000"):
        opened(folder)


def test_sides_that_differ_are_refused(data: Path, tmp_path: Path) -> None:
    folder = edited(data, "internvl", tmp_path, vision_config__patch_size=[14, 7])
    with pytest.raises(FileError, match=r"vision_config.patch_size: is \[14, 7\]"):
        opened(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vision_feature_select_strategy": "full"}, "rows of class tokens"),
        ({"vision_config__model_type": "siglip3"}, "'siglip3' is not supported in LLaVA"),
    ],
)
def test_other_llava_folders_are_refused(changes: dict[str, Any], match: str, data: Path) -> None:
    from treadle.files.metadata import MetadataReader
    from treadle.files.safetensors import read_json

    path = data / "media" / "llava" / "config.json"
    config = read_json(path)
    for key, value in changes.items():
        *within, last = key.split("__")
        at = config
        for part in within:
            at = at[part]
        at[last] = value
    with pytest.raises(UnsupportedError, match=match):
        llava.LLAVA.read(MetadataReader(config, path), MetadataReader({}, path))


@pytest.mark.slow
def test_limits_of_lfm2_folders(data: Path, tmp_path: Path) -> None:
    """In preprocessor_config.json, or in config.json of the first folders."""
    require_transformers()
    write_folder("lfm2vl", data, tmp_path, names_of_transformers(data / "media" / "lfm2vl"))
    family = opened(tmp_path).family("image")
    assert isinstance(family, lfm2.Lfm2)
    assert family.limits == lfm2.Lfm2Limits(4, 16, 128)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config |= {"min_image_tokens": 5, "max_image_tokens": 17, "do_image_splitting": False}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "preprocessor_config.json").write_text("{}", "utf-8")
    family = opened(tmp_path).family("image")
    assert isinstance(family, lfm2.Lfm2)
    assert family.limits == lfm2.Lfm2Limits(5, 17, 512, 1, 1)
