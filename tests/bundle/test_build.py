"""What cannot become a bundle, and why: one clear line each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # a fixture
from tests.conftest import WriteTiny
from treadle.bundle import build, wheels
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files import target
from treadle.files.bundled import START
from treadle.files.gguf import open_gguf

pytest.importorskip("pex")


@pytest.fixture
def model(tiny: WriteTiny) -> Path:
    return tiny("llama", "Q8_0")


@pytest.fixture(autouse=True)
def no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests end before anything is packed."""

    def refuse(*_: object) -> None:
        raise AssertionError("a wheel was made")

    monkeypatch.setattr(wheels, "own_wheel", refuse)


def test_a_model_that_is_missing(run: Run, tmp_path: Path) -> None:
    made = run("bundle", str(tmp_path / "no.gguf"), str(tmp_path / "out"))
    assert made.code == 1
    assert "no such file" in made.err
    assert made.err.count("\n") == 1


def test_an_out_that_exists(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    made = run("bundle", str(model), str(out), "--offline")
    assert (made.code, made.err.count("\n")) == (1, 1)
    assert "exists already (expected --force to replace it)" in made.err
    assert out.read_bytes() == b"mine"
    assert "also the input" in run("bundle", str(model), str(model), "--force").err


def test_no_pex(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_spec
    monkeypatch.setattr(
        "treadle.bundle.build.find_spec", lambda name: None if name == "pex" else real(name)
    )
    made = run("bundle", str(model), str(tmp_path / "out"))
    assert (made.code, made.err) == (
        1,
        "treadle: error: a bundle needs pex: pip install 'treadle[bundle]'\n",
    )


def test_another_system(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "NAME", "win32")
    with pytest.raises(UnsupportedError, match=r"bundles can only be made on Linux.*win32"):
        build.make_bundle(model, model.with_name("out"))


def test_serve_without_the_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_spec
    monkeypatch.setattr(
        "treadle.bundle.build.find_spec", lambda name: None if name == "uvicorn" else real(name)
    )
    with pytest.raises(TreadleError, match=r"treadle\[serve\]"):
        build.make_bundle(model, model.with_name("out"), serve=True)


def test_a_full_disk(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5))
    made = run("bundle", str(model), str(tmp_path / "out"), "--offline")
    assert made.code == 1
    assert "not enough disk space" in made.err
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_fills_while_it_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name appears only when the file is whole."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    said = build.describe(model, False, ())
    program = tmp_path / "program"
    program.write_bytes(b"PK")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with (
        pytest.raises(FileError, match="the disk is full"),
        target.new_file(tmp_path / "out", 10) as file,
    ):
        build.write(file, model, said, program)
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def test_what_holds_no_single_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UnsupportedError, match=r"a single GGUF file: make one with 'treadle convert"
    ):
        build.describe(tmp_path, False, ())


def test_wrong_usage(run: Run, model: Path) -> None:
    made = run("bundle", str(model), "out", "--offline", "--machine", "aarch64")
    assert made.code == 2
    assert "--offline excludes --machine" in made.err
    assert run("bundle", str(model), "").code == 2


@pytest.mark.parametrize(
    ("serve", "chats", "command"),
    [(False, False, "run"), (False, True, "chat"), (True, True, "serve")],
)
def test_what_it_does_alone(
    tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, serve: bool, chats: bool, command: str
) -> None:
    model = tiny("llama", "Q8_0")
    if chats:
        real: Callable[..., Any] = open_gguf

        def with_template(path: Path) -> Any:
            gguf = real(path)
            gguf.metadata = {**gguf.metadata, "tokenizer.chat_template": "x"}
            return gguf

        monkeypatch.setattr("treadle.bundle.build.open_gguf", with_template)
    said = build.describe(model, serve, ("-n", "3"))
    assert (said.command, said.args, said.start) == (command, ("-n", "3"), START)


def test_what_pex_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "pex"]
        told = "pid 7:\n  ERROR: No matching distribution found for numpy\nmore\n"
        return subprocess.CompletedProcess(command, 1, "", told)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(TreadleError, match=r"^cannot: ERROR: No matching distribution .* numpy$"):
        build._pex(["pex"], [], tmp_path, "cannot")


def test_the_shells_lines_name_the_pythons(tmp_path: Path) -> None:
    targets = [wheels.Target("x86_64", (3, 10)), wheels.Target("aarch64", (3, 9))]
    lines = build.script("abc", targets, 100)
    assert b"for p in python3 python3.10 python3.9; do" in lines
    assert b"n=abc-$(uname -m)" in lines
    (tmp_path / "s").write_bytes(b"#!/bin/sh\n" + lines + bytes(100))
    done = subprocess.run(
        ["/bin/sh", str(tmp_path / "s")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no python3 found" in done.stderr
    assert "wc" not in done.stderr


def test_the_shells_lines_pass_over_a_python_that_does_not_run(tmp_path: Path) -> None:
    for name, lines in (
        ("python3", "exit 127"),  # what pyenv has for each version that it does not run here
        ("python3.10", '[ "$1" = -ISc ] || echo "$1"'),
        ("script", build.script("abc", [wheels.Target("x86_64", (3, 10))], 100).decode()),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(tmp_path / "script")],
        env={"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'script'}\n")
