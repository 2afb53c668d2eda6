"""Layers that predict further tokens, of Hugging Face folders: in place and converted, against a
GGUF that is put together here, name by name.

transformers saves none, so a folder's is one of its own layers, once more, and random matrices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert import (
    test_hf_hybrids,
    test_hf_latent,
    test_hf_mamba,
    test_hf_mixtures,
    test_hf_windowed,
)
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_tokenizer import tiny_byte_level
from tests.models.hf_cases import Case
from tests.spec_decode.test_mtp import drafter_of, load
from tests.spec_decode.tiny_drafters import ids_of
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf

N_LAYER = 4
N_EMBD = 64
LIKE = 3  # the layer that is there once more; in hybrids it has attention
COUNTED = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "embed_tokens": "embed_tokens",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
}
APART = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
CASES: dict[str, Any] = {
    "glm4moe": test_hf_mixtures.CASES["glm4moe"],
    "deepseek3": test_hf_latent.CASES["deepseek3"],
    "qwen35": test_hf_hybrids.CASES["qwen35"],
    "qwen35moe": test_hf_hybrids.CASES["qwen35moe"],
    "hy_v3": test_hf_windowed.CASES["hy_v3"],
    "qwen3next": test_hf_hybrids.CASES["qwen3next"],
}
Tensors = dict[str, np.ndarray]


def drawn(name: str) -> np.ndarray:
    rng = np.random.default_rng(sum(name.encode()))
    n = N_EMBD
    if "proj" in name:
        rows = rng.standard_normal((n, 2 * n)) / np.sqrt(n)
    elif "norm" in name:
        rows = 1 + 0.2 * rng.standard_normal(n)
    else:
        rows = rng.standard_normal((320, n))
    return np.asarray(rows, np.float32)


def add_layer(folder: Path, name: str) -> None:
    """Write the layer into the folder, spelt as the family does."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        own = {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{LIKE}.")}
        qwen = name.startswith("qwen")
        to = "mtp.layers.0." if qwen else f"model.layers.{N_LAYER}."
        for key, tensor in own.items():
            tensors[key.replace(f"model.layers.{LIKE}.", to)] = tensor
        for theirs, ours in (APART if qwen else COUNTED).items():
            shift = np.float32(qwen and "norm" in ours)  # Qwen's multiply by 1 + weight
            at = f"mtp.{theirs}.weight" if qwen else f"{to}{theirs}.weight"
            tensors[at] = drawn(ours) - shift
        config["num_nextn_predict_layers"] = config["mtp_num_hidden_layers"] = 1

    rewrite(folder, change)


