"""The converter's engine: whole or not at all, resumable, sparing of memory, disk and cache."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.convert import writer
from treadle.convert.detect import open_source
from treadle.convert.page_cache import PAGE, record_page_cache
from treadle.convert.partial_file import PartFile
from treadle.convert.recipe import Options, nearest_format
from treadle.convert.sources.source import FILE_TYPES, Source, SourceTensor
from treadle.convert.writer import convert
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.files.mapping import resident_pages
from treadle.files.safetensors import SafeTensor
from treadle.files.tensor import TensorData
from treadle.formats import FORMATS, by_name
from treadle.system import SYSTEM

ROOT = Path(__file__).resolve().parent.parent.parent
F32 = by_name("F32")


def write_model(
    path: Path, n: int = 6, shape: tuple[int, int] = (64, 256), fmt: str = "F32"
) -> Path:
    rng = np.random.default_rng(5)
    writer = GGUFWriter(path)
    writer.add("general.architecture", "llama")
    writer.add("x", np.uint16(7))
    for i in range(n):
        w = by_name(fmt).quantize_rows(rng.standard_normal(shape).astype(np.float32))
        writer.add_tensor(f"blk.{i}.w.weight", shape, fmt, w)
        norm = rng.standard_normal(shape[1]).astype(np.float32)
        writer.add_tensor(f"blk.{i}.norm.weight", norm.shape, "F32", norm)
    writer.write()
    return path


def run(
    source: Path, target: Path, say: Callable[[str], None] = lambda text: None, **how: Any
) -> list[Path]:
    cache = record_page_cache(source)
    opened = open_source(source)
    try:
        return convert(opened, target, Options(**how), say=say, cache=cache)
    finally:
        opened.close()


def only(folder: Path, *names: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


# -- what is written -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_the_type_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As the format quantises the whole tensor, whatever the strips and threads."""
    monkeypatch.setattr(writer, "TASK_WEIGHTS", 256 * 5)
    fmt = by_name(name)
    run(write_model(tmp_path / "a.gguf"), tmp_path / "b.gguf", type=fmt)
    a = open_gguf(tmp_path / "a.gguf")
    b = open_gguf(tmp_path / "b.gguf")
    assert list(a.tensors) == list(b.tensors)
    for tensor in a.tensors.values():
        made = b.tensors[tensor.name]
        if "norm" in tensor.name:
            assert made.data.tobytes() == tensor.data.tobytes()
        else:
            wanted = fmt.quantize_rows(F32.dequantize_rows(tensor.data.reshape(64, -1)))
            assert (made.type_name, made.data.tobytes()) == (name, wanted.tobytes())
    assert b.metadata["general.file_type"] == FILE_TYPES[name]
    assert ("general.quantization_version" in b.metadata) == (fmt.block > 1)


