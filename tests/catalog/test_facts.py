"""Facts of models' headers, their records, and the memory that they need."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.catalog.hub_cache import put
from tests.conftest import WriteTiny
from treadle.api.options import default_context
from treadle.catalog import facts as module
from treadle.catalog.facts import PROGRAM_BYTES, facts_of, read_header
from treadle.catalog.records import (
    add_speeds,
    forget,
    last_used,
    speeds,
    usual_speed,
)
from treadle.catalog.stored import StoredModel, find_stored
from treadle.files.stored_entries import note_use, records_folder
from treadle.models.config import USUAL_CONTEXT


def stored(root: Path, path: Path, name: str = "tiny-Q8_0.gguf") -> StoredModel:
    put(root, "o/tiny-GGUF", {name: path})
    (model,) = find_stored()
    return model


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba2", "qwen3next"])
def test_memory_is_what_a_load_reserves(arch: str, root: Path, tiny: WriteTiny) -> None:
    """Pages, windows and states, of one text with the default context."""
    path = tiny(arch, "F32")
    model = stored(root, path)
    facts = facts_of(model)
    assert facts.problem == ""
    with treadle.load(path, threads=1, n_sequences=1) as loaded:
        assert facts.kv_bytes == loaded.engine.cache.n_bytes
        assert facts.n_context == loaded.config.n_ctx_train
        assert facts.architecture == loaded.config.arch.name
    assert facts.memory_bytes(model) == path.stat().st_size + facts.kv_bytes + PROGRAM_BYTES


def test_the_default_context_is_that_of_a_load() -> None:
    assert signature(default_context).parameters["usual"].default == USUAL_CONTEXT


def test_a_second_listing_opens_no_file(
    root: Path, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stored(root, tiny("llama", "Q8_0"))
    first = facts_of(model)

    def refuse(*args: Any) -> None:
        raise AssertionError("the header was read again")

    monkeypatch.setattr(module, "read_header", refuse)
    assert facts_of(model) == first
    monkeypatch.setattr(module, "VERSION", "another")
    with pytest.raises(AssertionError, match="read again"):
        facts_of(model)


def test_a_file_that_was_replaced_is_read_again(root: Path, tiny: WriteTiny) -> None:
    model = stored(root, tiny("llama", "Q8_0"))
    note_use(model.path)
    assert facts_of(model).architecture == "llama"
    blob = model.path.resolve()
    blob.unlink()
    blob.write_bytes(tiny("gemma3", "Q8_0").read_bytes())
    assert facts_of(model).architecture == "gemma3"
    assert last_used(model.path) is None


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\0" * 100, b"no model at all"])
def test_a_damaged_file_has_a_problem_and_raises_nothing(root: Path, content: bytes) -> None:
    put(root, "o/bad-GGUF", {"bad-Q8_0.gguf": content})
    (model,) = find_stored()
    assert facts_of(model).problem
    assert list(records_folder().glob("*")) == [] if records_folder().is_dir() else True


def test_a_damaged_folder_has_a_problem(root: Path) -> None:
    put(root, "o/bad", {"config.json": b"[", "model.safetensors": b"x"})
    (model,) = find_stored()
    assert facts_of(model).problem


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 1}', b"\xff\xff"])
def test_damaged_facts_are_read_anew(root: Path, tiny: WriteTiny, damage: bytes) -> None:
    model = stored(root, tiny("llama", "Q8_0"))
    first = facts_of(model)
    (kept,) = records_folder().glob("*.facts.json")
    kept.write_bytes(damage)
    assert facts_of(model) == first


def test_speeds_are_the_last_ones_of_this_machine(root: Path, tiny: WriteTiny) -> None:
    model = stored(root, tiny("llama", "Q8_0"))
    result = {"test": "tg128", "tok_s": 10.0, "depth": 0, "threads": 2, "sequences": 1}
    result["device"] = None
    assert usual_speed(model.path).text is None
    others = [
        {**result, "tok_s": 20.0},
        {**result, "test": "pp512", "tok_s": 300.0},
        {**result, "depth": 1000, "tok_s": 5.0},
        {**result, "sequences": 4, "tok_s": 40.0},
        {**result, "device": "a card", "tok_s": 900.0},
    ]
    add_speeds(model.path, [result, *others], "f16")
    usual = usual_speed(model.path)
    assert (usual.text, usual.prompt) == (20.0, 300.0)
    (kept,) = records_folder().glob("*.speeds.jsonl")
    text = kept.read_text()
    kept.write_text(text.replace('"machine": "', '"machine": "another ') + "{damaged\n[]\n7\n")
    assert len(list(speeds(model.path))) == 6
    assert usual_speed(model.path).text is None
    forget(model.path)
    assert list(speeds(model.path)) == []


def test_a_use_is_recorded_whatever_name_the_file_has(root: Path, tiny: WriteTiny) -> None:
    model = stored(root, tiny("llama", "Q8_0"))
    assert last_used(model.path) is None
    note_use(model.path.resolve())
    used = last_used(model.path)
    assert used is not None
    assert abs(used - records_folder().stat().st_mtime) < 60


def test_without_a_place_for_records_nothing_fails(
    root: Path, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TREADLE_CACHE", os.fspath(tmp_path / "file" / "below"))
    model = stored(root, tiny("llama", "Q8_0"))
    note_use(model.path)
    add_speeds(model.path, [], None)
    assert last_used(model.path) is None
    assert facts_of(model).architecture == "llama"
    assert usual_speed(model.path).text is None


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3asr", ("audio",)),
        ("voxtral", ("audio",)),  # a llama, whose file says nothing of sound
        ("gemma4u", ("image", "audio")),
        ("gemma3", ("image",)),
    ],
)
def test_what_a_model_reads(name: str, kinds: tuple[str, ...], data: Path) -> None:
    """With the projector beside it, or that of its folder."""
    folder = data / "media" / name
    assert read_header(folder / "text.gguf", folder / "mmproj.gguf").modalities == kinds
    assert read_header(folder).modalities == kinds
    assert read_header(folder / "text.gguf").modalities == ()
