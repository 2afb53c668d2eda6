"""The cache of compiled kernels: what its keys depend on, what it refuses, and that it never
gives half an object.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import treadle
from treadle.errors import CacheError
from treadle.isa import ROWS
from treadle.jit import cache
from treadle.jit.kernel import isa_key
from treadle.system.macos import MacOS
from treadle.system.posix import Posix
from treadle.system.windows import Windows

NAME = "embed_F32_k32"
KEY = "portable"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernels"
    monkeypatch.setenv("TREADLE_CACHE", str(path))
    return path


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*.o")
    return file


# -- where
# ------------------------------------------------------------------------------------------


def test_the_folder_is_the_users_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache.folder() == folder
    monkeypatch.delenv("TREADLE_CACHE")
    monkeypatch.setattr(cache, "SYSTEM", Posix())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "treadle"
    monkeypatch.setattr(cache, "SYSTEM", MacOS())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "Library" / "Caches" / "treadle"
    monkeypatch.setattr(cache, "SYSTEM", Windows())
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache.folder() == tmp_path / "local" / "treadle"


def test_a_new_folder_is_closed_to_others(folder: Path) -> None:
    cache.write(NAME, KEY, b"code")
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheError, match="is writable by other users"):
        cache.read(NAME, KEY)
    with pytest.raises(CacheError, match="is writable by other users"):
        cache.write(NAME, KEY, b"code")
    assert list(folder.iterdir()) == []


def test_another_users_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(CacheError, match="belongs to another user"):
        cache.read(NAME, KEY)


def test_a_file_in_the_folders_place_is_refused(folder: Path) -> None:
    folder.write_text("not a folder")
    with pytest.raises(CacheError, match="kernel cache"):
        cache.read(NAME, KEY)


# -- keys
# -------------------------------------------------------------------------------------------


def test_a_key_is_a_spec_on_an_isa(folder: Path) -> None:
    rows = list(ROWS.values())
    avx2 = ROWS["avx2"]
    keys = [isa_key(row) for row in rows]
    keys += [isa_key(replace(avx2, features="+avx")), isa_key(replace(avx2, cpu="haswell"))]
    keys += [isa_key(replace(avx2, triple="x86_64-pc-windows-msvc"))]
    paths = {cache.path_of(name, key) for name in ("a", "b") for key in keys}
    assert len(paths) == 2 * len(keys)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package that the hash looks at instead."""
    real = Path(cache.__file__).resolve().parent.parent
    copy = tmp_path / "treadle"
    shutil.copytree(real, copy, ignore=shutil.ignore_patterns("__pycache__", "data"))
    monkeypatch.setattr(cache, "ROOT", copy)
    monkeypatch.setattr(cache, "_hashed", {})
    monkeypatch.setattr(treadle, "IMPORTED_NS", time.time_ns() + (1 << 60))
    cache.source_hash.cache_clear()
    yield copy
    cache.source_hash.cache_clear()


def fresh_hash() -> str:
    cache.source_hash.cache_clear()
    return cache.source_hash()


@pytest.mark.parametrize("part", cache.SOURCES)
def test_the_key_changes_with_every_source_of_a_kernel(part: str, sources: Path) -> None:
    before = fresh_hash()
    file = next((sources / part.replace(".", "/")).glob("*.py"))
    os.utime(file, (1, 1))
    assert fresh_hash() == before, "a time is no content"
    file.write_text(file.read_text() + "\n# changed\n")
    after = fresh_hash()
    assert after != before
    (sources / part.replace(".", "/") / "one_more.py").write_text("")
    assert fresh_hash() != after


def test_the_key_does_not_change_with_other_sources(sources: Path) -> None:
    before = fresh_hash()
    (sources / "errors.py").write_text("")
    assert fresh_hash() == before


def test_the_key_changes_with_llvmlite(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite

    before = fresh_hash()
    monkeypatch.setattr(llvmlite, "__version__", "999")
    assert fresh_hash() != before


# -- contents
# ---------------------------------------------------------------------------------------


def test_what_is_written_is_read(folder: Path) -> None:
    assert cache.read(NAME, KEY) is None
    cache.write(NAME, KEY, b"\x7fELF code")
    assert cache.read(NAME, KEY) == b"\x7fELF code"
    assert cache.read(NAME, "another ISA") is None
    assert only_file(folder).read_bytes().startswith(b"\x7fELF code"), "objdump reads it as it is"
    cache.write(NAME, KEY, b"newer")
    assert cache.read(NAME, KEY) == b"newer"


def test_a_damaged_object_is_a_miss(folder: Path) -> None:
    """Half an object can crash LLVM's linker, and a changed one is code that nobody compiled."""
    cache.write(NAME, KEY, bytes(range(256)) * 8)
    file = only_file(folder)
    whole = file.read_bytes()
    for n in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:n])
        assert cache.read(NAME, KEY) is None, n
    for at in range(0, len(whole), 37):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert cache.read(NAME, KEY) is None, at
    file.write_bytes(whole + b"more")
    assert cache.read(NAME, KEY) is None
    file.write_bytes(whole)
    assert cache.read(NAME, KEY) is not None


def test_a_failed_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        cache.write(NAME, KEY, b"code")
    assert list(folder.iterdir()) == []


def test_writers_at_once_never_show_a_part(folder: Path) -> None:
    versions = [bytes([i]) * 300_000 for i in range(4)]
    cache.write(NAME, KEY, versions[0])
    seen: list[bytes | None] = []
    errors: list[BaseException] = []

    def work(code: bytes) -> None:
        try:
            for _ in range(10):
                cache.write(NAME, KEY, code)
                seen.append(cache.read(NAME, KEY))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(v,)) for v in versions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert set(seen) <= set(versions)
    assert only_file(folder).suffix == ".o", "a temporary file was left"