def rewrite(folder: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> None:
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    said = folder / "config.json"
    tensors = load_file(path)
    config = json.loads(said.read_text())
    change(tensors, config)
    save_file(tensors, path)
    said.write_text(json.dumps(config))


def write_expected(without: Path, path: Path, name: str) -> Path:
    """The file that was made of the folder before, with the layer."""
    writer = GGUFWriter(path)
    with open_gguf(without) as file:
        arch = file.metadata["general.architecture"]
        found: dict[str, Any] = dict(file.metadata)
        for key, value in found.items():
            if key == f"{arch}.block_count":
                value += 1
            if key == f"{arch}.attention.recurrent_layers":
                value = [*value, False]
            writer.add(key, value, file.types[key])
        writer.add(f"{arch}.nextn_predict_layers", 1)
        tensors: dict[str, Any] = {n: (t.shape, t.format, t.data) for n, t in file.tensors.items()}
        like = f"blk.{LIKE}."
        to = f"blk.{N_LAYER}."
        for key in [key for key in tensors if key.startswith(like)]:
            tensors[key.replace(like, to)] = tensors[key]
        f32 = tensors["output_norm.weight"][1]
        for ours in (APART if name.startswith("qwen") else COUNTED).values():
            rows = drawn(ours)
            if name.startswith("qwen") and "norm" in ours:
                rows = (rows - np.float32(1)) + np.float32(1)  # as the folder's becomes
            tensors[f"{to}nextn.{ours}.weight"] = rows.shape, f32, rows.reshape(-1).view(np.uint8)
        for key, (shape, fmt, data) in tensors.items():
            writer.add_tensor(key, shape, fmt, data)
        writer.write()
    return path


@pytest.fixture(scope="module", params=CASES)
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """The folder, what is made of it, and what should be."""
    name = request.param
    at = tmp_path_factory.mktemp("nextn")
    save(test_hf_mixtures.own(CASES[name], max_position_embeddings=256), at / "hf")
    tiny_byte_level().save(str(at / "hf" / "tokenizer.json"))
    (at / "hf" / "tokenizer_config.json").write_text('{"bos_token": "a", "eos_token": "b"}')
    without = convert(at / "hf", at / "without.gguf")
    add_layer(at / "hf", name)
    made = convert(at / "hf", at / "made.gguf")
    return at / "hf", made, write_expected(without, at / "expected.gguf", name)


def test_the_file_that_is_made(files: tuple[Path, Path, Path]) -> None:
    _, made, expected = files
    with open_gguf(made) as ours, open_gguf(expected) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            found = ours.tensors[name]
            assert (found.shape, found.type_name) == (tensor.shape, tensor.type_name), name
            assert np.array_equal(found.data, tensor.data), name
        assert plain(ours) == plain(theirs)


def plain(file: GGUF) -> dict[str, Any]:
    return {
        key: value if isinstance(value, (str, int, float)) else list(value)
        for key, value in file.metadata.items()
    }


def test_logits_drafts_and_texts(files: tuple[Path, Path, Path]) -> None:
    """Of all three the same; and texts are those without drafts."""
    ids = ids_of(20)
    found = []
    for path in files:
        with load(path, deterministic=True, kv="f32") as model:
            assert len(drafter_of(model).engine.gguf.tensors) > 8
            logits = model.logits(ids)
            text = model.generate(ids, max_tokens=24, temperature=0, ignore_eos=True)
            text.finish()
            assert text.timings.n_drafted > 3
        with load(path, deterministic=True, kv="f32", speculate=False) as model:
            alone = model.generate(ids, max_tokens=24, temperature=0, ignore_eos=True)
            alone.finish()
        assert alone.ids == text.ids
        counts = text.timings.n_drafted, text.timings.n_accepted
        found.append((path, logits, text.ids, counts))
    for path, logits, made, counts in found[1:]:
        assert np.array_equal(logits, found[0][1]), path
        assert (made, counts) == found[0][2:], path


# -- layers that are left out -------------------------------------------------------------------


def _lose(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors[f"model.layers.{N_LAYER}.hnorm.weight"]


def _shape(tensors: Tensors, config: dict[str, Any]) -> None:
    name = f"model.layers.{N_LAYER}.eh_proj.weight"
    tensors[name] = tensors[name][:, :N_EMBD].copy()


def _add(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[f"model.layers.{N_LAYER}.fnorm.weight"] = drawn("fnorm")


def _second(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["mtp.layers.1.input_layernorm.weight"] = drawn("norm")


LEFT_OUT = [
    ("glm4moe", _lose, "nextn.hnorm.weight: the tensor is missing"),
    ("glm4moe", _shape, "nextn.eh_proj.weight: shape"),
    ("glm4moe", _add, f"model.layers.{N_LAYER}.fnorm.weight: is not a tensor of an MTP layer"),
    ("qwen35", _second, "mtp.layers.1.input_layernorm.weight: treadle supports one layer"),
]


@pytest.mark.parametrize(("name", "change", "why"), LEFT_OUT)
def test_a_layer_that_is_not_whole(name: str, change: Any, why: str, tmp_path: Path) -> None:
    """The model is, without it."""
    folder = tmp_path / "hf"
    save(test_hf_mixtures.own(CASES[name]), folder)
    add_layer(folder, name)
    rewrite(folder, change)
    said = f"MTP layers are left out: .*{why}"
    with pytest.warns(UserWarning, match=said):
        open_hf(folder).close()
    source = open_hf_source(folder)
    assert [note for note in source.notes if why in note]
    assert not [name for name in source.tensors if name.startswith(f"blk.{N_LAYER}.")]
    assert not [key for key in source.metadata if "nextn" in key]
    source.close()


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (test_hf_mamba.CASES["nemotronh"], ["mtp.norm.weight"]),
        (
            test_hf_mixtures.CASES["ernie45moe"],
            ["model.mtp_block.0.input_layernorm.weight", "model.mtp_emb_norm.0.weight"],
        ),
    ],
    ids=["nemotronh", "ernie45moe"],
)
def test_an_architecture_without(case: Case, names: list[str], tmp_path: Path) -> None:
    """In place there is no word: nothing was lost."""
    folder = tmp_path / "hf"
    save(test_hf_mixtures.own(case), folder)
    rewrite(folder, lambda tensors, config: tensors.update({n: drawn("norm") for n in names}))
    open_hf(folder).close()
    source = open_hf_source(folder)
    assert [
        note for note in source.notes if f"treadle does not support them in {case.arch}" in note
    ]
    source.close()


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As Qwen 3.5's checkpoints have them, and their further layer."""
    folder = tmp_path / "hf"
    made = []
    save(test_hf_mixtures.own(CASES["qwen35moe"]), folder)
    add_layer(folder, "qwen35moe")
    for pack in (False, True):
        if pack:
            rewrite(folder, _pack)
        with treadle.load(folder, threads=1, context=64) as model:
            made.append(model.logits(ids_of(20)))
    assert np.array_equal(made[0], made[1])


def _pack(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if ".experts.0." in name and "gate" in name]:
        stem = name.removesuffix("0.gate_proj.weight")
        each: dict[str, list[np.ndarray]] = {
            one: [tensors.pop(f"{stem}{i}.{one}_proj.weight") for i in range(8)]
            for one in ("gate", "up", "down")
        }
        pairs = zip(each["gate"], each["up"], strict=True)
        tensors[f"{stem}gate_up_proj"] = np.stack([np.concatenate(pair) for pair in pairs])
        tensors[f"{stem}down_proj"] = np.stack(each["down"])
