"""What a run says of itself: all of it, a line of it, or nothing."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli.conversation import AnswerCost
from treadle.cli.stats import report
from treadle.devices.cpu import residence
from treadle.machine import topology
from treadle.scheduler.output import Timings

ROOT = Path(__file__).resolve().parents[2]


def test_all_of_it(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("run", gguf, "abc", "--stats")
    assert (ran.code, ran.out) == (0, "the quick brown fox")
    lines = ran.err.splitlines()
    assert [line.split()[0] for line in lines] == [
        "cpu",
        "kernels",
        "prompt",
        "text",
        "context",
        "memory",
    ]
    assert lines[0].endswith(", 2 threads")
    assert lines[1:5] == [
        "kernels  20 compiled and 1 from the cache for portable in 1.5 s",
        "prompt   3 tokens, 6.0 tokens/s, 1 reused from the cache",  # 0.5 s
        "text     4 tokens, 12.0 tokens/s",
        "context  8 of 64 tokens",
    ]
    assert re.fullmatch(r"memory   peak [\d.]+ [KMG]iB.*", lines[5])
    assert max(map(len, lines)) < 80
    assert "memory" in run("run", gguf, "abc", "--stats", "--json").err


@pytest.mark.parametrize(
    ("n_read", "n_generated", "read", "wrote"),
    [
        (1, 1, "1 token, 2.0 tokens/s", "1 token"),
        (0, 0, "0 tokens", "0 tokens"),
        (2, 2, "2 tokens, 4.0 tokens/s", "2 tokens, 4.0 tokens/s"),
    ],
)
def test_few_tokens(n_read: int, n_generated: int, read: str, wrote: str) -> None:
    """No speed of what was not timed: the first token comes out of the prompt's run."""
    turn = AnswerCost(Timings(n_read, 0, 0.5, n_generated, 0.25 if n_generated else 0.0), 3, 64)
    lines = report(FakeModel(), turn).splitlines()  # type: ignore[arg-type]
    assert lines[2:4] == [f"prompt   {read}", f"text     {wrote}"]
    short = read.replace(" tokens,", ",").replace(" token,", ",").removesuffix(" tokens")
    assert str(turn) == f"{wrote}; prompt {short}; context 3 of 64"


def test_no_line_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the numbers are, and whatever the processor is called."""
    monkeypatch.setattr(topology, "cpu_name", lambda: "A processor\x1b with a name " * 9)
    monkeypatch.setattr(residence, "peak_bytes", lambda: 1023 << 30)
    monkeypatch.setattr(residence, "mapped_bytes", lambda paths: 1023 << 30)
    model = FakeModel(n_threads=1024, n_ctx=131072)
    model.isa.name = "avx512_vbmi"
    engine = model.engine
    engine.kernels.n_compiled = 1000
    engine.kernels.n_cached = 1000
    engine.kernels.seconds = 1234.5
    monkeypatch.setattr(FakeModel, "engine", engine)
    turn = AnswerCost(Timings(131072, 99999, 0.001, 131072, 0.001), 131072, 131072)
    lines = report(model, turn).splitlines()  # type: ignore[arg-type]
    assert len(lines) == 6
    assert max(map(len, lines)) < 80
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("cpu      A processor")
    assert lines[0].endswith("…, 1024 threads")
    assert len(str(AnswerCost(Timings(4096, 0, 1.0, 4096, 10.0), 4096, 4096))) < 80
    assert lines[1] == "kernels  1000 compiled and 1000 from the cache for avx512_vbmi in 1234 s"


@pytest.mark.parametrize(
    ("n_compiled", "n_cached", "words"),
    [(20, 0, "20 compiled for"), (0, 20, "20 from the cache for"), (0, 0, "0 for")],
)
def test_kernels(
    run: Run,
    model: FakeModel,
    gguf: str,
    monkeypatch: pytest.MonkeyPatch,
    n_compiled: int,
    n_cached: int,
    words: str,
) -> None:
    engine = model.engine
    engine.kernels.n_compiled = n_compiled
    engine.kernels.n_cached = n_cached
    monkeypatch.setattr(FakeModel, "engine", engine)
    assert f"\nkernels  {words} portable in 1.5 s\n" in run("run", gguf, "abc", "--stats").err


def test_nothing_where_nobody_watches(run: Run, model: FakeModel, gguf: str) -> None:
    assert run("run", gguf, "abc").err == ""
    assert run("run", gguf, "abc", "--no-stats").err == ""


def on_a_terminal(*words: str) -> str:
    """What the real command line shows on a terminal for both of its outputs."""
    program = (
        "import sys; from tests.cli.fake import *; from treadle.cli import main;"
        "install(FakeModel()); sys.exit(main())"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "run", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"NO_COLOR": "1"},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_a_line_on_a_terminal(gguf: str) -> None:
    line = "4 tokens, 12.0 tokens/s; prompt 3, 6.0 tokens/s; context 8 of 64"
    assert on_a_terminal(gguf, "abc") == f"the quick brown fox\n{line}\n"
    assert on_a_terminal(gguf, "abc", "--no-stats") == "the quick brown fox\n"
    assert "\nmemory " in on_a_terminal(gguf, "abc", "--stats")
    assert line not in on_a_terminal(gguf, "abc", "--json")
