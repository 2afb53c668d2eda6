"""What ``load`` takes for a model: a path, a name on the hub, a short name."""

from __future__ import annotations

from pathlib import Path

import pytest

import treadle
from tests.catalog.hub_cache import put
from tests.conftest import WriteTiny
from treadle.api.options import find_path
from treadle.errors import FileError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: WriteTiny) -> Path:
    """The snapshot of a repository with one model, in an otherwise empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files: dict[str, bytes | Path] = {
        "Small-2-0.1B-F32.gguf": tiny(),
        "Large-2-1B-Q8_0.gguf": b"large",
    }
    return put(tmp_path / "hub", "o/r", files)


@pytest.mark.parametrize(
    "name", ["small-2-0.1b", "Small", "o/small:f32", "hf:o/r/Small-2-0.1B-F32.gguf"]
)
def test_names_of_one_model(name: str, store: Path) -> None:
    with treadle.load(name) as model:
        assert model.path == store / "Small-2-0.1B-F32.gguf"
        assert model.generate("a", max_tokens=1).finish() is not None


def test_a_path_comes_first(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small").write_bytes(b"")
    assert find_path("small") == Path("small")
    assert find_path(Path("large")) == Path("large")  # a Path is no name
    assert find_path("large") == store / "Large-2-1B-Q8_0.gguf"


def test_names_of_none_and_of_several(store: Path) -> None:
    with pytest.raises(FileError, match="similar names: small-2-0"):
        treadle.load("smoll-2-0.1b")
    with pytest.raises(FileError, match="fits 2 downloaded models: large-2-1b, small-2"):
        treadle.load("o/2")
    with pytest.raises(FileError, match=r"quite-another\.gguf"):
        treadle.load("quite-another.gguf")


def test_a_draft_is_named_as_a_model_is(store: Path) -> None:
    with treadle.load("small", draft="small-2") as model:
        assert model.speculate
