"""Removal: what goes, what stays, and what is freed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from tests.catalog.hub_cache import A, B, put
from treadle.catalog.names import fitting
from treadle.catalog.removal import RemovalPlan, check_unused, plan_removal, remove
from treadle.catalog.stored import find_stored
from treadle.errors import FileError
from treadle.files.stored_entries import note_use, records_folder


def plan_for(*names: str) -> RemovalPlan:
    models = find_stored()
    return plan_removal([model for name in names for model in fitting(name, models)], models)


def remove_named(*names: str) -> int:
    return remove(plan_for(*names), find_stored())


def names_left(root: Path) -> list[str]:
    """The files of snapshots that are left, each name once."""
    files = (path for path in root.rglob("*") if not path.is_dir())
    return sorted({path.name for path in files if "snapshots" in path.parts})


def check_cache(root: Path) -> None:
    """huggingface_hub's own tool finds nothing wrong."""
    assert scan_cache_dir(root).warnings == []


def test_a_repository_with_one_model_goes_whole(root: Path) -> None:
    put(root, "o/one-GGUF", {"one-Q8_0.gguf": b"12345", "mmproj-F16.gguf": b"eye"})
    put(root, "o/two-GGUF", {"two-Q8_0.gguf": b"1"})
    locks = root / ".locks" / "models--o--one-GGUF"
    locks.mkdir(parents=True)
    (locks / "x.lock").touch()
    (model,) = fitting("one", find_stored())
    note_use(model.path)
    assert plan_for("one").n_bytes == 8
    assert remove_named("one") == 8
    assert {path.name for path in root.iterdir()} == {".locks", "models--o--two-GGUF"}
    assert list((root / ".locks").iterdir()) == []
    assert list(records_folder().iterdir()) == []
    check_cache(root)


def test_the_projector_stays_with_another_type_of_the_model(root: Path) -> None:
    files = {"m-Q8_0.gguf": b"88888888", "m-Q4_0.gguf": b"4444", "mmproj-F16.gguf": b"eye"}
    put(root, "o/m-GGUF", files)
    assert remove_named("m:q8_0") == 8
    assert names_left(root) == ["m-Q4_0.gguf", "mmproj-F16.gguf"]
    assert remove_named("m") == 7
    assert names_left(root) == []
    assert not (root / "models--o--m-GGUF").exists()


def test_files_of_others_in_the_repository_stay(root: Path) -> None:
    put(root, "o/m-GGUF", {"m-Q8_0.gguf": b"8", "onnx/model.onnx": b"theirs"})
    remove_named("m")
    assert names_left(root) == ["model.onnx"]
    check_cache(root)


def test_a_blob_of_another_revision_stays(root: Path) -> None:
    old = put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"same", "r-Q4_0.gguf": b"old"}, A, main=False)
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"same", "r-Q4_0.gguf": b"newer"}, B)
    plan = plan_for("r:q8_0")
    assert (plan.n_bytes, len(plan.shared), plan.blobs) == (0, 1, ())
    assert remove_named("r:q8_0") == 0
    assert (old / "r-Q8_0.gguf").read_bytes() == b"same"
    assert remove_named("r:q4_0") == 5
    assert not (root / "models--o--r-GGUF" / "refs").exists()  # main's snapshot is gone
    check_cache(root)
    assert {model.tag for model in find_stored()} == {"Q8_0", "Q4_0"}
    assert remove_named("r:q8_0", "r:q4_0") == 7
    assert not (root / "models--o--r-GGUF").exists()


def test_two_files_of_one_blob_are_freed_together_only(root: Path) -> None:
    put(root, "o/m-GGUF", {"a-Q8_0.gguf": b"same", "b/c-Q8_0.gguf": b"same", "x.txt": b"same"})
    (model,) = find_stored()  # one blob is one model
    assert plan_removal([model], [model]).n_bytes == 0
    assert remove(plan_removal([model], [model]), [model]) == 0
    assert names_left(root) == ["c-Q8_0.gguf", "x.txt"]


def test_a_revision_that_comes_meanwhile_is_seen(root: Path) -> None:
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"same"}, A)
    plan = plan_for("r")
    assert plan.n_bytes == 4
    newer = put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"same"}, B, main=False)
    assert remove(plan, find_stored()) == 0
    assert (newer / "r-Q8_0.gguf").read_bytes() == b"same"


def test_shards_and_folders_go_whole(root: Path) -> None:
    put(root, "o/big-GGUF", {f"big-Q4_0-0000{i}-of-00002.gguf": b"x" * i for i in (1, 2)})
    files = {"config.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b"[]"}
    put(root, "o/folder", {**files, "folder-Q8_0.gguf": b"own"})
    assert remove_named("big") == 3
    (folder,) = [model for model in find_stored() if model.is_folder]
    assert remove(plan_removal([folder], find_stored()), find_stored()) == 11
    assert names_left(root) == ["folder-Q8_0.gguf"]  # a model of its own


def test_what_is_unfinished_goes_too(root: Path) -> None:
    put(root, "o/r-GGUF", {})
    (root / "models--o--r-GGUF" / "blobs" / "abc.1234.incomplete").write_bytes(b"1234")
    assert remove_named("r") == 4
    assert not (root / "models--o--r-GGUF").exists()


def test_a_model_of_treadle_models(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("a-Q8_0.gguf", "mmproj-F16.gguf", "notes.txt"):
        (mine / name).write_bytes(b"123")
    elsewhere = tmp_path / "b-Q8_0.gguf"
    elsewhere.write_bytes(b"12345")
    (mine / "b-Q8_0.gguf").symlink_to(elsewhere)
    monkeypatch.setenv("TREADLE_MODELS", str(mine))
    assert remove_named("a", "b") == 3  # a link frees nothing
    assert sorted(path.name for path in mine.iterdir()) == ["mmproj-F16.gguf", "notes.txt"]
    assert elsewhere.read_bytes() == b"12345"


MAPPING = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


@contextmanager
def mapped(path: Path) -> Iterator[int]:
    """Another process maps the file meanwhile."""
    command = [sys.executable, "-c", MAPPING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"mapped\n"
        try:
            yield process.pid
        finally:
            process.stdin.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell")
def test_what_a_process_has_mapped_is_refused(root: Path) -> None:
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"weights"})
    plan = plan_for("r")
    check_unused(plan)
    with mapped(plan.models[0].path) as pid, pytest.raises(FileError, match=f"process {pid} "):
        check_unused(plan)
    check_unused(plan)