def test_the_same_type_is_the_same_file(tmp_path: Path) -> None:
    run(write_model(tmp_path / "a.gguf"), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    only(tmp_path, "a.gguf", "b.gguf")


@pytest.mark.parametrize("alignment", [32, 64, mmap.PAGESIZE])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    run(write_model(tmp_path / "a.gguf", shape=(3, 7)), tmp_path / "b.gguf", alignment=alignment)
    a = open_gguf(tmp_path / "a.gguf")
    b = open_gguf(tmp_path / "b.gguf")
    assert b.alignment == alignment
    for name, tensor in b.tensors.items():
        assert tensor.offset % alignment == 0
        assert tensor.data.tobytes() == a.tensors[name].data.tobytes()
    run(tmp_path / "b.gguf", tmp_path / "c.gguf")
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_rows_that_blocks_do_not_divide(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", n=2, shape=(4, 40))
    with pytest.raises(
        UnsupportedError,
        match=r"blk\.0\.w\.weight: Q8_0 needs rows that are multiples of 32; these have 40",
    ) as e:
        run(source, tmp_path / "b.gguf", type=by_name("Q8_0"))
    assert "use F16, which fits every matrix" in str(e.value)
    only(tmp_path, "a.gguf")


def test_the_nearest_format() -> None:
    """Of all that fit, the one whose bits for a weight are nearest."""
    for wanted in FORMATS.values():
        near = nearest_format(wanted, [96, 64])
        assert near.block in (1, 32)
        if wanted.block in (1, 32) and wanted.quantize is not None:  # else it lends no bytes
            bits = [8 * f.dtype.itemsize / f.block for f in (near, wanted)]
            assert bits[0] == bits[1]


def test_metadata_that_the_user_sets(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    run(source, tmp_path / "b.gguf", settings=("x=9", "general.name=a=b", "eps=0.5", "n=3"))
    made = open_gguf(tmp_path / "b.gguf")
    assert made.metadata["x"] == 9
    assert made.types["x"] == open_gguf(source).types["x"]
    assert made.metadata["general.name"] == "a=b"
    assert (made.metadata["eps"], made.metadata["n"]) == (0.5, 3)
    for wrong in ("x", "=1", "x=70000"):
        with pytest.raises(TreadleError, match="--set"):
            run(source, tmp_path / "c.gguf", settings=(wrong,))
    only(tmp_path, "a.gguf", "b.gguf")


# -- the target -----------------------------------------------------------------------------


def test_an_existing_target_needs_force(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    target.write_bytes(b"mine")
    with pytest.raises(FileError, match=r"b\.gguf: exists already .*--force"):
        run(source, target)
    assert target.read_bytes() == b"mine"
    run(source, target, force=True)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(FileError, match="is a folder"):
        run(source, tmp_path, force=True)
    with pytest.raises(FileError, match=r"a\.gguf: is also the input"):
        run(source, source, force=True, alignment=4096)
    assert open_gguf(source).alignment == 32


def test_two_at_once(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    other = PartFile(target, 10)
    try:
        with pytest.raises(FileError, match=r"b\.gguf: another conversion is writing"):
            run(source, target)
    finally:
        other.close()
    run(source, target)


NONFINITE = [
    ("F32", np.inf),
    ("F32", np.nan),
    ("F16", -np.inf),
    ("BF16", np.nan),
    ("Q8_0", np.inf),
    ("Q4_1", np.nan),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the test's own weights
@pytest.mark.parametrize(("name", "value"), NONFINITE)
@pytest.mark.parametrize("to", [None, "F16"])
def test_weights_that_are_no_numbers(
    tmp_path: Path, name: str, value: float, to: str | None
) -> None:
    fmt = by_name(name)
    x = np.ones((4, 64), np.float32)
    x[2, 40] = value
    writer = GGUFWriter(tmp_path / "a.gguf")
    writer.add_tensor("good.weight", (4, 64), "F32", np.ones((4, 64), np.float32))
    writer.add_tensor("bad.weight", (4, 64), fmt, fmt.quantize_rows(x))
    writer.write()
    (tmp_path / "b.gguf").write_bytes(b"mine")
    wanted = by_name(to) if to else None
    with pytest.raises(FileError, match=r"a\.gguf: bad\.weight: .* row 2, column (40|32)") as e:
        run(tmp_path / "a.gguf", tmp_path / "b.gguf", force=True, type=wanted)
    assert "--allow-nonfinite" in str(e.value)
    assert (tmp_path / "b.gguf").read_bytes() == b"mine"
    only(tmp_path, "a.gguf", "b.gguf")
    run(tmp_path / "a.gguf", tmp_path / "b.gguf", force=True, type=wanted, allow_nonfinite=True)
    made = open_gguf(tmp_path / "b.gguf").tensors["bad.weight"]
    if to is None:
        assert made.data.tobytes() == fmt.quantize_rows(x).tobytes()


def test_weights_that_the_type_cannot_hold(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf")
    writer.add_tensor("big.weight", (1, 64), "F32", np.full((1, 64), 1e6, np.float32))
    writer.write()
    with pytest.raises(FileError, match=r"big\.weight: has weights too large for F16"):
        run(tmp_path / "a.gguf", tmp_path / "b.gguf", type=by_name("F16"))
    only(tmp_path, "a.gguf")


# -- killed, interrupted, full -----------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from treadle.convert import partial_file, writer
from treadle.convert.detect import open_source
from treadle.convert.recipe import Options
from treadle.formats import by_name
source, target, at, kind = sys.argv[1:]
partial_file.SYNC, writer.TASK_WEIGHTS, writer.COPY = 1 << 14, 1 << 12, 1 << 14
def progress(stage, done, total):
    if done >= int(at):
        os.kill(os.getpid(), signal.SIGKILL)
options = Options(by_name(kind) if kind else None)
writer.convert(open_source(Path(source)), Path(target), options, progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "Q8_0"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.77, 0.999])
def test_a_killed_run_is_continued(tmp_path: Path, kind: str, share: float) -> None:
    """kill -9 in the middle: nothing at the target; then the rest, and the same bytes."""
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    how: dict[str, Any] = {"type": by_name(kind) if kind else None}
    run(source, tmp_path / "whole.gguf", **how)
    n_bytes = sum(t.n_bytes for t in open_gguf(source).tensors.values())
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(source),
        str(target),
        str(int(share * n_bytes)),
        kind,
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    only(tmp_path, "a.gguf", "whole.gguf", ".b.gguf.part", ".b.gguf.part.journal")
    lines = (tmp_path / ".b.gguf.part.journal").read_text().splitlines()
    n_done = len(lines) - 1
    assert n_done < 12
    assert (n_done > 0) == (share > 0)
    opened = open_source(source)
    read: list[str] = []
    for name, tensor in list(opened.tensors.items()):
        opened.tensors[name] = spied(tensor, read)
    said: list[str] = []
    convert(opened, target, Options(**how), say=said.append)
    assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    only(tmp_path, "a.gguf", "whole.gguf", "b.gguf")
    assert len(read) == 12 - n_done  # what was complete is not read again
    assert said == ([f"resuming: {n_done} of 12 tensors are already written"] if n_done else [])


def spied(tensor: SourceTensor, read: list[str]) -> SourceTensor:
    def spy() -> Any:
        read.append(tensor.name)
        return tensor.read()

    return SourceTensor(
        tensor.name, tensor.shape, tensor.ggml_type, spy, tensor.origin, tensor.ranges
    )


def interrupted(source: Path, target: Path, error: BaseException, **how: Any) -> None:
    """A conversion into which ``error`` comes when half of it is done."""

    def progress(stage: str, done: int, total: int) -> None:
        if 2 * done > total:
            raise error

    opened = open_source(source)
    with pytest.raises(type(error)):
        convert(opened, target, Options(**how), progress=progress)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["source", "type", "asked", "part", "journal"])
def test_a_part_of_another_job_is_discarded(tmp_path: Path, change: str) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    interrupted(source, target, KeyboardInterrupt())
    only(tmp_path, "a.gguf", ".b.gguf.part", ".b.gguf.part.journal")
    how: dict[str, Any] = {}
    if change == "source":
        raw = bytearray(source.read_bytes())
        raw[-64 * 4] ^= 1
        source.write_bytes(raw)
        os.utime(source, ns=(1, 1))
    elif change == "type":
        how["type"] = by_name("F16")
    elif change == "asked":
        how["resume"] = False
    elif change == "part":
        os.truncate(tmp_path / ".b.gguf.part", 100)
    else:
        (tmp_path / ".b.gguf.part.journal").write_bytes(b"\xff\xfe 1\n2\n")
    said: list[str] = []
    run(source, target, said.append, **how)
    assert said == (
        ["discarded an unfinished .part file of a different conversion"]
        if change in ("source", "type", "part")
        else []
    )
    run(source, tmp_path / "c.gguf", **how)
    assert target.read_bytes() == (tmp_path / "c.gguf").read_bytes()
    only(tmp_path, "a.gguf", "b.gguf", "c.gguf")


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    interrupted(source, target, KeyboardInterrupt())
    said: list[str] = []
    run(source, target, said.append)
    assert said == ["resuming: 6 of 12 tensors are already written"]
    assert target.read_bytes() == source.read_bytes()


def test_a_half_written_line_of_the_journal_counts_for_nothing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    interrupted(source, target, KeyboardInterrupt())
    journal = tmp_path / ".b.gguf.part.journal"
    journal.write_bytes(journal.read_bytes() + b"1")  # of "10" or "11"
    run(source, target)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("fmt", [None, "F16"])
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fmt: str | None
) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    target.write_bytes(b"mine")
    how: dict[str, Any] = {"force": True, "type": by_name(fmt) if fmt else None}
    with monkeypatch.context() as patch:
        for name in ("pwrite", "copy_file_range"):
            patch.setattr(os, name, failing(getattr(os, name), number))
        with pytest.raises(
            FileError, match=r"b\.gguf: (the disk is full|the quota|cannot be)"
        ) as e:
            run(source, target, **how)
    assert "run the same command to resume" in str(e.value)
    assert target.read_bytes() == b"mine"
    run(source, target, **how)
    run(source, tmp_path / "c.gguf", **how)
    assert target.read_bytes() == (tmp_path / "c.gguf").read_bytes()
    only(tmp_path, "a.gguf", "b.gguf", "c.gguf")


def failing(function: Callable[..., int], number: int) -> Callable[..., int]:
    """``function`` until the fifth call."""
    left = [5]

    def fail(*args: Any) -> int:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(number, os.strerror(number))
        return function(*args)

    return fail


def test_a_disk_that_will_not_do_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "a.gguf")
    about = os.statvfs(tmp_path)
    small = os.statvfs_result([*about[:3], 1, 1, *about[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(FileError, match=r"b\.gguf: not enough disk space: \d+ KiB needed, "):
        run(source, tmp_path / "b.gguf")
    only(tmp_path, "a.gguf")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    with pytest.raises(FileError, match=r"nowhere/b\.gguf: cannot be written"):
        run(source, tmp_path / "nowhere" / "b.gguf")
    (tmp_path / ".b.gguf.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="cannot be written"):
        run(source, tmp_path / "b.gguf")
    assert not (tmp_path / "elsewhere").exists()


# -- sparing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kernel", "EXDEV", "halfway", "absent"])
def test_bytes_that_stay_the_same_are_copied_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And by us where it cannot, from the beginning or from the middle of a tensor."""
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    real = os.copy_file_range
    calls: list[int] = []

    def copy(src: int, dst: int, count: int, at: int, to: int) -> int:
        if how == "EXDEV" or (how == "halfway" and len(calls) % 2):
            calls.append(0)
            raise OSError(errno.EXDEV, "another device")
        n = real(src, dst, min(count, 5000) if how == "halfway" else count, at, to)
        calls.append(n)
        return n

    monkeypatch.setattr(os, "copy_file_range", copy)
    if how == "absent":
        monkeypatch.delattr(os, "copy_file_range")
    run(source, target)
    assert target.read_bytes() == source.read_bytes()
    if how == "kernel":
        assert sum(calls) == sum(t.n_bytes for t in open_gguf(source).tensors.values())
    else:
        assert bool(calls) == (how != "absent")


def test_zeros_are_holes(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf")
    x = np.zeros((512, 1024), np.float32)
    x[100:102] = 1
    writer.add_tensor("w.weight", x.shape, "F32", x)
    writer.write()
    for name, how in (("b", {"type": by_name("F16")}), ("c", {}), ("d", {"alignment": 4096})):
        run(tmp_path / "a.gguf", tmp_path / f"{name}.gguf", **how)
    made = open_gguf(tmp_path / "b.gguf").tensors["w.weight"]
    assert np.array_equal(made.data.view("<f2").reshape(x.shape), x)
    about = (tmp_path / "b.gguf").stat()
    assert about.st_size > 1 << 20
    if Path("/proc/mounts").exists():  # tmpfs, ext4, xfs and btrfs all have holes
        assert about.st_blocks * 512 <= 64 << 10
    with (tmp_path / "hole.gguf").open("wb") as f:  # the same file, its zeros being holes
        raw = (tmp_path / "a.gguf").read_bytes()
        at = raw.index(b"\0\0\x80\x3f")
        f.write(raw[:4096])
        f.seek(at // 4096 * 4096)
        f.write(raw[at // 4096 * 4096 : at + 3 * 4096])
        f.truncate(len(raw))
    assert (tmp_path / "hole.gguf").read_bytes() == raw
    run(tmp_path / "hole.gguf", tmp_path / "e.gguf")
    assert (tmp_path / "e.gguf").read_bytes() == raw
    assert (
        tmp_path / "e.gguf"
    ).stat().st_blocks * 512 <= 64 << 10  # and the kernel's copy has them


@pytest.mark.slow
def test_memory_holds_strips_of_a_mapped_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "TASK_WEIGHTS", 1 << 15)
    source = write_model(tmp_path / "a.gguf", n=1, shape=(4096, 4096))  # 64 MiB
    tracemalloc.start()
    try:
        run(source, tmp_path / "b.gguf", type=by_name("Q8_0"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        run(source, tmp_path / "c.gguf")
        copied = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    assert copied < 24 << 20


def test_memory_holds_one_made_tensor(tmp_path: Path) -> None:
    """Tensors that are made (joined, turned) are let go of before the next is asked for."""
    n_bytes = 8 << 20
    tensors = {
        f"{i}.weight": SourceTensor(
            f"{i}.weight", (1024, 2048), 0, lambda: np.ones(n_bytes, np.uint8), str(i)
        )
        for i in range(6)
    }
    (tmp_path / "src").write_bytes(b"x")
    source = Source(tmp_path / "src", {"general.architecture": "llama"}, tensors)
    tracemalloc.start()
    try:
        convert(source, tmp_path / "b.gguf", Options())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_bytes <= peak < 3 * n_bytes


def residents(path: Path) -> np.ndarray:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return resident_pages(mapped)


def make_cold(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if residents(path).any():
        pytest.skip("this file system keeps its files in memory")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page cache to speak to")
@pytest.mark.parametrize("fmt", [None, "Q8_0"])
def test_the_page_cache_is_left_as_it_was(tmp_path: Path, fmt: str | None) -> None:
    """The system too may take pages, for whatever else runs: then it is tried again."""
    for i in range(4):
        source = write_model(tmp_path / f"a{i}.gguf", n=4, shape=(1024, 512))  # 8 MiB
        make_cold(source)
        with source.open("rb", buffering=0) as f:  # somebody uses the middle of it
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            f.seek(3 << 20)
            f.read(1 << 20)
        before = residents(source)
        assert 200 < before.sum() < 400
        run(source, tmp_path / f"b{i}.gguf", type=by_name(fmt) if fmt else None)
        after = residents(source)
        if np.array_equal(after, before):
            break
    assert np.array_equal(after | before, after)  # what was used is still there
    assert np.array_equal(after, before)  # and what was not is gone
    assert len(before) > 2000


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page cache to speak to")
def test_pages_are_dropped_as_the_work_goes_on(tmp_path: Path) -> None:
    """Also those that a reader's mapping holds: a model larger than memory leaves others alone."""
    source = write_model(tmp_path / "a.gguf", n=2, shape=(1024, 512))
    make_cold(source)
    cache = record_page_cache(source)
    gguf = open_gguf(source)
    for tensor in gguf.tensors.values():
        before = int(tensor.data.sum())
        first = tensor.offset // PAGE + 1
        last = (tensor.offset + tensor.n_bytes) // PAGE
        assert residents(source)[first:last].all()
        cache.drop([tensor])
        assert not residents(source)[first:last].any()
        assert int(tensor.data.sum()) == before  # read again: the same
    cache.close()


def test_small_ranges_are_dropped_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are a MiB; those that touch as one, and the rest at the end."""
    path = tmp_path / "a"
    path.write_bytes(bytes(4 << 20))
    dropped: list[tuple[int, int]] = []

    def unmap(system: object, about: os.stat_result, begin: int, end: int) -> None:
        dropped.append((begin, end))

    def part(begin: int, n_bytes: int) -> TensorData:
        return SafeTensor("x", "U8", (n_bytes,), n_bytes, path, begin, np.zeros(0, np.uint8))

    monkeypatch.setattr(type(SYSTEM), "unmap_pages", unmap)
    cache = record_page_cache(path)
    third = 96 * PAGE  # of 1 MiB, and more
    for begin in (third, 0, 2 << 20):
        assert not dropped
        cache.drop([part(begin, third)])
    assert dropped == [(0, 2 * third), (2 << 20, (2 << 20) + third)]
    cache.drop([part(3 << 20, 1)])
    assert len(dropped) == 2
    cache.close()
    assert dropped[2:] == [(0, 4 << 20)]


def test_threads_do_not_change_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "a.gguf")
    made = []
    for workers in (1, 5):
        monkeypatch.setattr(writer, "MAX_WORKERS", workers)
        monkeypatch.setattr(writer, "TASK_WEIGHTS", 256 * 3)
        run(source, tmp_path / f"{workers}.gguf", type=by_name("Q4_0"))
        made.append((tmp_path / f"{workers}.gguf").read_bytes())
    assert made[0] == made[1]


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    opened = open_source(write_model(tmp_path / "a.gguf"))
    convert(opened, tmp_path / "b.gguf", Options(), progress=lambda *call: calls.append(call))
    total = sum(t.n_bytes for t in open_gguf(tmp_path / "b.gguf").tensors.values())
    assert {(stage, n) for stage, _, n in calls} == {(writer.STAGE, total)}
    done = [n for _, n, _ in calls]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)


# -- shards -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shards_become_one_file(data: Path, tmp_path: Path) -> None:
    folder = data / "models" / "stories260K_split"
    for source in (folder, folder / "stories260K-00001-of-00003.gguf", folder / "stories260K"):
        run(source, tmp_path / "one.gguf", force=True)
        wanted = (data / "models" / "stories260K.gguf").read_bytes()
        assert (tmp_path / "one.gguf").read_bytes() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 70_000, 300_000, 10_000_000])
def test_one_file_becomes_shards(data: Path, tmp_path: Path, most: int) -> None:
    source = data / "models" / "stories260K.gguf"
    written = run(source, tmp_path / "s.gguf", split_max=most)
    n = len(written)
    assert n == {1: 48, 10_000_000: 1}.get(most, n)
    if n > 1:
        assert [p.name for p in written] == [f"s-{i + 1:05d}-of-{n:05d}.gguf" for i in range(n)]
        for path in written:
            with open_gguf(written[0]) as whole:
                sizes = [t.n_bytes for t in whole.tensors.values() if t.path == path]
                assert len(sizes) == 1 or sum(sizes) <= most
    only(tmp_path, *(p.name for p in written))
    run(written[0], tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == source.read_bytes()


def test_tensors_larger_than_a_shard_are_named(data: Path, tmp_path: Path) -> None:
    source = data / "models" / "stories260K.gguf"
    said: list[str] = []
    run(source, tmp_path / "s.gguf", said.append, split_max=100_000)
    why = "token_embd.weight has 131072 bytes, more than a shard's 100000; a tensor cannot be split"
    assert said == [f"{why} (2 such tensors)"]
    said.clear()
    run(source, tmp_path / "t.gguf", said.append, split_max=131_072 + 12_000)  # and a header
    assert said == []


@pytest.mark.slow
def test_shards_are_continued_too(data: Path, tmp_path: Path) -> None:
    source = data / "models" / "stories260K.gguf"
    interrupted(source, tmp_path / "s.gguf", KeyboardInterrupt(), split_max=300_000)
    assert all(p.name.startswith(".") for p in tmp_path.iterdir())
    said: list[str] = []
    written = run(source, tmp_path / "s.gguf", said.append, split_max=300_000)
    assert said[0].startswith("resuming: ")
    run(written[0], tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == source.read_bytes()


def test_a_mapped_tensor_is_told_from_a_made_one(tmp_path: Path) -> None:
    gguf = open_gguf(write_model(tmp_path / "a.gguf"))
    tensor = gguf.tensors["blk.3.w.weight"]

    def lies(data: np.ndarray, *ranges: TensorData) -> TensorData | None:
        made = SourceTensor(tensor.name, tensor.shape, 0, lambda: data, "", ranges)
        return writer.mapped_range(made, data)

    assert lies(tensor.data, tensor) is tensor
    assert lies(tensor.data.reshape(64, -1).reshape(-1), tensor) is tensor
    assert lies(tensor.data.copy(), tensor) is None
    assert lies(tensor.data) is None
    assert lies(tensor.data, replace(tensor, offset=tensor.offset + 32)) is None
    assert lies(tensor.data[32:], tensor) is None
    assert lies(tensor.data[::-1], tensor) is None


def test_what_a_source_promises_is_checked(tmp_path: Path) -> None:
    (tmp_path / "src").write_bytes(b"x")
    tensor = SourceTensor("w.weight", (2, 4), 0, lambda: np.zeros(31, np.uint8), "o")
    source = Source(tmp_path / "src", {}, {"w.weight": tensor})
    with pytest.raises(FileError, match=r"w\.weight: 31 bytes of uint8"):
        convert(source, tmp_path / "b.gguf", Options())
    only(tmp_path, "src")


@pytest.mark.parametrize("letter", ["x", "\N{LATIN SMALL LETTER O WITH DIAERESIS}"])
@pytest.mark.parametrize("n_bytes", [222, 223, 224, 241, 242, 255, 256])
def test_long_names(tmp_path: Path, letter: str, n_bytes: int) -> None:
    """As long as a name may be; what is longer is refused before the work."""
    source = write_model(tmp_path / "a.gguf")
    n = len(letter.encode())
    target = tmp_path / (letter * (n_bytes // n) + "x" * (n_bytes % n))
    if n_bytes > 255:
        with pytest.raises(FileError, match="name too long"):
            run(source, target)
        only(tmp_path, "a.gguf")
        return
    interrupted(source, target, KeyboardInterrupt())
    said: list[str] = []
    run(source, target, said.append)
    assert said == ["resuming: 6 of 12 tensors are already written"]
    assert target.read_bytes() == source.read_bytes()
    only(tmp_path, "a.gguf", target.name)


def test_a_disk_without_room_for_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to resume: no part stays."""
    source = write_model(tmp_path / "a.gguf")
    opened = Path.open

    def full(path: Path, *args: Any, **more: Any) -> Any:
        if "x" in args:
            path.touch()
            raise OSError(errno.ENOSPC, "no space")
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(FileError, match="the disk is full"):
        run(source, tmp_path / "b.gguf")
    only(tmp_path, "a.gguf")


@pytest.mark.slow
def test_many_files_at_once(tmp_path: Path) -> None:
    """A folder of more shards than a process may have open files."""
    for i in range(70):
        writer = GGUFWriter(tmp_path / f"{i}.gguf")
        writer.add_tensor("x", (1 << 18,), "F32", bytes(1 << 20))
        writer.write()
    tensor = open_gguf(tmp_path / "3.gguf").tensors["x"]
    gc.collect()  # mappings that earlier tests have let go of
    n_before = len(os.listdir("/proc/self/fd"))
    cache = record_page_cache(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == n_before
    cache.drop([tensor])
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == n_before


def test_a_shard_that_is_being_written_leaves_nothing_of_the_others(
    data: Path, tmp_path: Path
) -> None:
    source = data / "models" / "stories260K.gguf"
    names = [p.name for p in run(source, tmp_path / "s.gguf", split_max=300_000)]
    other = PartFile(tmp_path / names[-1], 10)
    try:
        with pytest.raises(FileError, match=rf"{names[-1]}: another conversion"):
            run(source, tmp_path / "s.gguf", split_max=300_000, force=True)
        only(tmp_path, *names, f".{names[-1]}.part")
    finally:
        other.close(discard_empty=True)
    only(tmp_path, *names)


def test_a_continued_run_is_not_thrown_away_for_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "a.gguf")
    target = tmp_path / "b.gguf"
    interrupted(source, target, KeyboardInterrupt())
    about = os.statvfs(tmp_path)
    small = os.statvfs_result([*about[:3], 1, 1, *about[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    said: list[str] = []
    run(source, target, said.append)
    assert said == ["resuming: 6 of 12 tensors are already written"]
