"""The notebooks run, and show what they were committed with."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.fetch_models import FetchError, fetch

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL_BUFFERS = Path(__file__).with_name("small_buffers")
MOST_BYTES = 100_000
NEEDED = ("ipykernel", "matplotlib", "nbclient")
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that are code."""
    found = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[list[str]]:
    """What each output of a cell is: the name of a stream, or MIME types."""
    return [sorted(o.get("data", [o.get("name", "error")])) for o in cell["outputs"]]


@pytest.fixture(scope="module")
def everything_is_there() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    problem = f"absent: {', '.join(missing)}: pip install '.[notebooks]'" if missing else ""
    try:
        for name in () if problem else ("smollm2", "minilm"):
            fetch(name)
    except FetchError as error:
        problem = str(error)
    if problem:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(problem)


@EACH
def test_a_notebook_runs(
    path: Path, tmp_path: Path, one_kernel_cache: Path, everything_is_there: None
) -> None:
    """In a kernel of its own, from its own folder. Texts and numbers may differ on another
    machine; what they are may not. As for a reader, what the notebook before has planned is kept,
    and the list of fonts that matplotlib has searched for.
    """
    script = ROOT / "tools" / "run_notebooks.py"
    sources = os.pathsep.join(map(str, (SMALL_BUFFERS, ROOT / "src")))
    ran = subprocess.run(
        [sys.executable, str(script), "--to", str(tmp_path), str(path)],
        env=os.environ
        | {
            "PYTHONPATH": sources,
            "MPLCONFIGDIR": str(one_kernel_cache / "matplotlib"),
            "TREADLE_PLANS": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    fresh = cells(tmp_path / path.name)
    assert [cell["execution_count"] for cell in fresh] == list(range(1, len(fresh) + 1))
    assert [kinds(cell) for cell in fresh] == [kinds(cell) for cell in cells(path)]


@EACH
def test_a_notebook_is_committed_as_it_ran(path: Path) -> None:
    """From its first cell to its last, without an error, a path of one machine, or much weight."""
    found = cells(path)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    assert all(kind not in (["error"], ["stderr"]) for cell in found for kind in kinds(cell))
    text = path.read_text("utf-8")
    assert len(text) < MOST_BYTES
    assert not any(place in text for place in ('"/home', '"/root', '"/tmp', '"/work', "/site-pack"))
    assert json.loads(text)["metadata"].keys() == {"kernelspec", "language_info"}


def test_a_generation_was_shown_while_it_was_written() -> None:
    """The committed display is that of the whole answer, coloured where it has probabilities."""
    texts = [
        "".join(output["data"]["text/html"])
        for cell in cells(ROOT / "notebooks" / "1-chat-and-streaming.ipynb")
        for output in cell["outputs"]
        if "text/html" in output.get("data", ())
    ]
    ended = [text for text in texts if "ended by: " in text]
    assert len(ended) == 4
    assert sum("<span" in text for text in ended) == 1


def test_every_notebook_is_in_the_list() -> None:
    page = (ROOT / "notebooks" / "README.md").read_text("utf-8")
    assert len(NOTEBOOKS) >= 5
    assert all(f"({path.name})" in page for path in NOTEBOOKS)
