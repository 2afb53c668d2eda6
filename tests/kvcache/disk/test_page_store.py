"""Pages in files: a later process has the same bits without reading, whatever the folder holds."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from tests.conftest import WriteTiny
from tests.kvcache.test_cache import check_pages
from treadle.cli import main
from treadle.errors import FileError, UnsupportedError
from treadle.jit import cache
from treadle.kernels.run_state import PAGE
from treadle.kvcache.disk import folder as kvfolder
from treadle.kvcache.disk.folder import NAME, Folder
from treadle.kvcache.disk.page_store import AT_ONCE, PageStore

WINDOWED = {"arch": "gemma3", "window": 16, "n_layer": 6, "tied": 0}
CONTEXT = 1200


def text(n: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, n)]


def load(path: Path, folder: Path, **settings: Any) -> treadle.Model:
    settings = {"threads": 1, "context": CONTEXT, "deterministic": True} | settings
    return treadle.load(path, cache_dir=folder, **settings)


def test_a_model_that_keeps_a_state_has_none(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both the library and the command line say which file it is, why, and what to do."""
    path = data / "arch" / "qwen35.gguf"
    said = f"{path}: its layers keep a recurrent state, which page files cannot store: "
    said += "leave out cache_dir"
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        load(path, tmp_path / "pages", context=64)
    assert main(["run", str(path), "a", "--cache-dir", str(tmp_path / "pages")]) == 1
    assert f"treadle: error: {said} (--cache-dir)" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "pages").exists()


def store_of(model: treadle.Model) -> PageStore:
    store = model.engine.cache.store
    assert isinstance(store, PageStore)
    return store


def pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.page"))


def read(model: treadle.Model, ids: list[int]) -> np.ndarray:
    """The logits behind ``ids``; the cache is whole afterwards."""
    session = model.session()
    logits = session.prefill(ids)
    check_pages(model.engine.cache, [session.seq])
    session.close()
    check_pages(model.engine.cache, [])
    return logits


def found(model: treadle.Model, ids: list[int]) -> tuple[int, int, str]:
    """Tokens of a prompt from memory and from files, and why it left the cache."""
    made = model.generate(ids, max_tokens=1, temperature=0)
    made.finish()
    use = made.timings.cache
    assert use.left_at == use.memory + use.files == made.timings.n_cached
    assert use.token == ids[use.left_at]
    return use.memory, use.files, use.why


