"""A bundle from its parts: what pex is told, which wheels it gets, and how the file is laid out.

pex and the registry are fakes here; ``test_bundle.py`` builds and starts a whole one.
"""

from __future__ import annotations

import importlib.metadata as installed
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import WriteTiny
from treadle.bundle import build, wheels
from treadle.bundle.wheels import Target
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.bundled import START, read_bundled
from treadle.files.gguf import open_gguf

pytest.importorskip("pex")

X86 = Target("x86_64", (3, 10))
X86_NEWER = Target("x86_64", (3, 12))
ARM = Target("aarch64", (3, 12))


class FakePex:
    """pex: the commands it was given, wheels for a download, an archive for a program."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.packed: list[str] = []  # names of the wheels that lay there
        self.environments: list[dict[str, str]] = []

    def run(self, command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        assert command[:2] == [sys.executable, "-m"]
        self.commands.append(command[2:])
        self.environments.append(env)
        if "download" in command:
            self.download(command)
        else:
            self.pack(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    def download(self, command: list[str]) -> None:
        folder = Path(command[command.index("-d") + 1])
        wanted = command[command.index("download") + 1]
        machines = [about["marker_environment"]["platform_machine"] for about in told(command)]
        if wanted.startswith("llvmlite"):
            for machine in machines:
                name = f"llvmlite-0.5-cp310-cp310-manylinux_2_27_{machine}.whl"
                info = "llvmlite-0.5.dist-info"
                files = [("llvmlite/lib.so", b"\x7fELF"), (f"{info}/WHEEL", b"Tag: x\n")]
                wheels.write_wheel(folder / name, info, files)
            return
        for name in ("click-8.3-py3-none-any.whl", f"numpy-2.1-cp310-{machines[0]}.whl"):
            (folder / name).write_bytes(b"PK")

    def pack(self, command: list[str]) -> None:
        folder = Path(command[command.index("--pre-resolved-dists") + 1])
        self.packed = sorted(path.name for path in folder.iterdir())
        with zipfile.ZipFile(command[command.index("-o") + 1], "w") as archive:
            archive.writestr("__main__.py", "print('pex')\n", zipfile.ZIP_DEFLATED)
            archive.writestr(".deps/click-8.3-py3-none-any.whl", b"PK" * 50)
            archive.writestr("PEX-INFO", "{}" * 50)


def told(command: Sequence[str]) -> list[dict[str, Any]]:
    """The platforms of a command."""
    values = pairwise(command)
    return [json.loads(value) for name, value in values if name == "--complete-platform"]


@pytest.fixture
def pex(monkeypatch: pytest.MonkeyPatch) -> FakePex:
    made = FakePex()
    monkeypatch.setattr(subprocess, "run", made.run)

    def small(of: Any, to: Path) -> Path:
        path: Path = to / f"{of}-1-py3-none-any.whl"
        path.write_bytes(b"PK")
        return path

    monkeypatch.setattr(wheels, "own_wheel", lambda to: small("treadle", to))
    monkeypatch.setattr(wheels, "installed_wheel", small)
    monkeypatch.setattr(
        wheels, "closure", lambda extras: {n: n for n in ("treadle", "click", *extras)}
    )
    return made


@pytest.fixture
def model(tiny: WriteTiny) -> Path:
    return tiny("llama", "Q8_0")


def test_a_bundle_of_what_is_installed(pex: FakePex, model: Path, tmp_path: Path) -> None:
    """Shell script, model at a page's beginning, program: one file that is three."""
    said: list[str] = []
    out = tmp_path / "talk"
    built = build.make_bundle(model, out, serve=True, args=("-n", "3"), say=said.append)
    assert said == ["packing the installed packages"]
    assert pex.packed == [
        "click-1-py3-none-any.whl",
        "serve-1-py3-none-any.whl",
        "treadle-1-py3-none-any.whl",
    ]
    assert (built.path, built.command, built.targets) == (out, "serve", (wheels.this_target(),))
    assert built.n_bytes == out.stat().st_size
    assert built.model_bytes == model.stat().st_size
    assert out.stat().st_mode & 0o777 == 0o755
    data = out.read_bytes()
    assert data.startswith(b"#!/bin/sh")
    assert f"-lt {built.n_bytes} ]".encode() in data  # it knows when it was cut short
    with out.open("rb") as file:
        header = read_bundled(file, out)
    assert header is not None
    assert (header.command, header.args) == ("serve", ("-n", "3"))
    assert data[header.start :][: header.n_bytes] == model.read_bytes()
    assert header.start == START
    with open_gguf(out) as inside, open_gguf(model) as alone:
        assert inside.tensors.keys() == alone.tensors.keys()
    with zipfile.ZipFile(out) as archive:
        main = archive.read("__main__.py").decode()
        kept = {info.filename: info.compress_type for info in archive.infolist()}
    assert main.endswith("print('pex')\n")
    assert f"PYTHONS = [{sys.version_info[:2]}]" in main
    assert f"MACHINES = ['{wheels.this_target().machine}']" in main
    assert kept[".deps/click-8.3-py3-none-any.whl"] == zipfile.ZIP_STORED  # packed already
    assert kept["PEX-INFO"] == zipfile.ZIP_DEFLATED
    assert [path.name for path in tmp_path.iterdir()] == ["talk"]


