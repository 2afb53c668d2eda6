"""The wheels of a bundle, made of what is installed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata as installed
import json
import zipfile
from pathlib import Path

import pytest

import treadle
from treadle.bundle import wheels
from treadle.errors import TreadleError

pytest.importorskip("packaging")


def checked(path: Path) -> dict[str, bytes]:
    """A wheel's files, each held against its line of RECORD."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    lines = [line.rsplit(",", 2) for line in files[record].decode().splitlines()]
    assert {name for name, _, _ in lines} == files.keys()
    for name, digest, size in lines:
        if name != record:
            sha = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode()
            assert (digest, int(size)) == (f"sha256={sha.rstrip('=')}", len(files[name])), name
    return files


def test_treadles_own_is_what_runs(tmp_path: Path) -> None:
    path = wheels.own_wheel(tmp_path)
    assert path.name == f"treadle-{treadle.__version__}-py3-none-any.whl"
    files = checked(path)
    root = Path(treadle.__file__).parent
    for name in ("api/model.py", "data/demo.gguf", "bundle/front.py"):
        assert files[f"treadle/{name}"] == (root / name).read_bytes()
    assert not any("__pycache__" in name for name in files)
    meta = files[f"treadle-{treadle.__version__}.dist-info/METADATA"].decode()
    assert f"Version: {treadle.__version__}" in meta
    assert "Requires-Dist: numpy" in meta


def test_an_installed_package_becomes_its_wheel_again(tmp_path: Path) -> None:
    click = installed.distribution("click")
    path = wheels.installed_wheel(click, tmp_path)
    assert path.name == f"click-{click.version}-py3-none-any.whl"
    files = checked(path)
    assert files["click/core.py"] == Path(str(click.locate_file("click/core.py"))).read_bytes()
    assert not any(name.startswith("..") or name.endswith(".pyc") for name in files)


def test_a_package_that_is_not_whole(tmp_path: Path) -> None:
    info = tmp_path / "half-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1\n")
    with pytest.raises(TreadleError, match="half was not installed as a wheel"):
        wheels.installed_wheel(installed.Distribution.at(info), tmp_path)
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
    record = "half.py,,\nhalf-1.dist-info/WHEEL,,\nhalf-1.dist-info/METADATA,,\n"
    (info / "RECORD").write_text(record)
    with pytest.raises(TreadleError, match=r"half (is incomplete|was not installed)"):
        wheels.installed_wheel(installed.Distribution.at(info), tmp_path)


def test_what_treadle_needs_and_what_that_needs() -> None:
    found = wheels.closure(frozenset())
    assert {"treadle", "numpy", "llvmlite", "markupsafe"} <= found.keys()
    assert "torch" not in found
    assert "uvicorn" in wheels.closure(frozenset({"serve"}))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = installed.distribution

    def distribution(name: str) -> installed.Distribution:
        if name == "numpy":
            raise installed.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(installed, "distribution", distribution)
    with pytest.raises(TreadleError, match=r"numpy is not installed here: pip install numpy"):
        wheels.closure(frozenset())


def test_what_a_target_takes() -> None:
    told = json.loads(wheels.Target("aarch64", (3, 12)).complete())
    tags = told["compatible_tags"]
    assert "cp312-cp312-manylinux_2_28_aarch64" in tags
    assert "cp310-abi3-manylinux2014_aarch64" in tags
    assert "py3-none-any" in tags
    assert not any("x86" in tag or "cp313" in tag for tag in tags)
    assert told["marker_environment"]["python_version"] == "3.12"
    assert tags.index("cp312-cp312-manylinux_2_31_aarch64") < tags.index("py3-none-any")


def write(path: Path, extra: str) -> Path:
    info = "llvmlite-0.5.dist-info"
    files = [
        ("llvmlite/__init__.py", b""),
        (extra, b"\x7fELF"),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nTag: cp310-cp310-manylinux_2_27_x86_64\n"),
    ]
    wheels.write_wheel(path, info, files)
    return path


def test_one_wheel_for_every_python(tmp_path: Path) -> None:
    name = "llvmlite-0.5-cp310-cp310-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    path = write(tmp_path / name, "llvmlite/libllvmlite.so")
    made = wheels.any_python(path)
    assert made.name == "llvmlite-0.5-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    assert [*tmp_path.iterdir()] == [made]
    files = checked(made)
    assert files["llvmlite/libllvmlite.so"] == b"\x7fELF"
    lines = files["llvmlite-0.5.dist-info/WHEEL"].decode().splitlines()
    assert lines[2:] == [
        "Tag: py3-none-manylinux_2_27_x86_64",
        "Tag: py3-none-manylinux_2_28_x86_64",
    ]


def test_a_wheel_that_is_for_one_python_is_no_other_ones(tmp_path: Path) -> None:
    name = "llvmlite-0.5-cp310-cp310-manylinux_2_27_x86_64.whl"
    path = write(tmp_path / name, "llvmlite/fast.cpython-310-x86_64-linux-gnu.so")
    with pytest.raises(TreadleError, match="is for one Python"):
        wheels.any_python(path)


def test_the_installed_llvmlite_has_no_part_for_one_python() -> None:
    """What ``any_python`` relies on."""
    files = installed.distribution("llvmlite").files or []
    assert [f.name for f in files if f.suffix == ".so"] == ["libllvmlite.so"]