@pytest.mark.slow
@pytest.mark.parametrize("n", [PAGE, PAGE + 1, 5 * PAGE + 3, (2 * AT_ONCE + 1) * PAGE + 7])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("sizes", [{}, WINDOWED], ids=["llama", "window"])
def test_the_same_bits_after_a_restart(
    sizes: dict[str, Any], kv: str, n: int, tiny: WriteTiny, tmp_path: Path
) -> None:
    path = tiny(**sizes)
    ids = text(n)
    longer = text(n) + text(40, seed=2)
    with load(path, tmp_path / "none", kv=kv) as model:
        expected = [read(model, each) for each in (ids, longer)]
    with load(path, tmp_path / "pages", kv=kv) as model:
        read(model, ids)
    with load(path, tmp_path / "pages", kv=kv) as model:
        assert np.array_equal(read(model, ids), expected[0])
        model.engine.cache.forget()
        assert found(model, ids) == (0, (n - 1) // PAGE * PAGE, "end")
        assert np.array_equal(read(model, longer), expected[1])


def test_files_are_private_and_say_nothing(tiny: WriteTiny, tmp_path: Path) -> None:
    secret = "correct horse battery staple, forty times over: " * 4
    with load(tiny(**WINDOWED), tmp_path / "pages") as model:
        ids = model.tokenize(secret)
        read(model, ids)
    files = list((tmp_path / "pages").iterdir())
    assert files
    assert stat.S_IMODE((tmp_path / "pages").stat().st_mode) == 0o700
    tokens = np.array(ids[:4], "<i4").tobytes()
    for file in files:
        assert NAME.fullmatch(file.name), file
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        data = file.read_bytes()
        assert b"correct" not in data
        assert tokens not in data


# -- files that are not what was written ---------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tiny: WriteTiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a text of 4 pages, in a model with a window."""
    folder = tmp_path_factory.mktemp("kept") / "pages"
    with load(tiny(**WINDOWED), folder) as model:
        read(model, text(4 * PAGE + 5))
    return {file.name: file.read_bytes() for file in pages(folder)}


@pytest.fixture(scope="module")
def reader(tiny: WriteTiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[treadle.Model]:
    with load(tiny(**WINDOWED), tmp_path_factory.mktemp("reader") / "pages") as model:
        yield model


@pytest.fixture(scope="module")
def expected(tiny: WriteTiny, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    with load(tiny(**WINDOWED), tmp_path_factory.mktemp("expected") / "pages") as model:
        return read(model, text(4 * PAGE + 5))


def put_back(model: treadle.Model, files: dict[str, bytes]) -> None:
    """Nothing in memory; in the folder these files alone."""
    store = store_of(model)
    model.engine.cache.forget()
    store.folder.flush()
    store.folder._retry_at = 0.0  # another test may have had the folder refuse a moment ago
    for file in pages(store.folder.path):
        file.unlink()
    for name, data in files.items():
        (store.folder.path / name).write_bytes(data)


def test_sound_files_are_read(
    kept: dict[str, bytes], reader: treadle.Model, expected: np.ndarray
) -> None:
    """Else the tests below would say nothing."""
    put_back(reader, kept)
    assert found(reader, text(4 * PAGE + 5)) == (0, 4 * PAGE, "end")
    put_back(reader, kept)
    assert np.array_equal(read(reader, text(4 * PAGE + 5)), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_a_miss(
    kept: dict[str, bytes], reader: treadle.Model, expected: np.ndarray, data: st.DataObject
) -> None:
    """Of each file's length, header, padding and bytes of keys and values."""
    name = data.draw(st.sampled_from(sorted(kept)))
    raw = bytearray(kept[name])
    n_head = 8 + int.from_bytes(raw[:8], "little")
    lo, hi = data.draw(
        st.sampled_from([(0, 8), (8, n_head), (n_head - 9, n_head), (n_head, len(raw))])
    )
    at = data.draw(st.integers(lo, hi - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "longer", "swap"]))
    if how == "flip":
        raw[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del raw[at:]
    elif how == "longer":
        raw[at:at] = b"\0"
    else:  # another page's bytes under this name
        other = data.draw(st.sampled_from(sorted(set(kept) - {name})))
        raw[:] = kept[other]
    put_back(reader, kept | {name: bytes(raw)})
    damaged = store_of(reader).n_damaged
    assert np.array_equal(read(reader, text(4 * PAGE + 5)), expected)
    if how == "flip":
        assert store_of(reader).n_damaged - damaged <= 1
    store_of(reader).folder.flush()
    for file in pages(store_of(reader).folder.path):
        if len(file.read_bytes()) == len(kept[file.name]) and file.name != name:
            assert file.read_bytes() == kept[file.name]


def test_a_damaged_file_is_told_of_and_replaced(
    kept: dict[str, bytes], reader: treadle.Model
) -> None:
    raw = {name: data[:-1] + bytes([data[-1] ^ 1]) for name, data in kept.items()}
    put_back(reader, raw)
    assert found(reader, text(4 * PAGE + 5)) == (0, 0, "damaged")
    for _ in kept:  # each time one more that is damaged is looked at
        reader.engine.cache.forget()
        read(reader, text(4 * PAGE + 5))
        store_of(reader).folder.flush()
    reader.engine.cache.forget()
    assert found(reader, text(4 * PAGE + 5)) == (0, 4 * PAGE, "end")


@pytest.mark.parametrize("what", ["folder", "link", "pipe", "none", "unreadable"])
def test_what_is_no_file(
    what: str, kept: dict[str, bytes], reader: treadle.Model, expected: np.ndarray, tmp_path: Path
) -> None:
    put_back(reader, {})
    folder = store_of(reader).folder.path
    outside = tmp_path / "outside"
    for name, data in kept.items():
        path = folder / name
        if what == "folder":
            path.mkdir()
        elif what == "link":
            outside.write_bytes(data)
            path.symlink_to(outside)
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "unreadable":
            path.write_bytes(data)
            path.chmod(0)
    try:
        if what != "unreadable" or os.getuid():
            assert store_of(reader).fetch(reader.engine.cache.sequence(), text(200)) == 0
        assert np.array_equal(read(reader, text(4 * PAGE + 5)), expected)
        store_of(reader).folder.flush()
    finally:
        for path in folder.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert not outside.exists() or outside.read_bytes() in kept.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [{"kv": "q8_0"}, {"deterministic": False}, {"isa": "portable"}],
    ids=lambda other: next(iter(other)),
)
def test_what_was_written_otherwise_is_a_miss(
    other: dict[str, Any], tiny: WriteTiny, tmp_path: Path
) -> None:
    with load(tiny(), tmp_path) as model:
        read(model, text(100))
    assert len(pages(tmp_path)) == 3
    with load(tiny(), tmp_path, **other) as model:
        store_of(model).folder.flush()
        assert found(model, text(100)) == (0, 0, "other model")
    assert len(pages(tmp_path)) == 6
    with load(tiny(), tmp_path, **other) as model:
        assert found(model, text(100)) == (0, 3 * PAGE, "end")


def test_a_model_with_other_weights_is_a_miss(tiny: WriteTiny, tmp_path: Path) -> None:
    with load(tiny(), tmp_path) as model:
        read(model, text(100))
    with load(tiny(fmt="Q8_0"), tmp_path) as model:
        store_of(model).folder.flush()
        assert found(model, text(100)) == (0, 0, "other model")


# -- why a prompt left the cache -----------------------------------------------------------------


def test_reasons(tiny: WriteTiny, tmp_path: Path) -> None:
    with load(tiny(), tmp_path, context=256) as model:
        assert found(model, text(20)) == (0, 0, "end")
        assert found(model, text(100, seed=2)) == (0, 0, "new")
        assert found(model, text(100)) == (0, 0, "new")
        assert found(model, [*text(100), 5]) == (100, 0, "end")  # of its own text, to the token
        assert found(model, text(90) + text(60, seed=3)) == (90, 0, "new")
        store_of(model).folder.flush()
        model.engine.cache.forget()
        assert found(model, text(64) + text(60, seed=4)) == (0, 64, "new")
    with treadle.load(tiny(), threads=1, context=256) as model:
        assert found(model, text(250)) == (0, 0, "new")
        assert found(model, text(250, seed=7)) == (0, 0, "new")
        assert found(model, text(250)) == (PAGE, 0, "evicted")


def test_more_in_files_than_in_room(tiny: WriteTiny, tmp_path: Path) -> None:
    with load(tiny(), tmp_path, context=256) as model:
        read(model, text(250))
    with load(tiny(), tmp_path, context=256, n_sequences=2) as model:
        held = model.session()
        held.feed(text(250, seed=8))
        seq = model.engine.cache.sequence()
        other = model.engine.cache.sequence()
        model.engine.cache.reserve(other, 200)
        assert store_of(model).fetch(seq, text(250)) == 0
        assert store_of(model).miss_reason == "room"
        check_pages(model.engine.cache, [held.seq, seq, other])
        model.engine.cache.reserve(other, 0)
        assert store_of(model).fetch(seq, text(250)) == 7 * PAGE
        check_pages(model.engine.cache, [held.seq, seq, other])


# -- the folder ----------------------------------------------------------------------------------


def name(i: int) -> str:
    return f"{i:040x}-{0:024x}.kv.page"


def head(data: bytes) -> bytes:
    return b""


def put(folder: Folder, i: int, size: int = 100, at: int | None = None) -> bool:
    return folder.enqueue(name(i), bytes(size), head, i if at is None else at, wait_s=10)


def ages(folder: Path) -> list[int]:
    return sorted(int(file.name[:40], 16) for file in pages(folder))


def test_the_least_recently_used_go_and_the_bound_holds(tmp_path: Path) -> None:
    (tmp_path / "README").write_bytes(bytes(5000))  # somebody else's: not counted, not removed
    folder = Folder(tmp_path, 1000)
    for i in range(1, 11):
        assert put(folder, i)
    folder.touch([(name(1), 50), (name(99), 51)])  # one that is gone is no matter
    assert folder.flush()
    assert ages(tmp_path) == list(range(1, 11))
    for i in range(11, 40):
        put(folder, i)
        assert folder.flush()
        assert sum(file.stat().st_size for file in pages(tmp_path)) <= 1000
    assert ages(tmp_path)[0] == 1
    assert ages(tmp_path)[1:] == list(range(40 - len(ages(tmp_path)) + 1, 40))
    assert not put(folder, 41, size=1001)
    folder.close()
    assert not put(folder, 42)
    folder.close()
    folder = Folder(tmp_path, 300)  # a smaller bound holds from the next file on
    put(folder, 43)
    folder.close()
    assert sum(file.stat().st_size for file in pages(tmp_path)) <= 300
    assert (tmp_path / "README").stat().st_size == 5000


def test_others_files_count_too(tmp_path: Path) -> None:
    mine = Folder(tmp_path, 64 * 100)
    other = Folder(tmp_path, 64 * 100)
    for i in range(1, 200):
        put(mine, 2 * i)
        put(other, 2 * i + 1)
        mine.flush()
        other.flush()
        total = sum(file.stat().st_size for file in pages(tmp_path))
        assert total <= (64 + 4) * 100  # each looks again after a 64th of the bound
    mine.close()
    other.close()


def test_a_part_that_somebody_left_is_removed(tmp_path: Path) -> None:
    for made, age in ((".new-old", 10_000), (".new-young", 1), ("other", 10_000)):
        (tmp_path / made).write_bytes(b"")
        then = time.time() - age
        os.utime(tmp_path / made, (then, then))
    Folder(tmp_path, 100).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [".new-young", "other"]


def test_a_full_disk(
    tiny: WriteTiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The text is as ever, and it is said once; no part of a file stays; and when there is room
    again it is used.
    """
    whole = cache.write_whole
    full = [True]

    def write(path: Path, *pieces: bytes) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, *pieces)

    monkeypatch.setattr(kvfolder, "write_whole", write)
    with treadle.load(tiny(), threads=1, deterministic=True) as model:
        expected = read(model, text(200))
    with load(tiny(), tmp_path) as model:
        folder = store_of(model).folder
        assert np.array_equal(read(model, text(200)), expected)
        folder.flush()
        assert folder.problem == f"{tmp_path}: cannot be written: the disk is full"
        assert folder.n_left_out == 6
        full[0] = False
        assert not put(folder, 1)  # it is left alone for a while
        assert not list(tmp_path.iterdir())
        folder._retry_at = 0.0
    assert len(pages(tmp_path)) == 6  # closing has written what has no file
    assert folder.problem == ""
    told = [record.getMessage() for record in caplog.records if record.name == "treadle"]
    assert [line for line in told if "the disk is full" in line] == told
    assert len(told) == 1


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no RLIMIT_FSIZE")
def test_a_limit_of_the_system(tiny: WriteTiny, tmp_path: Path) -> None:
    """No file may have more than 9000 bytes: a write that fails half way."""
    program = f"""
import resource, treadle
from tests.kvcache.disk.test_page_store import load, read, text, store_of
from pathlib import Path
with load(Path({str(tiny())!r}), Path({str(tmp_path)!r})) as model:
    model.plan(512), model.plan(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    read(model, text(200))
    store_of(model).folder.flush()
    print(store_of(model).folder.problem)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    why = "the file is too large for the file system or ulimit -f"
    assert done.stdout == f"{tmp_path}: cannot be written: {why}\n", done
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes(tiny: WriteTiny, tmp_path: Path) -> None:
    """Each reads and writes; what one has read the other need not."""
    program = f"""
from tests.kvcache.disk.test_page_store import load, read, text
from pathlib import Path
with load(Path({str(tiny())!r}), Path({str(tmp_path)!r}), cache_bytes=1 << 20) as model:
    for turn in range(12):
        print(read(model, text(100 + 20 * turn, seed=turn % 3)).tobytes().hex())
        model.engine.cache.forget()
"""
    with treadle.load(tiny(), threads=1, deterministic=True) as model:
        expected = [
            read(model, text(100 + 20 * turn, seed=turn % 3)).tobytes().hex() for turn in range(12)
        ]
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for each in running:
        out, _ = each.communicate(timeout=300)
        assert each.returncode == 0
        assert out.split() == expected
    assert all(NAME.fullmatch(file.name) for file in tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_reads_and_does_not_write(tiny: WriteTiny, tmp_path: Path) -> None:
    """It has no thread that writes: it waited half a minute for it when its model was closed."""
    with load(tiny(), tmp_path / "pages") as model:
        read(model, text(100))
        assert store_of(model).folder.flush()
        script = f"""if True:
            import os, treadle
            from tests.kvcache.disk.test_page_store import load, read, text
            model = load({str(tiny())!r}, {str(tmp_path / "pages")!r})
            store = model.engine.cache.store
            store.folder.flush()
            if (child := os.fork()) == 0:
                assert len(read(model, text(100))) and store.n_damaged == 0
                read(model, text(100, seed=2))
                model.close()
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            model.close()
        """
        began = time.monotonic()
        command = [sys.executable, "-c", script]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.stdout, ran.stderr) == ("7\n", "")
        assert time.monotonic() - began < 25
    assert len(pages(tmp_path / "pages")) == 3


def test_what_the_disk_was_too_slow_for_is_written_at_the_end(
    tiny: WriteTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "enqueue", lambda *_, **__: False)
    model = load(tiny(), tmp_path)
    read(model, text(200))
    assert not pages(tmp_path)
    monkeypatch.undo()
    model.close()
    assert len(pages(tmp_path)) == 6
    model.close()


def test_a_folder_in_the_place_of_a_page(
    tiny: WriteTiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other pages are written, and one line says so; writing stopped for 30 s."""
    with load(tiny(), tmp_path) as model:
        read(model, text(200))
    names = [page.name for page in pages(tmp_path)]
    for page in pages(tmp_path):
        page.unlink()
    for name in names[:2]:
        (tmp_path / name).mkdir()
    with load(tiny(), tmp_path) as model:
        read(model, text(200))
        folder = store_of(model).folder
        assert folder.flush()
        assert (folder.n_written, folder.n_left_out, folder.problem) == (4, 2, "")
    assert [page.name for page in pages(tmp_path) if page.is_file()] == names[2:]
    assert not list(tmp_path.glob(".new-*"))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "treadle"]
    assert line.endswith("is a folder, so these pages are not stored")


def test_folders_that_are_refused(tiny: WriteTiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder, why in (
        ("file", r"file: is not a folder \(expected a folder for pages\)"),
        ("open", "other users can write to it"),
        ("file/x", "pages"),
    ):
        with pytest.raises(FileError, match=why):
            load(tiny(), tmp_path / folder)
    with pytest.raises(treadle.TreadleError, match="cache_bytes"):
        load(tiny(), tmp_path / "new", cache_bytes=0)


def test_names_are_made_of_digests_alone() -> None:
    for bad in ("../" + name(1), name(1) + "\n", name(1).upper().replace("0", "G"), ".new-x", "a"):
        assert not NAME.fullmatch(bad)
    assert NAME.fullmatch(name(1))
    assert re.fullmatch(r"[\w.-]+", name(1))
