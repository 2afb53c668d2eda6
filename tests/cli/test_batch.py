"""``treadle batch`` as a process: killed, gone on with, interrupted, between two pipes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import stored_plans

ARGS = ["--deterministic", "--temp", "0", "-t", "1", "-c", "256"]
DIES_S = 300


def command(source: Path | str, target: Path | str, *more: str) -> list[str]:
    return [sys.executable, "-m", "treadle", "batch", str(source), str(target), *ARGS, *more]


def ran(*args: Any, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args),
        env=stored_plans(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DIES_S,
        check=False,
    )


def requests(n: int) -> str:
    """Lines of both forms, of lengths that end out of order, and some that fail."""
    made: list[Any] = []
    for i in range(n):
        long = {"max_tokens": 40 if i % 7 == 0 else 2 + i % 5}
        prompt = {"prompt": f"def f{i}(a, b):", **long}
        talk = {"messages": [{"role": "user", "content": f"write {i}"}], **long}
        url = "/v1/chat/completions"
        full = {"custom_id": f"line {i}", "method": "POST", "url": url, "body": talk}
        made.append([prompt, full, {**prompt, "top_p": 3}][i % 3])
    return "".join(json.dumps(line) + "\n" for line in made)


def told(path: Path) -> list[Any]:
    """What the lines say, without times and names that are made anew."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for line in lines:
        line.get("usage", {}).pop("prompt_tokens_details", None)
        if line.get("response"):
            line["response"].pop("request_id")
            body = line["response"]["body"]
            for name in ("id", "created", "timings"):
                body.pop(name, None)
            body.get("usage", {}).pop("prompt_tokens_details", None)
    return lines


@pytest.fixture(scope="module")
def one_go(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Requests, and what one run that nobody disturbs answers."""
    folder = tmp_path_factory.mktemp("batch")
    source = folder / "in.jsonl"
    target = folder / "out.jsonl"
    source.write_text(requests(60))
    done = ran(source, target)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "60 of 60 lines written, 20 of them failed" in done.stderr
    lines = told(target)
    assert len(lines) == 60
    assert [line.get("custom_id") for line in lines][1::3] == [f"line {i}" for i in range(1, 60, 3)]
    assert all("top_p" in line["error"]["message"] for line in lines[2::3])
    assert all(line["text"] for line in lines[::3])
    return source, lines


def killed_at(n_lines: int, number: int, args: list[str], target: Path) -> tuple[int, str]:
    """Start it, and send a signal once the file has so many lines."""
    process = subprocess.Popen(args, env=stored_plans(), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + DIES_S
    while process.poll() is None and time.monotonic() < end:
        if target.exists() and target.read_bytes().count(b"\n") >= n_lines:
            process.send_signal(number)
            break
        time.sleep(0.002)
    _, said = process.communicate(timeout=DIES_S)
    return process.returncode, said


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_file(
    one_go: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    source, expected = one_go
    target = tmp_path / "out.jsonl"
    n = 0
    seed = random.randrange(1 << 30)
    points = random.Random(seed)
    for _ in range(3):
        n = min(n + points.randrange(1, 18), 55)
        code, _ = killed_at(n, signal.SIGKILL, command(source, target), target)
        assert code in (0, -signal.SIGKILL)
        assert told_whole(target) == expected[: len(told_whole(target))], f"seed {seed}"
        if target.read_bytes()[-1:] in (b"", b"\n"):  # else it was killed before it cut that off
            with target.open("ab") as file:  # what a writer may leave behind
                file.write(b'{"id":"batch_req_'[: points.randrange(17)])
    done = ran(source, target)
    assert done.returncode == 0, done.stderr
    # it may have been done before the last signal came: this machine's cores are shared
    assert "lines already" in done.stderr
    assert told(target) == expected, f"seed {seed}"
    before = target.read_bytes()
    done = ran(source, target, "-m", "no such model")  # which is not needed
    assert (done.returncode, target.read_bytes()) == (0, before)


def told_whole(path: Path) -> list[Any]:
    raw = path.read_bytes()
    path.with_name("whole").write_bytes(raw[: raw.rfind(b"\n") + 1])
    return told(path.with_name("whole"))


@pytest.mark.slow
def test_ctrl_c_ends_it_between_two_lines(one_go: tuple[Path, list[Any]], tmp_path: Path) -> None:
    _, expected = one_go
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text(requests(6000))  # it is not done before the signal comes
    code, said = killed_at(5, signal.SIGINT, command(source, target), target)
    assert code == 130, said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert target.read_bytes().endswith(b"\n")
    lines = told(target)
    assert 5 <= len(lines) < 6000
    assert lines[:60] == expected[: len(lines)]


@pytest.mark.slow
def test_what_a_line_says_with_null_it_does_not_say(tmp_path: Path) -> None:
    """Clients write null for what was not set: the command's options hold for it."""
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    limits: list[Any] = [
        {},
        {"max_tokens": None},
        {"max_completion_tokens": None},
        {"n_predict": 5},
    ]
    source.write_text("".join(json.dumps({"prompt": "def f(", **one}) + "\n" for one in limits))
    done = ran(source, target, "-n", "3")
    assert done.returncode == 0, done.stderr
    assert [line["usage"]["completion_tokens"] for line in told(target)] == [3, 3, 3, 5]
    assert "has all 4 lines already" in ran(source, target, "-n", "3").stderr


@pytest.mark.slow
def test_from_one_pipe_to_another(one_go: tuple[Path, list[Any]], tmp_path: Path) -> None:
    source, expected = one_go
    first = "".join(source.read_text().splitlines(keepends=True)[:6])
    done = ran("-", "-", stdin=first)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    out.write_text(done.stdout)
    assert told(out) == expected[:6]


NO_EXTRAS = """
import sys
for name in ("starlette", "uvicorn", "prometheus_client", "fastapi", "ray", "httpx"):
    sys.modules[name] = None
from treadle.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_it_needs_no_extra(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    embed = {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "a text"}}
    source.write_text(requests(3) + json.dumps(embed) + "\n")
    args = [sys.executable, "-c", NO_EXTRAS, "batch", str(source), str(target), *ARGS]
    done = subprocess.run(args, capture_output=True, text=True, timeout=DIES_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = told(target)
    assert [bool(line.get("error")) for line in lines] == [False, False, True, False]
    assert len(lines[3]["response"]["body"]["data"][0]["embedding"]) > 1


@pytest.mark.slow
def test_a_job_of_another_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text(requests(2))
    target.write_text("notes of mine\n")
    done = ran(source, target)
    assert done.returncode == 1
    assert "line 1" in done.stderr
    assert target.read_text() == "notes of mine\n"
    done = ran(source, source)
    assert "the output must not be the input file" in done.stderr
