"""Files of before GGUF become the model that they were made of."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.meta_files import meta_name, shard_of
from tests.files.test_legacy import MAGIC, VERSIONS
from tests.tokenizer.vocabularies import read_pairs
from treadle.convert.detect import find_kind, open_source
from treadle.convert.recipe import Options
from treadle.convert.writer import convert
from treadle.errors import FileError
from treadle.files.gguf import GGUF, open_gguf
from treadle.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def stories(data: Path) -> GGUF:
    return open_gguf(data / "models" / "stories260K.gguf")


def write(
    path: Path, gguf: GGUF, kind: str, version: int, *, rank: int = 0, n: int = 1, **change: Any
) -> Path:
    """The model as llama.cpp's convert.py of that time wrote it; ``rank`` of ``n`` parts."""
    meta: Any = gguf.metadata
    tokens, scores, types = (
        list(meta[f"tokenizer.ggml.{key}"]) for key in ("tokens", "scores", "token_type")
    )
    out = bytearray(MAGIC[kind])
    if kind != "GGML":
        out += struct.pack("<I", version)
    out += struct.pack("<7I", len(tokens), 64, 4, 8, 5, 8, 0)
    for token, score, token_type in zip(tokens, scores, types, strict=True):
        text = token.replace("▁", " ").encode()
        if token_type in (2, 3):
            text = " ⁇ ".encode() if token_type == 2 else b""
        elif token_type == 6:
            text = bytes([int(token[3:5], 16)])
        out += struct.pack("<I", len(text)) + text
        if kind != "GGML":
            out += struct.pack("<f", score)
    for gguf_name, tensor in gguf.tensors.items():
        name = meta_name(gguf_name)
        x = shard_of(name, tensor.dequantize(), rank, n, llama3=False)
        x = change.get(gguf_name.replace(".", "_"), x)
        out += struct.pack("<3I", x.ndim, len(name), 0)
        out += struct.pack(f"<{x.ndim}I", *reversed(x.shape)) + name.encode()
        if kind == "GGJT":
            out += bytes(-len(out) % 32)
        out += x.astype("<f4").tobytes()
    path.write_bytes(out)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "version"), VERSIONS)
def test_every_version(stories: GGUF, tmp_path: Path, kind: str, version: int) -> None:
    path = write(tmp_path / "old.bin", stories, kind, version)
    source = open_source(path)
    assert "epsilon" in source.notes[0]
    settings = ("llama.attention.layer_norm_rms_epsilon=1e-5",)
    convert(source, tmp_path / "new.gguf", Options(settings=settings))
    made = open_gguf(tmp_path / "new.gguf")
    assert made.tensors.keys() == stories.tensors.keys()
    for name, tensor in made.tensors.items():
        assert tensor.data.tobytes() == stories.tensors[name].data.tobytes(), name
    keys = ("tokens", "token_type") if kind == "GGML" else ("tokens", "token_type", "scores")
    for key in keys:
        theirs, ours = (g.metadata[f"tokenizer.ggml.{key}"] for g in (stories, made))
        assert list(ours) == list(theirs), key  # type: ignore[arg-type]
    new = tmp_path / "new.gguf"
    with treadle.load(new, threads=1) as a, treadle.load(stories.path, threads=1) as b:
        ids = b.tokenize("Once upon a time, Lily said: é")
        assert np.array_equal(a.logits(ids), b.logits(ids))
        if kind != "GGML":  # whose scores are LLaMA's, not this vocabulary's
            assert a.tokenize("Once upon a time, Lily said: é") == ids


@pytest.mark.parametrize("n", [2, 4])
def test_parts(stories: GGUF, tmp_path: Path, n: int) -> None:
    for rank in range(n):
        name = "old.bin" if rank == 0 else f"old.bin.{rank}"
        write(tmp_path / name, stories, "GGMF", 1, rank=rank, n=n)
    source = open_source(tmp_path / "old.bin")
    for name, tensor in source.tensors.items():
        assert tensor.read().tobytes() == stories.tensors[name].data.tobytes(), name
    other: dict[str, Any] = {"output_norm_weight": np.ones(64, np.float32)}
    write(tmp_path / "old.bin.1", stories, "GGMF", 1, rank=1, n=n, **other)
    with pytest.raises(FileError, match=r"old\.bin\.1 .*norm\.weight: differs from old\.bin"):
        open_source(tmp_path / "old.bin").tensors["output_norm.weight"].read()
    write(tmp_path / "old.bin.1", stories, "GGML", 0, rank=1, n=n)
    with pytest.raises(FileError, match=r"old\.bin\.1: is a part of another model"):
        open_source(tmp_path / "old.bin")


