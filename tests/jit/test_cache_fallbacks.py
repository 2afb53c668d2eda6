"""A kernel cache that cannot serve is told of and worked around; what it holds can be listed."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.kernels import rows
from treadle.errors import CacheError
from treadle.jit import cache, compile, compile_pool, kernel
from treadle.kernels.elementwise.elementwise import Norm

ISA = rows.ALL[-1]
KEY = kernel.isa_key(ISA)
SPEC, OTHER = Norm("f32", 40, 1, 1e-6), Norm("f32", 48, 1, 1e-6)


@pytest.fixture(autouse=True)
def folder(own_kernels: Path) -> Path:
    """An empty cache of the user's own; nothing is linked or warned of yet."""
    return own_kernels


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled: one entry each time."""
    seen: list[str] = []
    emit = compile.emit_object

    def count(ir_text: str, isa: Any) -> bytes:
        seen.append(isa.name)
        return emit(ir_text, isa)

    monkeypatch.setattr(compile, "emit_object", count)
    monkeypatch.setattr(compile_pool, "MIN_FORK_MS", float("inf"))  # here, not in processes
    return seen


def deny(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


# -- folders that cannot serve --------------------------------------------------------------------


def open_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 4242)


def not_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file")


def not_to_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", deny)


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TREADLE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)


REFUSED = [
    (open_to_others, "is writable by other users"),
    (of_another_user, "belongs to another user"),
    (not_a_folder, "File exists; set TREADLE_CACHE"),
    (not_to_be_made, "Read-only file system; set TREADLE_CACHE"),
    (no_home, "no home directory for the kernel cache: set TREADLE_CACHE"),
]


@pytest.mark.parametrize(("spoil", "why"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_kernels_run_from_memory(
    folder: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Any,
    why: str,
) -> None:
    spoil(folder, monkeypatch)
    before = sorted(folder.iterdir()) if folder.is_dir() else []
    assert all(kernel.load_kernels([SPEC, OTHER], ISA).values())
    assert len(compiled) == 2
    assert [record.name for record in caplog.records] == ["treadle"]  # said once, not twice
    assert why in caplog.text
    assert "treadle doctor" in caplog.text
    with pytest.raises(CacheError, match=why):
        cache.entries()
    state = cache.state()
    assert state.problem is not None
    assert why in state.problem
    assert (sorted(folder.iterdir()) if folder.is_dir() else []) == before


@pytest.mark.parametrize(("spoil", "why"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_but_not_where_compiling_is_forbidden(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, spoil: Any, why: str
) -> None:
    spoil(folder, monkeypatch)
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    with pytest.raises(CacheError, match=why):
        kernel.load_kernels([SPEC], ISA)
    assert compiled == []


def test_what_a_stranger_may_have_planted_is_not_run(folder: Path) -> None:
    cache.write(SPEC.name, KEY, b"a stranger's code")
    assert kernel.object_code(SPEC, ISA) == b"a stranger's code"
    folder.chmod(0o770)
    assert kernel.object_code(SPEC, ISA) != b"a stranger's code"


def test_a_folder_that_can_be_read_and_not_written_to(
    folder: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel.object_code(SPEC, ISA)
    monkeypatch.setattr(tempfile, "mkstemp", deny)
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    kernel.object_code(SPEC, ISA)
    assert (len(compiled), caplog.text) == (1, "")  # an image with its kernels made runs as it is
    for _ in range(2):
        kernel.object_code(OTHER, ISA)
    assert len(compiled) == 3
    assert len(caplog.records) == 1
    assert "Read-only file system" in caplog.text
    assert cache.state().problem == f"kernel cache {folder} is not writable"


def test_something_else_in_the_files_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.path_of(SPEC.name, KEY).mkdir()
    assert kernel.object_code(SPEC, ISA)
    assert "cannot write to the kernel cache" in caplog.text
    assert [path.name[0] for path in folder.iterdir()] != ["."]


# -- what it holds --------------------------------------------------------------------------------


def test_listing(folder: Path) -> None:
    code = kernel.object_code(SPEC, ISA)
    (path,) = folder.glob("*.o")
    assert cache.entries() == [(SPEC.name, len(code), ISA.name)]
    (record,) = cache.records()
    told = record.about["fields"]
    assert told == {field.name: getattr(SPEC, field.name) for field in fields(SPEC)}
    assert (told["act"], told["k"], told["eps"]) == ("f32", 40, float(np.float32(1e-6)))
    state = cache.state()
    assert (state.n_kernels, state.n_bytes, state.n_stale) == (1, path.stat().st_size, 0)
    assert state.problem is None


def test_what_is_of_no_use_is_not_listed_and_counted_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.object_code(SPEC, ISA)
    kernel.object_code(OTHER, ISA)
    damaged = cache.path_of(OTHER.name, KEY)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert [entry.name for entry in cache.entries()] == [SPEC.name]
    state = cache.state()
    assert (state.n_kernels, state.n_stale) == (1, 1)
    assert state.stale_bytes == damaged.stat().st_size
    monkeypatch.setattr(cache, "source_hash", lambda: "another version")
    assert cache.read(SPEC.name, KEY) is None
    assert cache.entries() == []
    assert cache.state().n_stale == 2


def test_another_kind_of_machine_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache.source_hash()
    cache.source_hash.cache_clear()
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("platform.machine", lambda: "pdp11")
            assert cache.source_hash() != here
    finally:
        cache.source_hash.cache_clear()
    assert cache.source_hash() == here
