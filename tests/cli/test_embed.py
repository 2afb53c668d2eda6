from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.cli.conftest import Run
from tests.tiny import write_model

TEXTS = ["one text", "another"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_model(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def test_a_line_of_numbers_each(run: Run, model: str) -> None:
    """Which are the very floats that the library gives."""
    with treadle.load(model, threads=2) as loaded:
        expected = loaded.embed(TEXTS)
        cut = loaded.embed(TEXTS, normalize=False, dimensions=5)
    ran = run("embed", model, *TEXTS, "-t", "2")
    assert ran.code == 0, ran.err
    rows = [line.split() for line in ran.out.splitlines()]
    assert np.array_equal(np.array(rows, np.float32), expected)
    lines = "\r\n".join([*TEXTS, " ", ""])
    options = ("--json", "--dimensions", "5", "--no-normalize", "-t", "2")
    found = json.loads(run("embed", model, *options, stdin=lines).out)
    assert [row["index"] for row in found] == [0, 1]
    assert np.allclose([row["embedding"] for row in found], cut, rtol=1e-6)


def test_lines_that_are_wrong_are_named(run: Run, model: str) -> None:
    """No vector would be that of its line if one were left out."""
    ran = run("embed", model, stdin="one\n \ntwo\n")
    assert ran.code == 1
    assert "standard input: line 2: is blank (expected a text)" in ran.err
    assert ran.out == ""
    long = "word " * 20
    ran = run("embed", model, "-c", "8", stdin=f"a\n{long}\n")
    assert ran.code == 1
    assert "line 2: " in ran.err
    assert "do not fit the context of 8" in ran.err
    assert "text 3: " in run("embed", model, "-c", "8", "a", "b", long).err
    alone = run("embed", model, "-c", "8", long).err
    assert "do not fit the context of 8" in alone
    assert "text 1" not in alone


def test_wrong_usage(run: Run, model: str) -> None:
    ran = run("embed", model, stdin="\n")
    assert ran.code == 2
    assert "no texts" in ran.err
    ran = run("embed", model, "a", "--dimensions", "65")
    assert ran.code == 1
    assert "dimensions=65: expected 1 to 64" in ran.err
