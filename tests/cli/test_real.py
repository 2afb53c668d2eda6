"""The commands over the real engine: known text, and a real process that is interrupted."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[2]


def test_the_known_text_of_a_known_model(run: Run, data: Path) -> None:
    truths = json.loads((data / "truth" / "llama2c_stories260K_greedy.json").read_text())
    truth = next(truth for truth in truths if truth["prompt"] == "Once upon a time")
    model = str(data / "models" / "stories260K.gguf")
    ran = run("run", model, "Once upon a time", "--temp", "0", "-n", "250")
    assert (ran.code, ran.err) == (0, "")
    expected = truth["text"].removeprefix("Once upon a time")
    assert expected.startswith(ran.out)
    assert len(ran.out) > 500


def test_make_demo_writes_a_whole_function(run: Run) -> None:
    """Its seed ends by itself on whatever this CPU computes with: a text that fills the context is
    a poor first impression.
    """
    (line,) = (at for at in (ROOT / "Makefile").read_text().splitlines() if "treadle run" in at)
    ran = run(*shlex.split(line.partition("treadle ")[2]), "--json")
    report = json.loads(ran.out)
    assert (ran.code, report["finish_reason"]) == (0, "stop")
    assert 100 < len(report["text"]) < 1000


def test_ctrl_c_leaves_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", "run", "def fibonacci(n):", "--ignore-eos"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err in (b"", b"treadle: stopped: the context of 1024 tokens is full\n")
    assert process.returncode == (0 if err else 130)  # it may have been done a moment before


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_every_command_that_takes_a_model_takes_a_real_one(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A kernel that another test of this process linked from a cache of its own is not in this one.
    monkeypatch.setattr("treadle.jit.kernel._linked", {})
    model = str(data / "models" / "stories260K.gguf")
    steps = json.loads(run("plan", model, "--match", "L5.*", "--json").out or "[]")
    assert steps == []  # five layers: 0 to 4
    steps = json.loads(run("plan", model, "--match", "L4.*", "--json").out)
    assert {"L4.attn.qkv", "L4.ffn.down"} <= {step["label"] for step in steps}
    (result,) = json.loads(run("bench", model, "-p", "8", "-n", "0", "-r", "1", "--json").out)
    assert (result["test"], result["engine"]) == ("pp8", "treadle")
    assert result["tok_s"] > 0
    listed = json.loads(run("kernels", "--json").out)
    assert {step["kernel"] for step in steps} <= {kernel["name"] for kernel in listed}
    ir = run("kernels", steps[0]["kernel"], "--ir").out
    assert "define" in ir
    chat = run("chat", model, "-n", "8", "--temp", "0", stdin="Once upon a time\n/retry\n")
    assert (chat.code, len(chat.out) > 2) == (0, True)
