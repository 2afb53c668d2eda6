"""The programs of examples/ that use more than a sampler, run as a reader would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import stored_plans
from tests.server.conftest import ROOT, Served


def run(name: str, *arguments: str, given: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=stored_plans(),
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_spam(one_kernel_cache: Path) -> None:
    """A message that no context holds stops no pipe: its beginning is judged."""
    given = ["Win money now", "é" * 5000, "See you at lunch"]
    told = run("spam", given="".join(f"{line}\n" for line in given)).splitlines()
    assert [line.split("\t")[1] for line in told] == given
    assert {line.split("\t")[0] for line in told} <= {"spam", "ham"}


@pytest.mark.slow
def test_agent(one_kernel_cache: Path, tmp_path: Path) -> None:
    """The packaged model calls nothing of itself; what it says is shown."""
    assert run("agent", "How many files are here?").startswith(("assistant: ", "list_", "count_"))


def test_search(one_kernel_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("def f(x):\n\nimport os\n")
    told = run("search", "import os", str(file)).splitlines()
    assert [line.split("  ", 1)[1] for line in told] == ["import os", "def f(x):"]
    assert told[0].startswith("1.000")


@pytest.mark.slow
def test_lens(one_kernel_cache: Path) -> None:
    """The last line follows from those before it."""
    first, *lines, last = run("lens", "def add(a, b):\n    return").splitlines()
    answer = first.removeprefix("answer: ")
    assert len(lines) == 11
    right = [line.endswith(f"likeliest {answer}") for line in lines]
    assert right[-1]
    wrong = max(i for i, each in enumerate(right) if not each)
    assert last == f"decided after layer {wrong}"


@pytest.mark.slow
def test_ablate_head(one_kernel_cache: Path) -> None:
    first, *lines = run("ablate_head", "def add(a, b):\n    return").splitlines()
    assert first.startswith("answer: ")
    found = [float(line.split(": ")[1].removesuffix(" without it")) for line in lines]
    assert len(found) == 8
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.5  # some head matters


@pytest.mark.slow
def test_batch(one_kernel_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "lines.txt"
    target = tmp_path / "answers.jsonl"
    source.write_text("a\nb\n")
    run("batch", str(source), str(target))
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["0", "1"]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)


@pytest.mark.slow
def test_openai_client(process: Served) -> None:
    server = process()
    told = run("openai_client", server.url).splitlines()
    assert json.loads(told[-1]) in ("red", "green", "blue")


@pytest.mark.slow
def test_steer(one_kernel_cache: Path) -> None:
    """Programs with docstrings become rare below zero."""
    told = re.findall(r"^([+-]\d): (\d) of 8", run("steer"), re.MULTILINE)
    counts = {int(strength): int(n) for strength, n in told}
    assert [*counts] == [-4, -2, 0, 2]
    assert counts[-4] + 4 <= counts[0] <= counts[2] + 1
