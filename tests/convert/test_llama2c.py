"""llama2.c: every version of its checkpoints, and its tokenizers."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.convert.detect import find_kind, open_source
from treadle.convert.hf.tokenizer.spm_keys import fit_vocabulary
from treadle.convert.legacy.llama2c import find_tokenizer, open_llama2c, read_tokenizer
from treadle.convert.recipe import Options
from treadle.convert.writer import convert
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.llama2c import Llama2c
from treadle.formats import by_name
from treadle.sampling import Sampling

SIZES = ("n_embd", "n_ff", "n_layer", "n_head", "n_head_kv", "n_vocab", "n_ctx")


@pytest.fixture(scope="module")
def stories(data: Path) -> GGUF:
    return open_gguf(data / "models" / "stories260K.gguf")


@pytest.fixture(scope="module")
def baby(data: Path) -> GGUF:
    return open_gguf(data / "models" / "babyllama105" / "babyllama105-F32.gguf")


def test_the_stories(data: Path, stories: GGUF, tmp_path: Path) -> None:
    """The tensors of the GGUF of the same model, and llama2.c's own text, to the letter."""
    source = open_source(data / "models" / "stories260K.bin")
    convert(source, tmp_path / "s.gguf", Options())
    made = open_gguf(tmp_path / "s.gguf")
    assert stories.tensors.keys() - made.tensors.keys() == {"output.weight"}  # it is tied
    for name, tensor in made.tensors.items():
        assert tensor.shape == stories.tensors[name].shape
        assert tensor.data.tobytes() == stories.tensors[name].data.tobytes(), name
    for key, value in stories.metadata.items():
        if key.startswith("llama.") and key != "llama.context_length":
            assert made.metadata[key] == value, key
    for key in ("tokens", "scores", "token_type"):
        theirs, ours = (g.metadata[f"tokenizer.ggml.{key}"] for g in (stories, made))
        assert list(ours) == list(theirs), key  # type: ignore[arg-type]
    assert made.metadata["llama.context_length"] == 512
    case = json.loads((data / "truth" / "llama2c_stories260K_greedy.json").read_text())[1]
    with treadle.load(tmp_path / "s.gguf", threads=1) as model:
        left = case["n_steps"] - len(model.tokenize(case["prompt"])) + 1
        told = model.generate(case["prompt"], max_tokens=left, sampling=Sampling(temperature=0))
        assert f"{case['prompt']}{told.finish()}\n" == case["text"]


def test_a_character_model(data: Path, baby: GGUF, tmp_path: Path) -> None:
    source = open_source(data / "models" / "babyllama105" / "model5000.bin")
    convert(source, tmp_path / "b.gguf", Options(type=by_name("Q8_0")))
    made = open_gguf(tmp_path / "b.gguf")
    theirs = open_gguf(baby.path.with_name("babyllama105-Q8_0.gguf"))
    for name, tensor in made.tensors.items():
        assert tensor.type_name == theirs.tensors[name].type_name
        assert tensor.data.tobytes() == theirs.tensors[name].data.tobytes(), name
    for key in ("tokens", "scores", "token_type"):
        other, ours = (g.metadata[f"tokenizer.ggml.{key}"] for g in (theirs, made))
        assert list(ours) == list(other), key  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tok512.bin", "tok512.model"])
def test_either_tokenizer(data: Path, stories: GGUF, name: str) -> None:
    keys = read_tokenizer(data / "models" / name, 512)
    theirs: Any = stories.metadata["tokenizer.ggml.tokens"]
    assert [t.decode() for t in keys["tokenizer.ggml.tokens"]] == list(theirs)
    for key in ("scores", "token_type"):
        other: Any = stories.metadata[f"tokenizer.ggml.{key}"]
        assert np.array_equal(keys[f"tokenizer.ggml.{key}"], other.numpy())


# -- versions 1 and 2 --------------------------------------------------------------------------


def weights(gguf: GGUF) -> dict[str, np.ndarray]:
    return {name: t.dequantize().astype("<f4") for name, t in gguf.tensors.items()}


def layers(w: dict[str, np.ndarray], *stems: str) -> list[np.ndarray]:
    n = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blk"))
    return [w[f"blk.{i}.{stem}.weight"] for stem in stems for i in range(n)]


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up")