def test_the_same_program_has_the_same_id(pex: FakePex, model: Path, tmp_path: Path) -> None:
    names = []
    for name in ("a", "b"):
        build.make_bundle(model, tmp_path / name)
        lines = (tmp_path / name).read_bytes()[:2000].decode("utf-8", "replace").splitlines()
        names.append(next(line for line in lines if line.startswith("n=")))
    assert names[0] == names[1]
    assert len(names[0]) == len("n=-$(uname -m)") + 32


def test_a_bundle_of_a_bundles_model(pex: FakePex, model: Path, tmp_path: Path) -> None:
    """The model alone is taken, by its name in the first."""
    build.make_bundle(model, tmp_path / "first")
    second = build.make_bundle(tmp_path / "first", tmp_path / "second")
    assert second.model_bytes == model.stat().st_size
    with (tmp_path / "second").open("rb") as file:
        header = read_bundled(file, tmp_path / "second")
    assert header is not None
    assert header.name == model.name
    assert (tmp_path / "second").read_bytes()[START:][: second.model_bytes] == model.read_bytes()


def test_wheels_of_other_machines_are_fetched(pex: FakePex, model: Path, tmp_path: Path) -> None:
    """First for the oldest Python; the others then get the same versions of what is pure Python."""
    said: list[str] = []
    pins: list[str] = []
    real = pex.download

    def download(command: list[str]) -> None:
        if "--constraints" in command:
            pins.append(Path(command[command.index("--constraints") + 1]).read_text())
        real(command)

    pex.download = download  # type: ignore[method-assign]
    targets = [X86_NEWER, ARM, X86]
    built = build.make_bundle(model, tmp_path / "out", targets=targets, say=said.append)
    assert said == [
        "fetching wheels for x86_64 CPython 3.12, aarch64 CPython 3.12, x86_64 CPython 3.10"
    ]
    oldest, others, llvmlite, packed = pex.commands
    pythons = [
        [about["marker_environment"]["python_version"] for about in told(command)]
        for command in pex.commands
    ]
    assert pythons == [["3.10"], ["3.12", "3.12"], pythons[2], ["3.12", "3.12", "3.10"]]
    machines = [about["marker_environment"]["platform_machine"] for about in told(llvmlite)]
    assert sorted(machines) == ["aarch64", "x86_64"]  # one wheel of it serves every Python
    for command in (oldest, others):
        assert command[command.index("--exclude") + 1] == "llvmlite"
        assert "--no-build" in command
    assert "--constraints" not in oldest
    assert pins == ["click==8.3\n"]
    assert "--intransitive" in llvmlite
    assert llvmlite[2] == wheels.requirement("llvmlite")
    assert packed[0] == "pex"
    assert [name for name in pex.packed if name.startswith("llvmlite")] == [
        "llvmlite-0.5-py3-none-manylinux_2_27_aarch64.whl",
        "llvmlite-0.5-py3-none-manylinux_2_27_x86_64.whl",
    ]
    assert built.targets == tuple(targets)
    script = (tmp_path / "out").read_bytes()[:4000]
    assert b"for p in python3 python3.12 python3.10; do" in script


def test_one_target_needs_no_second_download(pex: FakePex, model: Path, tmp_path: Path) -> None:
    build.make_bundle(model, tmp_path / "out", targets=[ARM])
    assert len(pex.commands) == 3


def test_pex_keeps_out_of_the_users_folders(
    pex: FakePex, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "PEX_ROOT", "/elsewhere")
    build.make_bundle(model, tmp_path / "out")
    ((command, env),) = zip(pex.commands, pex.environments, strict=True)
    assert "PEX_ROOT" not in env
    assert command[command.index("--pex-root") + 1].startswith(env["TMPDIR"])
    assert not Path(env["TMPDIR"]).exists()  # removed with all that is in it


def test_requirements_are_treadles_own() -> None:
    assert wheels.requirement("llvmlite").startswith("llvmlite")
    assert "0.5" in wheels.requirement("llvmlite")


def test_a_model_that_shrinks(
    pex: FakePex, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = build.describe(model, False, ())
    longer = SimpleNamespace(n_bytes=about.n_bytes + 1)
    program = tmp_path / "program"
    program.write_bytes(b"PK")
    with (
        (tmp_path / "out").open("w+b") as file,
        pytest.raises(FileError, match="shrank while it was copied"),
    ):
        build.write(file, model, longer, program)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("paths", "header_only", "error", "message"),
    [
        (2, False, UnsupportedError, "the model has 2 files, and a bundle needs one"),
        (1, True, FileError, "the file ends after the header"),
    ],
)
def test_models_that_no_bundle_holds(
    paths: int,
    header_only: bool,
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = SimpleNamespace(paths=["m"] * paths, header_only=header_only, metadata={})
    monkeypatch.setattr(build, "open_gguf", lambda path: nullcontext(about))
    with pytest.raises(error, match=message):
        build.describe(Path("m.gguf"), False, ())


def test_a_folder_of_another_kind_is_converted_first() -> None:
    with pytest.raises(UnsupportedError, match="a single GGUF file"):
        build.describe(Path("model.safetensors"), False, ())


# -- wheels ----------------------------------------------------------------------------------------


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    info = tmp_path / "half-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
    names = ["half.py", "half-1.dist-info/WHEEL", "half-1.dist-info/METADATA"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    (tmp_path / "half.py").write_text("")
    path = wheels.installed_wheel(installed.Distribution.at(info), tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert {*names, "half-1.dist-info/RECORD"} == set(archive.namelist())
    (tmp_path / "half.py").unlink()
    with pytest.raises(TreadleError, match="half"):
        wheels.installed_wheel(installed.Distribution.at(info), tmp_path)
