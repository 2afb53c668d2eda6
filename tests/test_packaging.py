"""What is shipped: the wheel's contents, and that its dependencies are declared and argued for."""

from __future__ import annotations

import ast
import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.page_libraries import LIBRARIES

ROOT = Path(__file__).resolve().parent.parent
MAX_MODEL_BYTES = 6 * 2**20
NAMES = {"prompt-toolkit": "prompt_toolkit", "huggingface-hub": "huggingface_hub"}
# Imported where they are asked for, with an error that names the extra.
OPTIONAL = {"PIL", "llama_cpp", "packaging", "prometheus_client", "ray", "starlette", "uvicorn"}
OPTIONAL |= {"h11", "wgpu", "mcp", "mcp_types", "anyio", "httpx2"}  # mcp stands on the last two
OPTIONAL |= {"openai", "IPython"}  # the latter where it already runs
OPTIONAL |= {"torch", "transformers"}  # of `treadle diff --reference transformers`, where they are


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(
        [*command, "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    kinds = {Path(name).suffix for name in names if name.startswith("treadle/")}
    page = {".html", ".js", ".mjs", ".css", ".svg", ".txt"}
    assert kinds == {".py", ".typed", ".gguf", *page}
    assert {"treadle/server/page/index.html", "treadle/server/page/vendor/marked.esm.js"} <= set(
        names
    )
    assert "treadle/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"treadle"}


def test_one_small_model_ships_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        models = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    assert [Path(info.filename).parent for info in models] == [Path("treadle/data")]
    assert models[0].compress_size <= MAX_MODEL_BYTES


def test_the_metadata(metadata: email.message.Message) -> None:
    chosen = {library.licence for library in LIBRARIES}
    assert set(metadata["License-Expression"].split(" AND ")) == {"Apache-2.0", *chosen}
    licences = {Path(name).name for name in metadata.get_all("License-File", [])}
    assert licences == {"LICENSE", *(library.files[1].name for library in LIBRARIES)}
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {metadata['Version'].partition('.dev')[0]}, " in (ROOT / "CHANGELOG.md").read_text()
    pythons = {row.rpartition(" ")[2] for row in metadata.get_all("Classifier", [])}
    assert {"3.10", "3.14", "CPython", "Typed"} <= pythons


def required(metadata: email.message.Message) -> set[str]:
    """Import names of the dependencies that every install gets."""
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    found = {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in lines}
    return {NAMES.get(name, name) for name in found}


@pytest.mark.slow
def test_what_is_imported_is_what_is_declared(metadata: email.message.Message) -> None:
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - {"treadle"} - OPTIONAL
    assert foreign == required(metadata)


def test_what_is_declared_is_argued_for(metadata: email.message.Message) -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    missing = [name for name in required(metadata) if f"`{name}`" not in page]
    assert missing == []