def quantized(x: np.ndarray, group: int) -> bytes:
    """As llama2.c's export.py does it."""
    groups = x.reshape(-1, group)
    scale = np.abs(groups).max(axis=1) / 127.0
    codes = np.round(groups / scale[:, None]).astype(np.int8)
    return bytes(codes.tobytes() + scale.astype("<f4").tobytes())


def write(path: Path, gguf: GGUF, version: int, *, tied: bool, group: int = 64) -> Path:
    w = weights(gguf)
    meta: Any = gguf.metadata
    head = struct.pack(
        "<Ii7iB",
        0x616B3432,
        version,
        meta["llama.embedding_length"],
        meta["llama.feed_forward_length"],
        meta["llama.block_count"],
        meta["llama.attention.head_count"],
        meta["llama.attention.head_count_kv"],
        len(w["token_embd.weight"]),
        meta["llama.context_length"],
        tied,
    )
    head += struct.pack("<i", group) if version == 2 else b""
    norms = [*layers(w, "attn_norm"), *layers(w, "ffn_norm"), w["output_norm.weight"]]
    matrices = [w["token_embd.weight"], *layers(w, *MATRICES)]
    matrices += [] if tied else [w["output.weight"] * 2]
    with path.open("wb") as f:
        f.write(head.ljust(256, b"\0"))
        f.writelines(x.tobytes() for x in norms)
        f.writelines(quantized(x, group) if version == 2 else x.tobytes() for x in matrices)
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_version_1(data: Path, stories: GGUF, tmp_path: Path, tied: bool) -> None:
    shutil.copy(data / "models" / "tok512.bin", tmp_path / "tokenizer.bin")
    path = write(tmp_path / "m.bin", stories, 1, tied=tied)
    source = open_source(path)
    assert ("output.weight" in source.tensors) == (not tied)
    for name, tensor in source.tensors.items():
        x = weights(stories)[name] * (2 if name == "output.weight" else 1)
        assert tensor.read().tobytes() == x.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(("group", "direct"), [(64, True), (32, True), (16, False), (128, True)])
def test_version_2_is_q8_0_where_groups_allow_it(
    data: Path, baby: GGUF, tmp_path: Path, group: int, direct: bool
) -> None:
    """Every code is kept, and scales lose what 16 bits cannot hold; else the weights become F32."""
    shutil.copy(data / "models" / "babyllama105" / "tok105.model", tmp_path)
    path = write(tmp_path / "m.bin", baby, 2, tied=False, group=group)
    model = Llama2c(path)
    source = open_source(path)
    for name, tensor in source.tensors.items():
        raw = model.tensors[name]
        if "norm" in name:
            assert tensor.ggml_type == 0
            continue
        codes = raw.data.view(np.int8).reshape(-1, group)
        exact = codes.astype(np.float32) * raw.scales[:, None]
        assert (
            np.abs(
                exact.reshape(raw.shape)
                - weights(baby)[name] * (2 if name == "output.weight" else 1)
            ).max()
            <= raw.scales.max() * 0.51
        )
        fmt = by_name("Q8_0" if direct else "F32")
        assert tensor.ggml_type == fmt.ggml_id
        if direct:
            blocks = tensor.read().view(fmt.dtype)
            assert blocks["qs"].tobytes() == codes.tobytes()
        got = fmt.dequantize_rows(tensor.read().reshape(raw.shape[0], -1)).reshape(-1, group)
        # 2**-11 of the value for the scale's 11 bits; 2**-25 a step of a subnormal one
        near = np.abs(exact) * 2.0**-11 + 127 * 2.0**-25 if direct else 0
        assert (np.abs(got - exact) <= near).all(), name
    convert(source, tmp_path / "m.gguf", Options())
    assert open_gguf(tmp_path / "m.gguf").metadata["general.file_type"] == (7 if direct else 0)
    with treadle.load(tmp_path / "m.gguf", threads=1) as model_:
        assert np.isfinite(model_.logits([1, 5, 9])).all()


