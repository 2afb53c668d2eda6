"""Where files are written: nothing else may be lost there, and no work done in vain."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from treadle.errors import FileError
from treadle.files.gguf_writer import GGUFWriter
from treadle.files.target import (
    check_not_read,
    check_target,
    files_of,
    new_file,
    part_of,
    write_text,
)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_stays_a_pipe(pipe: Path, force: bool) -> None:
    link = pipe.with_name("link")
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(FileError, match=f"{path}: is no regular file"):
            check_target(path, force=force)


def test_the_writer_leaves_a_pipe_alone(pipe: Path) -> None:
    with pytest.raises(FileError, match="is no regular file"):
        GGUFWriter(pipe).write()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(pipe.parent.iterdir()) == [pipe]


def test_what_is_there_is_replaced_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "x"
    check_target(path)
    path.touch()
    with pytest.raises(FileError, match=r"exists already .*--force"):
        check_target(path)
    check_target(path, force=True)
    path.unlink()
    path.symlink_to(tmp_path / "absent")
    with pytest.raises(FileError, match="exists already"):
        check_target(path)


def test_standard_output_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-", Path("-")):
        with pytest.raises(FileError, match=r"-: cannot be a stream"):
            check_target(name, force=True)
    check_target(tmp_path / "-")


@pytest.mark.parametrize(
    ("name", "message"), [(".", "is a folder"), ("no/x", "its folder does not exist")]
)
def test_places_that_cannot_be(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        check_target(tmp_path / name, force=True)


def test_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may all
    with pytest.raises(FileError, match="its folder is not writable"):
        check_target(tmp_path / "x")


@pytest.mark.parametrize("n_bytes", [1, 223, 224, 255])
def test_a_part_has_a_name_whatever_its_files(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / ("x" * n_bytes)
    assert part_of(path) != part_of(path.with_name("y" * n_bytes))
    with new_file(path) as file:
        (part,) = tmp_path.iterdir()
        assert part.name.startswith(".")
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_name_that_is_too_long_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: File name too long"):
        check_target(tmp_path / ("x" * 256))


def test_every_file_of_a_model_is_a_source(tmp_path: Path) -> None:
    shards = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    folder = tmp_path / "hf"
    folder.mkdir()
    weights = folder / "model.safetensors"
    config = folder / "config.json"
    for path in (*shards, weights, config, tmp_path / "other.gguf"):
        path.touch()
    link = tmp_path / "link"
    link.symlink_to(shards[1])
    for source in (*shards, tmp_path / "m.gguf", tmp_path / "m"):
        for path in (*shards, link):
            with pytest.raises(FileError, match=f"{path}: is also the input"):
                check_not_read(path, files_of(None, source))
    for source in (folder, weights):
        with pytest.raises(FileError, match="is also the input"):
            check_target(config, files_of(source), force=True)
    check_target(tmp_path / "other.gguf", files_of(shards[0], folder), force=True)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_text_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_text(path, "one")
    path.chmod(mode)
    before = os.umask(0o022)
    try:
        write_text(path, "two")
    finally:
        os.umask(before)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", mode)


def test_an_earlier_text_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.svg"
    (tmp_path / "link.svg").symlink_to(path)
    write_text(tmp_path / "link.svg", "<svg>1</svg>")
    assert path.read_text() == "<svg>1</svg>"

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FileError, match="the disk is full"):
        write_text(path, "<svg>2</svg>")
    assert path.read_text() == "<svg>1</svg>"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.svg", "out.svg"]
