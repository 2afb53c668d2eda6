"""Configurations from disk: those that ``load_config`` would make, and never another file's."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.changed_gguf import write_changed
from tests.conftest import WriteTiny
from treadle.errors import CacheError, FileError
from treadle.files import stored_entries
from treadle.files.gguf import GGUF, open_gguf
from treadle.formats import FORMATS
from treadle.jit.cache import checked_folder
from treadle.models import stored_config, unread_tensors
from treadle.models.archs import ARCHS
from treadle.models.config import Config
from treadle.models.ffns import FFNS
from treadle.models.graphs import GRAPHS
from treadle.models.load import load_config
from treadle.models.mixers import MIXERS
from treadle.models.stored_config import open_config

# Experts, latent heads, states, windows, shared keys, other names of tensors, an encoder.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3moe": {"n_expert": 8, "n_ff_exp": 64},
    "deepseek2": {},
    "mamba2": {},
    "gemma3": {},
    "gemma4": {},
    "bloom": {},
    "bert": {},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_PLANS", "1")
    entries = tmp_path / "entries"
    monkeypatch.setattr(stored_entries, "entries_folder", lambda: checked_folder(entries))
    return entries


def is_read(path: Path | GGUF) -> bool:
    """Whether the configuration of a file is made of its keys, not found."""
    gguf = path if isinstance(path, GGUF) else open_gguf(path)
    calls = []

    def load(gguf: GGUF, **given: Any) -> Config:
        calls.append(gguf)
        return load_config(gguf, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.models.load.load_config", load)
        open_config(gguf)
    return bool(calls)


@pytest.mark.parametrize("arch", SHAPES)
def test_it_is_the_same(tiny: WriteTiny, arch: str) -> None:
    path = tiny(arch, **SHAPES[arch])
    gguf = open_gguf(path)
    config = load_config(gguf)
    assert is_read(path)
    again = open_gguf(path)
    assert not is_read(again)
    found = open_config(open_gguf(path))
    assert found == config
    for field in fields(Config):
        assert type(getattr(found, field.name)) is type(getattr(config, field.name))
    assert list(again.tensors) == list(gguf.tensors)
    assert [each.offset for each in again.tensors.values()] == [
        each.offset for each in gguf.tensors.values()
    ]
    graph = GRAPHS[config.arch.graph]
    assert found.__dict__["pools"] == graph.pools(config)
    assert found.__dict__["digest"] == config.digest
    assert (found.main_output, found.unread) == (config.main_output, config.unread)


def test_what_a_graph_tells_is_not_inherited_by_other_configurations(tiny: WriteTiny) -> None:
    path = tiny("gemma3")
    open_config(open_gguf(path))
    found = open_config(open_gguf(path))
    half = replace(found, layers=found.layers[:1])
    assert not {"pools", "digest"} & half.__dict__.keys()
    assert half.pools != found.pools
    assert half.digest != found.digest


def test_a_file_that_was_written_again(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny().read_bytes())
    assert (is_read(path), is_read(path)) == (True, False)
    path.write_bytes(tiny().read_bytes())
    assert is_read(path)
    # of the same size and time
    before = path.stat()
    write_changed(tiny(), path, {"llama.context_length": 77})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_read(path)
    assert open_config(open_gguf(path)).n_ctx_train == 77
    os.utime(path)
    assert is_read(path)


def test_a_copy_is_another_file(tiny: WriteTiny, tmp_path: Path) -> None:
    assert is_read(tiny())
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny().read_bytes())
    assert is_read(copy)


def test_other_sources(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (is_read(tiny()), is_read(tiny())) == (True, False)
    monkeypatch.setattr(stored_config, "all_sources", lambda: ("others", "others"))
    assert is_read(tiny())


def test_rows_that_a_program_changed_are_in_no_key(
    tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny()
    assert (is_read(path), is_read(path)) == (True, False)
    with monkeypatch.context() as patch:
        patch.setitem(ARCHS, "llama", replace(ARCHS["llama"], activation="gelu"))
        assert open_config(open_gguf(path)).arch.activation == "gelu"
    assert not is_read(path)
    tables: tuple[Any, ...] = (FORMATS, ARCHS, GRAPHS, MIXERS, FFNS)
    for table in tables:
        with monkeypatch.context() as patch:
            patch.setitem(table, 4242, "a row")
            assert not stored_entries.are_stored()
        assert stored_entries.are_stored()
    assert GRAPHS["encoder"]  # imported on first use
    assert FORMATS[12]
    assert stored_entries.are_stored()
    last = next(reversed(ARCHS))  # back in its place afterwards: messages list names in order
    removed: tuple[tuple[Any, Any], ...] = ((FORMATS, 12), (GRAPHS, "encoder"), (ARCHS, last))
    for table, name in removed:
        with monkeypatch.context() as patch:
            patch.delitem(table, name)
            assert not stored_entries.are_stored()
        assert stored_entries.are_stored()  # it is back


def test_tensors_in_memory(tiny: WriteTiny) -> None:
    assert is_read(tiny())
    gguf = open_gguf(tiny())
    norm = gguf.tensors["output_norm.weight"]
    data = norm.dequantize().view(np.uint8)
    gguf.tensors["output_norm.weight"] = replace(norm, file=data, offset=0)
    assert is_read(gguf)
    path = tiny(others={"strange.weight": (8,)})
    assert is_read(path)
    fewer = open_gguf(path)
    del fewer.tensors["strange.weight"]
    assert is_read(fewer)
    assert open_config(open_gguf(path)).ignored == ("strange.weight",)


def stale(data: bytes) -> bytes:
    """The entry of another key, sound in itself."""
    return packed("0" * 32, ([], "other"))


def packed(*given: Any) -> bytes:
    body = pickle.dumps(given)
    return stored_entries.MAGIC + stored_entries._digest([body]) + body


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: data[:-1],
    lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    lambda data: b"",
    lambda data: data[:20],
    lambda data: packed("neither two"),
    stale,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries(tiny: WriteTiny, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    config = open_config(open_gguf(tiny()))
    (file,) = folder.iterdir()
    assert file.suffix == stored_config.SUFFIX
    file.write_bytes(damage(file.read_bytes()))
    assert is_read(tiny())
    assert not is_read(tiny())  # written anew
    assert open_config(open_gguf(tiny())) == config


def test_switched_off(tiny: WriteTiny, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_PLANS", "0")
    assert is_read(tiny())
    assert not folder.exists()


def refused() -> Path:
    raise CacheError("refused")


def test_folders_that_take_nothing(
    tiny: WriteTiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")
    assert (is_read(tiny()), is_read(tiny())) == (True, True)
    monkeypatch.setattr(stored_entries, "entries_folder", refused)
    assert (is_read(tiny()), is_read(tiny())) == (True, True)


def test_unused_tensors_are_named_again(
    tiny: WriteTiny, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(others={"strange.weight": (8,)})
    monkeypatch.setattr(logging.getLogger("treadle"), "propagate", True)
    for expected in (True, False):
        caplog.clear()
        unread_tensors._warn.cache_clear()
        assert is_read(path) is expected
        assert "unused tensors: strange.weight" in caplog.text
    caplog.clear()
    assert not is_read(path)
    assert not caplog.text  # once per process


def test_errors_are_not_stored(tiny: WriteTiny, folder: Path, tmp_path: Path) -> None:
    path = write_changed(tiny(), tmp_path / "bad.gguf", {"llama.attention.head_count": 0})
    for _ in range(2):
        with pytest.raises(FileError, match="head_count"):
            open_config(open_gguf(path))
    assert [*folder.glob("*")] == []