def test_version_2_whose_rows_no_block_divides(data: Path, stories: GGUF, tmp_path: Path) -> None:
    """172 columns: groups of the flattened matrix reach across rows, blocks must not."""
    shutil.copy(data / "models" / "tok512.bin", tmp_path / "tokenizer.bin")
    source = open_source(write(tmp_path / "m.bin", stories, 2, tied=True, group=32))
    kinds = {name: tensor.ggml_type for name, tensor in source.tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == 0
    assert kinds["blk.0.ffn_up.weight"] == 8
    down = source.tensors["blk.0.ffn_down.weight"].read().view("<f4").reshape(64, 172)
    assert np.abs(down - weights(stories)["blk.0.ffn_down.weight"]).max() < 0.01


def test_a_scale_beyond_16_bits(data: Path, baby: GGUF, tmp_path: Path) -> None:
    shutil.copy(data / "models" / "babyllama105" / "tok105.model", tmp_path)
    path = write(tmp_path / "m.bin", baby, 2, tied=False)
    tensor = Llama2c(path).tensors["blk.1.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    raw[tensor.offset + tensor.n_bytes - 4 : tensor.offset + tensor.n_bytes] = struct.pack(
        "<f", 1e6
    )
    path.write_bytes(raw)
    with pytest.raises(FileError, match=r"blk\.1\.ffn_up\.weight: a scale that is not"):
        convert(open_source(path), tmp_path / "m.gguf", Options())
    assert not (tmp_path / "m.gguf").exists()


# -- what is wrong ------------------------------------------------------------------------------


def test_files_that_are_not_whole(data: Path, stories: GGUF, tmp_path: Path) -> None:
    shutil.copy(data / "models" / "tok512.bin", tmp_path / "tokenizer.bin")
    old = (data / "models" / "stories260K.bin").read_bytes()
    new = write(tmp_path / "new.bin", stories, 2, tied=True, group=32).read_bytes()
    path = tmp_path / "x.bin"
    for raw, match in (
        (old[:-4], "starts with"),  # no magic: only its length tells it from any other file
        (old + b"1234", "starts with"),
        (new[:-4], "cut short"),
        (new + b"1", "1 bytes after the last tensor"),
        (new[:100], "cut short"),
        (new[:4] + b"\x03" + new[5:], "version 3"),
        (new[:8] + struct.pack("<i", -1) + new[12:], "n_embd: is -1"),
        (new[:20] + struct.pack("<i", 7) + new[24:], "n_head: 7 heads"),
        (new[:37] + struct.pack("<i", 0) + new[41:], "group_size: is 0"),
        (new[:37] + struct.pack("<i", 48) + new[41:], "whole groups|cut short"),
    ):
        path.write_bytes(raw)
        with pytest.raises(TreadleError, match=match) as e:
            open_source(path)
        assert "x.bin" in str(e.value)
    path.write_bytes(old)
    assert find_kind(path).name.startswith("a version 0 llama2.c")


def test_tokenizers_that_do_not_fit(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    shutil.copy(data / "models" / "stories260K.bin", path)
    with pytest.raises(FileError, match=r"no tokenizer in its folder .*tok512\.bin.*--tokenizer"):
        open_source(path)
    raw = (data / "models" / "tok512.bin").read_bytes()
    given = tmp_path / "t"
    for bad in (raw[:-1], raw + b"1", raw[:8] + b"\xff\xff\xff\xff" + raw[12:], b"", b"\x0a\x05ab"):
        given.write_bytes(bad)
        with pytest.raises(FileError, match=r"/t(:| at byte)"):
            open_llama2c(path, given)
    keys = read_tokenizer(data / "models" / "babyllama105" / "tok105.model", 100)
    with pytest.raises(FileError, match=r"tok105\.model: has 105 tokens"):
        fit_vocabulary(keys, 100, Path("tok105.model"))  # too many; too few are filled up
    source = open_llama2c(path, data / "models" / "babyllama105" / "tok105.model")
    assert source.metadata["tokenizer.ggml.tokens"][-1] == "[PAD511]"
    given.write_bytes(raw)
    assert open_source(path, given).metadata["tokenizer.ggml.tokens"][0] == b"<unk>"
    assert find_tokenizer(data / "models" / "stories260K.bin", 512).name == "tok512.model"
    with pytest.raises(FileError, match="has its own tokenizer"):
        open_source(data / "models" / "stories260K.gguf", given)


def test_a_version_of_tomorrow(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 9).ljust(300, b"\0"))
    with pytest.raises(UnsupportedError, match="version 9"):
        Llama2c(path)


@pytest.mark.parametrize("n_bytes", [0, 3, 24, 100])
def test_a_tokenizer_that_was_cut_short(data: Path, tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes((data / "models" / "tok512.bin").read_bytes()[:n_bytes])
    with pytest.raises(FileError, match=r"is not a tokenizer of 512 tokens: (cut short at|piece)"):
        read_tokenizer(path, 512)
