"""What a file that is called a model is, when it is none."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.convert.detect import find_kind
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.files.mistaken import describe_file
from treadle.files.safetensors import open_safetensors, read_json

LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4920734720\n"
)
HTML = b"<!DOCTYPE html>\n<html><head><title>\n Sign in </title></head><body></body></html>"


def zipped() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("x/data.pkl", b"")
    return raw.getvalue()


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (LFS, "a Git LFS pointer for 4.6 GiB, not the file itself: run 'git lfs pull'"),
        (LFS[:60], "a Git LFS pointer, not"),
        (HTML, "an HTML page ('Sign in'), such as a login or an error: download the file itself"),
        (b"\n  <html lang='en'><body>404", "an HTML page, such as"),
        (b'{"error": "Repository not found"}', "a JSON file that says 'Repository not found'"),
        (b'{"a": [1, 2', "a JSON file, not a model"),
        (b"Entry not found\n", "a text file ('Entry not found'), not a model"),
        ("Übersicht, très".encode()[:-1], "a text file ('Übersicht, tr"),
        (gzip.compress(b"GGUF", mtime=0), "compressed by gzip: unpack it with gunzip"),
        (bz2.compress(b"GGUF"), "compressed by bzip2"),
        (lzma.compress(b"GGUF"), "compressed by xz"),
        (zipped(), "a PyTorch checkpoint or another zip archive"),
        (pickle.dumps({}, 2), "a pickle"),
        (bytes(1024), "it begins with zeros, like an unfinished download"),
        (b"GGUF\3\0\0\0", "a GGUF file"),
        ((2).to_bytes(8, "little") + b"{}", "a safetensors file: name its folder"),
    ],
)
def test_what_it_is(head: bytes, what: str) -> None:
    assert (describe_file(head) or "").startswith(what)


@pytest.mark.parametrize("head", [b"", b"GG", b"hello", b"\x93NUMPY\1\0\xff\xfe", bytes(8)])
def test_nothing_is_said_of_what_nobody_knows(head: bytes) -> None:
    assert describe_file(head) is None


@given(st.binary(max_size=200))
def test_any_bytes(head: bytes) -> None:
    what = describe_file(head)
    assert what is None or what.isprintable()


def test_every_reader_says_it(tmp_path: Path) -> None:
    for name in ("m.gguf", "model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(LFS)
    for read in (open_gguf, find_kind):
        with pytest.raises(FileError, match=r"m\.gguf.*: a Git LFS pointer for 4\.6"):
            read(tmp_path / "m.gguf")
    with pytest.raises(FileError, match="not a safetensors file: a Git LFS pointer"):
        open_safetensors(tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="is not JSON: a Git LFS pointer"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"})[:-1])
    with pytest.raises(FileError, match="is not JSON: Expecting"):
        read_json(tmp_path / "config.json")
