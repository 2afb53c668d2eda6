"""The head of a bundle, and the model in it as every reader of files sees it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import WriteTiny
from treadle.cli import main
from treadle.errors import FileError, UnsupportedError
from treadle.files.bundled import COMMENT, FIRST_LINE, KEY, START, BundleHeader, read_bundled
from treadle.files.gguf import open_gguf
from treadle.files.mapping import map_file

SCRIPT = b'echo "$0"\nexit 1\n'


@pytest.fixture
def plain(tiny: WriteTiny) -> Path:
    return tiny("llama", "Q8_0")


@pytest.fixture
def bundle(plain: Path, tmp_path: Path) -> Path:
    """A head, a model, and what stands for a program."""
    model = plain.read_bytes()
    path = tmp_path / "talk"
    head = BundleHeader("story.gguf", START, len(model), "run", ("-n", "5")).head(SCRIPT)
    path.write_bytes(head + model + bytes(-len(model) % START) + b"PK")
    return path


def test_what_was_written_is_read(bundle: Path, plain: Path) -> None:
    with bundle.open("rb") as file:
        found = read_bundled(file, bundle)
        assert file.tell() == 0
    assert found == BundleHeader("story.gguf", START, plain.stat().st_size, "run", ("-n", "5"))
    assert bundle.read_bytes().split(b"\0", 1)[0].endswith(b"\n" + SCRIPT)


def test_the_model_in_it_is_the_model(bundle: Path, plain: Path) -> None:
    with open_gguf(bundle) as inside, open_gguf(plain) as alone:
        assert dict(inside.metadata).keys() == dict(alone.metadata).keys()
        assert list(inside.tensors) == list(alone.tensors)
        for name, tensor in inside.tensors.items():
            assert np.array_equal(tensor.data, alone.tensors[name].data)
        assert inside.n_bytes == alone.n_bytes


def test_it_is_mapped_where_it_lies(bundle: Path, plain: Path) -> None:
    mapped = map_file(bundle, "a model")
    assert (mapped.start, len(mapped)) == (START, plain.stat().st_size)
    address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{address:x}-")]
    assert int(line.split()[2], 16) == START
    mapped.close()


def test_a_missing_page_is_told_by_its_byte_of_the_file(bundle: Path) -> None:
    with open_gguf(bundle) as gguf:
        (mapped,) = gguf._maps.files
        from treadle.files import mapping

        mapping._words[3 * (mapped._row or 0) + 2] = mapped._begin + 10
        with pytest.raises(FileError) as caught:
            mapped.check()
        assert caught.value.offset == START + 10


def test_a_quantized_bundle_is_its_model(bundle: Path, plain: Path, tmp_path: Path) -> None:
    """What the kernel copies from file to file is counted from the file's first byte."""
    for source, made in ((bundle, "a.gguf"), (plain, "b.gguf")):
        assert main(["quantize", str(source), str(tmp_path / made), "Q8_0"]) == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("text", [b"", b"#", b"#!", b"#!/bin/sh\n", b"#!/bin/sh\n# {}\nexit\n"])
def test_other_files_are_none(text: bytes, tmp_path: Path) -> None:
    assert read_bundled(io.BytesIO(text), tmp_path / "x") is None


def record(**changes: object) -> bytes:
    said: dict[str, object] = {KEY: 1, "name": "m.gguf", "start": START, "n_bytes": 9}
    said |= {"command": "run", "args": [], **changes}
    return FIRST_LINE + COMMENT + json.dumps(said).encode() + b"\n"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"start": START + 1}, "damaged"),
        ({"start": -START}, "damaged"),
        ({"start": "0"}, "damaged"),
        ({"n_bytes": 0}, "damaged"),
        ({"n_bytes": 1 << 60}, "cut short"),
        ({"args": 5}, "damaged"),
        ({"name": None}, "damaged"),
        ({"more": 1}, "damaged"),
    ],
)
def test_a_damaged_head(changes: dict[str, object], error: str, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(record(**changes).ljust(2 * START, b"\0"))
    with pytest.raises(FileError, match=error):
        map_file(path, "a model")


def test_a_later_version(tmp_path: Path) -> None:
    path = tmp_path / "late"
    path.write_bytes(record(**{KEY: 2}).ljust(2 * START, b"\0"))
    with pytest.raises(UnsupportedError, match="later treadle"):
        map_file(path, "a model")


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="arguments"):
        BundleHeader("m", START, 1, "run", ("x" * START,)).head(b"")