def test_tensors_that_do_not_fit(stories: GGUF, tmp_path: Path) -> None:
    change: dict[str, Any] = {"blk_3_ffn_up_weight": np.ones((172, 32), np.float32)}
    path = write(tmp_path / "old.bin", stories, "GGJT", 3, **change)
    with pytest.raises(FileError, match=r"blk\.3\.ffn_up\.weight: .* \[172, 32\].*\[172, 64\]"):
        open_source(path)


def test_a_vocabulary_alone(data: Path, tmp_path: Path) -> None:
    """LLaMA's, in a GGJT file: llama.cpp's 47 pairs, and the pieces of its GGUF."""
    (path,) = (data / "legacy").glob("*.ggml.bin")
    convert(open_source(path), tmp_path / "v.gguf", Options())
    made = open_gguf(tmp_path / "v.gguf")
    theirs = open_gguf(data / "vocab/ggml-vocab-llama-spm.gguf")
    for key in ("tokens", "scores", "token_type"):
        a, b = (list(g.metadata[f"tokenizer.ggml.{key}"]) for g in (made, theirs))  # type: ignore[arg-type]
        assert a == b, key
    tokenizer = load_tokenizer(made)
    pairs = read_pairs(data, "llama-spm")
    assert len(pairs) == 47
    for text, ids in pairs:
        assert tokenizer.encode(text, bos=False) == ids, text


def test_the_scores_that_ggml_files_lack(data: Path, tmp_path: Path) -> None:
    """Of LLaMA's vocabulary, which is the one that such files have, they are known."""
    (path,) = (data / "legacy").glob("*.ggml.bin")
    raw = path.read_bytes()
    head = raw[8:36]
    at = 36
    pieces = bytearray()
    for _ in range(struct.unpack_from("<I", head)[0]):
        n = 4 + struct.unpack_from("<I", raw, at)[0]
        pieces += raw[at : at + n]
        at += n + 4
    (tmp_path / "old.bin").write_bytes(b"lmgg" + head + pieces)
    without = open_source(tmp_path / "old.bin")
    with_scores = open_source(path)
    assert np.array_equal(
        without.metadata["tokenizer.ggml.scores"], with_scores.metadata["tokenizer.ggml.scores"]
    )


@pytest.mark.parametrize("stem", ["llama_63bfaf672f38", "llama_8548445f8eac", "llama_c50db67dc520"])
def test_gguf_of_version_1_and_before(data: Path, tmp_path: Path, stem: str) -> None:
    path = data / "legacy" / f"{stem}.gguf"
    assert "version 1" in find_kind(path).name
    source = open_source(path)
    convert(source, tmp_path / "new.gguf", Options())
    made = open_gguf(tmp_path / "new.gguf")
    assert made.version == 3
    assert made.metadata.keys() == source.metadata.keys()
    assert made.metadata["general.architecture"] == "llama"
    theirs: Any = open_gguf(data / "vocab/ggml-vocab-llama-spm.gguf").metadata
    ours: Any = made.metadata["tokenizer.ggml.tokens"]
    assert list(ours) == list(theirs["tokenizer.ggml.tokens"])


def test_gguf_of_version_1_with_tensors(stories: GGUF, tmp_path: Path) -> None:
    """The stories, rewritten with the 32-bit lengths of version 1."""

    def string(text: bytes) -> bytes:
        return struct.pack("<I", len(text)) + text

    kvs = []
    infos = []
    blobs = bytearray()
    for key, value in stories.metadata.items():
        kind = int(stories.types[key])
        if isinstance(value, str):
            raw = struct.pack("<I", 8) + string(value.encode())
        elif isinstance(value, (int, float)):
            raw = struct.pack("<I", kind) + struct.pack("<f" if kind == 6 else "<I", value)
        else:
            raw = struct.pack("<3I", 9, kind, len(value))
            raw += (
                b"".join(string(value.raw(i)) for i in range(len(value)))
                if kind == 8
                else value.numpy().tobytes()
            )
        kvs.append(string(key.encode()) + raw)
    for name, tensor in stories.tensors.items():
        dims = struct.pack(f"<I{len(tensor.shape)}I", len(tensor.shape), *reversed(tensor.shape))
        infos.append(string(name.encode()) + dims + struct.pack("<IQ", 0, len(blobs)))
        blobs += tensor.data.tobytes() + bytes(-tensor.n_bytes % 32)
    raw = b"GGUF" + struct.pack("<3I", 1, len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    (tmp_path / "v1.gguf").write_bytes(raw + bytes(-len(raw) % 32) + blobs)
    convert(open_source(tmp_path / "v1.gguf"), tmp_path / "v3.gguf", Options())
    assert (tmp_path / "v3.gguf").read_bytes() == stories.path.read_bytes()
