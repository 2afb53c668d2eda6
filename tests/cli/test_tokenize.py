from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def stories(data: Path) -> str:
    return str(data / "models" / "stories260K.gguf")


def test_ids(run: Run, stories: str) -> None:
    ran = run("tokenize", stories, "Once upon", "--ids")
    assert (ran.code, ran.out, ran.err) == (0, "1 403 407\n", "")
    assert run("tokenize", stories, "--ids", stdin="Once upon\n").out == ran.out
    assert run("tokenize", stories, "Once upon", "--ids", "--raw").out == "403 407\n"


def test_json(run: Run, stories: str) -> None:
    tokens = json.loads(run("tokenize", stories, "Once", "--json").out)
    assert tokens[1] == {"id": 403, "piece": "▁Once", "bytes": b" Once".hex()}


def test_the_table(run: Run, stories: str) -> None:
    lines = run("tokenize", stories, "Once").out.splitlines()
    assert lines[0].split() == ["id", "piece", "bytes"]
    assert lines[2].split() == ["403", '"▁Once"', "20", "4f", "6e", "63", "65"]


def test_both_forms_at_once_are_wrong_usage(run: Run, stories: str) -> None:
    assert run("tokenize", stories, "Once", "--ids", "--json").code == 2
