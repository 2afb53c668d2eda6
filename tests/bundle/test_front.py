"""The lines that start a bundle: which folder and Python they choose, and what they refuse."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from treadle.bundle import front

HERE = sys.version_info[:2]


class Left(BaseException):
    """Another program took over."""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a folder of temporary files, a bundle for this machine; what is executed."""
    for name in ("TREADLE_CACHE", "PEX_ROOT", "PEX", "TREADLE_BUNDLES", "TREADLE_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(front, "PYTHONS", [HERE])
    monkeypatch.setattr(front, "MACHINES", [os.uname()[4]])
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "talk"), "hello"])

    def execute(python: str, argv: list[str]) -> NoReturn:
        raise Left(python, argv)

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return tmp_path


def noted(folder: Path, python: str = sys.executable) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / f"id-{os.uname()[4]}").write_text(python + "\n")


def test_it_is_unpacked_in_the_users_cache(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    front.start()
    chosen = str(own / "cache/treadle/bundles")
    assert (os.environ["PEX_ROOT"], os.environ["TREADLE_BUNDLES"]) == (chosen, chosen)
    assert os.stat(chosen).st_mode & 0o077 == 0
    assert "unpacking" in capsys.readouterr().err
    front.start()  # as pex goes through it again
    assert os.environ["PEX_ROOT"] == chosen
    assert capsys.readouterr().err == ""


def test_what_is_unpacked_starts_at_once(own: Path) -> None:
    noted(own / "cache/treadle/bundles")
    with pytest.raises(Left) as left:
        front.start()
    assert left.value.args == (
        sys.executable,
        [sys.executable, "-I", "-m", "treadle.cli.bundled", "hello"],
    )
    assert os.environ["PEX"] == str(own / "talk")
    assert os.environ["TREADLE_BUNDLE"] == f"id-{os.uname()[4]}"


def test_a_note_that_leads_nowhere_is_passed_over(own: Path) -> None:
    noted(own / "cache/treadle/bundles", "/no/python")
    front.start()
    assert os.environ["PEX_ROOT"] == str(own / "cache/treadle/bundles")


def test_a_home_that_cannot_be_written_to(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", "/proc/none")
    front.start()
    chosen = own / "tmp" / f"treadle-{os.getuid()}" / "bundles"
    assert os.environ["PEX_ROOT"] == str(chosen)
    assert chosen.parent.stat().st_mode & 0o077 == 0
    noted_there = chosen / f"id-{os.uname()[4]}"
    noted_there.write_text(sys.executable)
    del os.environ["PEX_ROOT"]
    with pytest.raises(Left):
        front.start()


def test_folders_where_nothing_may_be_executed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.statvfs

    def statvfs(path: str) -> Any:
        closed = not str(path).startswith(str(own / "tmp"))
        return SimpleNamespace(f_flag=os.ST_NOEXEC if closed else usual(path).f_flag)

    monkeypatch.setattr(os, "statvfs", statvfs)
    front.start()
    assert os.environ["PEX_ROOT"].startswith(str(own / "tmp"))


def test_a_folder_that_others_may_write_to(own: Path) -> None:
    folder = own / "cache/treadle/bundles"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    front.start()
    assert os.environ["PEX_ROOT"].startswith(str(own / "tmp"))


@pytest.mark.parametrize(("mode", "fits"), [(0o1777, True), (0o777, False)])
def test_a_named_folder_where_others_have_theirs(
    own: Path, monkeypatch: pytest.MonkeyPatch, mode: int, fits: bool
) -> None:
    """As in /tmp, where they cannot take it away."""
    shared = own / "shared"
    shared.mkdir()
    shared.chmod(mode)
    monkeypatch.setitem(os.environ, "PEX_ROOT", str(shared / "mine"))
    assert front.fits(str(shared / "mine")) == fits


def test_somebody_elses_folder_and_note(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(own / "cache/treadle/bundles")
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    stat = os.stat

    def of_another(path: str) -> Any:
        about = stat(path)
        return SimpleNamespace(st_uid=4243, st_mode=about.st_mode)

    monkeypatch.setattr(os, "stat", of_another)
    with pytest.raises(SystemExit, match=r"set PEX_ROOT=FOLDER"):
        front.start()


def test_nowhere_to_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PEX_ROOT", "/proc/none")
    with pytest.raises(
        SystemExit, match=r"no folder to unpack the program into: none of /proc/none"
    ):
        front.start()


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "MACHINES", ["aarch128"])
    with pytest.raises(SystemExit, match=f"this machine.s CPU is {os.uname()[4]}.*for aarch128"):
        front.start()


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match="this bundle is for Linux, and this is darwin"):
        front.start()


def test_another_python(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "PYTHONS", [(3, 98), (3, 99)])
    with pytest.raises(
        SystemExit, match=r"this is Python 3\.\d+: the bundle needs Python 3.98, 3.99"
    ):
        front.start()
    for version in ("3.98", "3.99"):
        (own / f"python{version}").symlink_to(sys.executable)
    monkeypatch.setitem(os.environ, "PATH", str(own))
    with pytest.raises(
        SystemExit, match="the bundle needs Python"
    ):  # neither is what its name says
        front.start()

    for version, code in (("3.98", 0), ("3.99", 127)):  # pyenv's names for what it would not run
        (own / f"python{version}").unlink()
        (own / f"python{version}").write_text(f"#!/bin/sh\nexit {code}\n")
        (own / f"python{version}").chmod(0o755)
    with pytest.raises(Left) as left:
        front.start()
    python = str(own / "python3.98")
    assert left.value.args == (python, [python, *sys.argv])
