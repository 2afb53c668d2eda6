"""Models in the hub's cache and in a folder, found by the names of their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.catalog.hub_cache import A, B, put
from treadle.catalog.stored import find_stored, label_of, stored_at
from treadle.hub.cache import cache_folder
from treadle.hub.resume import notes_folder

INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})


@pytest.mark.parametrize(
    ("path", "repo", "expected"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Qwen/Qwen3-0.6B-GGUF", ("qwen3-0.6b", "Q8_0")),
        ("Q4_K_M/Big-Q4_K_M-00001-of-00003.gguf", "o/Big-GGUF", ("big", "Q4_K_M")),
        ("model.gguf", "o/Nice-7B-GGUF", ("nice-7b", "")),
        ("ggml-model-fp16.gguf", "o/Nice-7B_gguf", ("nice-7b", "F16")),
        ("UD-Q2_K_XL/X.5-UD-Q2_K_XL.gguf", "o/r", ("x.5", "Q2_K_XL")),
        ("a b.gguf", "", ("a-b", "")),
    ],
)
def test_a_model_is_named_for_its_file_or_its_repository(
    path: str, repo: str, expected: tuple[str, str]
) -> None:
    assert label_of(path, repo) == expected


def test_every_kind_is_one_entry(root: Path) -> None:
    put(
        root,
        "o/one-GGUF",
        {
            "one-Q8_0.gguf": b"12345",
            "mmproj-F16.gguf": b"eye",
            "ggml-vocab-one.gguf": b"words",
            "README.md": b"",
        },
    )
    shards = {f"big-Q4_0-0000{i}-of-00002.gguf": b"x" * i for i in (1, 2)}
    put(root, "o/big-GGUF", {**shards, "imatrix.gguf": b"i", "big-imatrix.dat": b""})
    folder = {
        "config.json": b"{}",
        "model.safetensors.index.json": INDEX.encode(),
        "model-1.safetensors": b"one",
        "model-2.safetensors": b"two!",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"d",
    }
    put(root, "o/folder", folder)
    put(root, "o/tokenizer-only", {"config.json": b"{}", "tokenizer.json": b"{}"})
    (root / "datasets--o--d" / "snapshots" / A).mkdir(parents=True)
    found = {model.label: model for model in find_stored()}
    assert sorted(found) == ["big", "folder", "one"]
    one, big, whole = found["one"], found["big"], found["folder"]
    assert (one.n_bytes, one.tag, one.hub_name) == (5, "Q8_0", "hf:o/one-GGUF/one-Q8_0.gguf")
    assert one.projector is not None
    assert one.projector.read_bytes() == b"eye"
    assert (len(big.files), big.n_bytes, big.is_whole) == (2, 3, True)
    assert big.path.name == "big-Q4_0-00001-of-00002.gguf"
    total = sum(map(len, folder.values()))
    assert (whole.is_folder, whole.is_whole, whole.n_bytes) == (True, True, total)
    assert whole.hub_name == "hf:o/folder"


def test_what_lacks_shards_is_not_whole(root: Path) -> None:
    put(root, "o/big", {"big-00002-of-00003.gguf": b"x"})
    put(root, "o/folder", {"config.json": b"{}", "model.safetensors.index.json": INDEX.encode()})
    put(root, "o/huge", {"huge-00001-of-99999.gguf": b"x"})  # no real model
    big, folder = find_stored()
    assert (big.n_missing, big.path.name) == (2, "big-00001-of-00003.gguf")
    assert (folder.n_missing, folder.is_whole) == (2, False)


def test_a_file_that_two_revisions_share_is_one_entry(root: Path) -> None:
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"same", "r-Q4_0.gguf": b"old"}, A, main=False)
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"same", "r-Q4_0.gguf": b"new"}, B)
    assert [(m.tag, m.commit, m.current) for m in find_stored()] == [
        ("Q4_0", B, True),
        ("Q4_0", A, False),
        ("Q8_0", B, True),
    ]
    assert find_stored()[1].hub_name == f"hf:o/r-GGUF@{A}/r-Q4_0.gguf"


def test_a_snapshot_that_main_is_not_at_is_named_with_its_commit(root: Path) -> None:
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"x"}, main=False)
    (model,) = find_stored()
    assert model.current  # the only one, so short names need no commit
    assert model.hub_name == f"hf:o/r-GGUF@{A}/r-Q8_0.gguf"


def test_a_file_that_only_an_older_revision_has_needs_no_commit(root: Path) -> None:
    """The repository had a new commit between two downloads."""
    put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"first"}, A, main=False)
    put(root, "o/r-GGUF", {"r-Q4_0.gguf": b"second"}, B)
    four, eight = find_stored()
    assert (four.current, four.is_main, four.hub_name) == (True, True, "hf:o/r-GGUF/r-Q4_0.gguf")
    assert (eight.current, eight.is_main) == (True, False)
    assert eight.hub_name == f"hf:o/r-GGUF@{A}/r-Q8_0.gguf"


def test_a_link_to_a_blob_that_is_gone_is_no_model(root: Path) -> None:
    folder = put(root, "o/r-GGUF", {"r-Q8_0.gguf": b"x"})
    (folder / "r-Q8_0.gguf").resolve().unlink()
    assert find_stored() == []


def test_what_other_programs_have_left_unfinished_is_shown(root: Path) -> None:
    put(root, "o/r-GGUF", {})
    (root / "models--o--r-GGUF" / "blobs" / "abc.1234.incomplete").write_bytes(b"1234")
    (model,) = find_stored()
    assert (model.label, model.n_bytes, model.is_whole) == ("r", 4, False)


def note(root: Path, *paths: str, ref: str = "hf:o/r-GGUF:Q8_0") -> None:
    """An unfinished download of the first of these files, as ``hub.resume`` notes it."""
    part = root / "models--o--r-GGUF" / "blobs" / "abc.incomplete"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(b"1234")
    notes_folder().mkdir(parents=True)
    about = {"ref": ref, "repo": "o/r-GGUF", "paths": paths, "n_bytes": 9, "part": str(part)}
    (notes_folder() / "abc.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("path", "label"),
    [("some-Q8_0.gguf", "some"), ("mmproj-F16.gguf", "r"), ("config.json", "r")],
)
def test_an_unfinished_download_is_one_entry(root: Path, path: str, label: str) -> None:
    """A projector's has the name of the model's repository."""
    note(root, path)
    (model,) = find_stored()
    assert (model.label, model.is_whole, model.n_bytes) == (label, False, 4)
    assert model.unfinished is not None
    assert (model.unfinished.ref, model.unfinished.n_bytes) == ("hf:o/r-GGUF:Q8_0", 9)


@pytest.mark.parametrize(
    "here", [{"a-00001-of-00002.gguf": b"1"}, {"config.json": b"{}", "model.safetensors": b"1"}]
)
def test_an_unfinished_file_belongs_to_the_files_that_are_there(
    root: Path, here: dict[str, bytes]
) -> None:
    put(root, "o/r-GGUF", here)
    note(root, *here, "another file")
    (model,) = find_stored()
    assert model.unfinished is not None
    assert (len(model.files), model.is_whole) == (len(here), False)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"part": 7}'])
def test_a_damaged_note_is_no_download(root: Path, damage: str) -> None:
    note(root, "some-Q8_0.gguf")
    (notes_folder() / "abc.json").write_text(damage)
    (model,) = find_stored()
    assert (model.label, model.unfinished and model.unfinished.ref) == ("r", "hf:o/r-GGUF")


def test_a_projector_belongs_to_the_model_that_it_is_named_for(root: Path) -> None:
    files = {"cat-Q8_0.gguf": b"1", "dog-Q8_0.gguf": b"2", "mmproj-dog-F16.gguf": b"3"}
    put(root, "o/animals", files)
    cat, dog = find_stored()
    assert cat.projector is None
    assert dog.projector is not None
    assert dog.projector.name == "mmproj-dog-F16.gguf"


def test_no_cache_is_no_error(root: Path) -> None:
    assert find_stored() == []


def test_the_folder_of_treadle_models(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "mine" / "owner" / "repo"
    below.mkdir(parents=True)
    (below / "a-Q8_0.gguf").write_bytes(b"x")
    monkeypatch.setenv("TREADLE_MODELS", str(tmp_path / "mine"))
    (model,) = find_stored()
    assert (model.label, model.repo, model.inside) == ("a", "", "owner/repo/a-Q8_0.gguf")
    assert stored_at(below / "a-Q8_0.gguf").label == "a"
    monkeypatch.setenv("TREADLE_MODELS", str(tmp_path / "absent"))
    assert find_stored() == []


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "/x/home"},
        {"HF_HUB_CACHE": "/x/cache", "HF_HOME": "/x/home"},
        {"XDG_CACHE_HOME": "/x/xdg"},
        {"HF_HUB_CACHE": "~/own"},
        {"HUGGINGFACE_HUB_CACHE": "/x/old"},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=True
    )
    assert str(cache_folder()) == ran.stdout.strip()
