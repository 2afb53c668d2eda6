"""The sdist and the wheel that are published: whole, valid, and of use to who installs them."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.release.tools import program, run

# pip takes seconds to make a build's environment.
UV = shutil.which("uv", path=sysconfig.get_path("scripts"))
QUICKLY = ("--installer", "uv") if UV else ()
NOT_IN_THE_SDIST = {".ci", ".github", ".git", ".venv", "shared"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(program("pyproject-build"), *QUICKLY, "--outdir", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist."""
    (path,) = dist.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(path) as archive:
        archive.extractall(folder)
    (root,) = folder.iterdir()
    return root


def test_the_registry_would_take_them(dist: Path) -> None:
    said = run(program("twine"), "check", "--strict", *dist.iterdir())
    assert said.count("PASSED") == 2


def test_the_wheel_has_what_it_should(wheel: Path) -> None:
    """Every file of src/treadle and no other, no compiled Python, one top folder."""
    assert "OK" in run(program("check-wheel-contents"), wheel)


def test_the_wheel_is_that_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The sdist lacks nothing that the wheel needs."""
    run(program("pyproject-build"), *QUICKLY, "--wheel", "--outdir", tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(direct) as theirs:
        assert {i.filename: i.CRC for i in ours.infolist()} == {
            i.filename: i.CRC for i in theirs.infolist()
        }


def test_the_tests_of_the_sdist_run(unpacked: Path) -> None:
    assert not NOT_IN_THE_SDIST & {path.name for path in unpacked.iterdir()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    chosen = ["tests/tools/test_release.py", "tests/formats/test_importance.py"]
    said = run(*command, *chosen, cwd=unpacked, sources=unpacked / "src")
    assert "passed" in said
    assert "skipped" not in said


def test_uvx_runs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """As the README has it, with a Python and an environment of its own."""
    words = ("--from", wheel, "treadle", "run", "hello", "-n", "8", "--seed", "1")
    assert run(program("uvx"), *words, cwd=tmp_path).strip()
