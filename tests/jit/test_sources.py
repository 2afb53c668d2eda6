"""Machine code is named by a hash of sources: of every module that makes a kernel's code."""

from __future__ import annotations

import ast
import os
import pkgutil
import time
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest

import treadle
from treadle.devices.cuda.launch_args import GPU_SOURCES
from treadle.errors import CacheError
from treadle.files import stored_entries
from treadle.jit import cache
from treadle.jit.cache import SOURCES, hash_of_sources
from treadle.kernels.spec import Spec

ROOT = Path(treadle.__file__).parent
# They say what went wrong, read files or ask the operating system: no kernel's code depends on what
# they do.
HARMLESS = {"errors", "files", "machine", "plan.plan", "system"}  # no code of kernels
PACKAGES = ("treadle.kernels.", "treadle.profiling.", "treadle.devices.")


def subclasses(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return found + [each for own in found for each in subclasses(own)]


@lru_cache
def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")[1:])
    for each in (path.with_suffix(".py"), path / "__init__.py"):
        if each.is_file():
            return each
    return None


@lru_cache
def imports(module: str) -> frozenset[str]:
    """Of treadle, at any time but for types alone."""
    path = file_of(module)
    assert path is not None
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    walk(other)
                continue
            if isinstance(child, ast.Import):
                found.update(name.name for name in child.names)
            if isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{name.name}" for name in child.names)
            walk(child)

    walk(ast.parse(path.read_text("utf-8")))
    return frozenset(name for name in found if name.startswith("treadle.") and file_of(name))


def reached(modules: set[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports(module)
    return found


def test_every_module_that_a_kernel_reaches_is_hashed() -> None:
    for package in ("kernels", "profiling", "devices"):
        for module in pkgutil.walk_packages([str(ROOT / package)], f"treadle.{package}."):
            import_module(module.name)
    owners = {kind.__module__ for kind in subclasses(Spec)}
    owners = {name for name in owners if name.startswith(PACKAGES)}
    assert len(owners) > 40
    on_gpu = {module for module in owners if module.startswith("treadle.devices.cuda.")}
    check(owners - on_gpu, SOURCES)
    check(on_gpu, (*SOURCES, *GPU_SOURCES))


def check(owners: set[str], hashed: tuple[str, ...]) -> None:
    missing = []
    for module in sorted(reached(owners)):
        name = module.removeprefix("treadle.")
        within = [name == each or name.startswith(each + ".") for each in (*hashed, *HARMLESS)]
        if not any(within):
            missing.append(module)
    assert missing == []


def test_a_source_in_a_folder_below_counts_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    monkeypatch.setattr(cache, "_hashed", {})
    monkeypatch.setattr(treadle, "IMPORTED_NS", time.time_ns() + (1 << 60))
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "a" / "one.py").write_text("1")
    hashes = {hash_of_sources("a")}
    (below / "two.py").write_text("2")
    hashes.add(hash_of_sources("a"))
    (below / "two.py").write_text("3")
    hashes.add(hash_of_sources("a"))
    (below / "two.py").rename(tmp_path / "a" / "two.py")
    hashes.add(hash_of_sources("a"))
    (tmp_path / "c.py").write_text("4")
    hashes.add(hash_of_sources("a", "c"))
    assert len(hashes) == 5


def test_a_hash_is_kept_with_the_states_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    monkeypatch.setattr(cache, "_hashed", {})
    monkeypatch.setattr(treadle, "IMPORTED_NS", time.time_ns() + (1 << 60))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "a.py"
    source.write_text("1")
    first = hash_of_sources("a")
    assert not list((tmp_path / "cache").glob("sources-*"))  # it may be written once more
    monkeypatch.setattr(cache, "SETTLED_NS", 0)
    assert hash_of_sources("a") == first
    (kept,) = (tmp_path / "cache").glob("sources-*")
    kept.write_text(kept.read_text().replace(first, "known"))
    assert hash_of_sources("a") == "known"
    # Another file of the same size and time of writing has another number.
    at = source.stat()
    other = tmp_path / "new"
    other.write_text("2")
    os.utime(other, ns=(at.st_atime_ns, at.st_mtime_ns))
    other.replace(source)
    second = hash_of_sources("a")
    assert second not in (first, "known")
    for damaged in ("", "words without sense", "\xff"):
        kept.write_text(damaged, encoding="latin-1")
        assert hash_of_sources("a") == second
    monkeypatch.setenv("TREADLE_CACHE", str(source))  # no folder
    assert hash_of_sources("a") == second


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only source, of a process that imported it just now; the cache is empty."""
    found = tmp_path / "a.py"
    found.write_text("1")
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    monkeypatch.setattr(cache, "_hashed", {})
    monkeypatch.setattr(cache, "CHECKED_S", 0.0)
    monkeypatch.setattr(cache, "source_hash", lambda: hash_of_sources("a"))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(treadle, "IMPORTED_NS", found.stat().st_ctime_ns)
    return found


def test_nothing_is_stored_once_sources_have_changed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``pip install -U`` while a server runs: what it makes may come of both."""
    kept = hash_of_sources("a")
    monkeypatch.setattr(cache, "source_hash", lambda: kept)  # it is computed once
    cache.write("first", "isa", b"code")
    stored_entries.write_entry("first", b"entry")
    source.write_text("22")
    with pytest.raises(CacheError, match=r"sources have changed .*: restart it"):
        cache.write("second", "isa", b"code")
    stored_entries.write_entry("second", b"entry")
    assert cache.read("first", "isa") == b"code"
    assert cache.read("second", "isa") is None
    assert bytes(stored_entries.read_entry("first") or b"") == b"entry"
    assert stored_entries.read_entry("second") is None
    source.unlink()
    with pytest.raises(CacheError, match=r"sources have changed"):
        cache.write("second", "isa", b"code")


def test_a_late_hash_is_not_that_of_newer_sources(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = hash_of_sources("a")  # of a process that begins after the update
    cache.write("kernel", "isa", b"new code")
    monkeypatch.setattr(treadle, "IMPORTED_NS", treadle.IMPORTED_NS - 1)
    assert hash_of_sources("a") == hash_of_sources("a") != new
    assert cache.read("kernel", "isa") is None
    with pytest.raises(CacheError, match=r"sources have changed"):
        cache.write("kernel", "isa", b"code")
    os.utime(source, ns=(0, 1 << 62))  # a time to come says nothing
    assert hash_of_sources("a") == new
