"""The command line as a real process: signals, pipes, what is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import treadle
from treadle.cli import app

ROOT = Path(__file__).resolve().parents[2]
TREADLE = [sys.executable, "-m", "treadle"]
FAKE = [sys.executable, "-m", "tests.cli.fake"]  # endless words, a millisecond each


@pytest.fixture
def endless(gguf: str) -> subprocess.Popen[bytes]:
    """A run that goes on and on, and has written something already."""
    process = subprocess.Popen(
        [*FAKE, "run", gguf, "Once"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word0"
    return process


def test_ctrl_c_ends_a_run_without_a_traceback(endless: subprocess.Popen[bytes]) -> None:
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=60)
    assert (endless.returncode, err) == (130, b"")


def test_a_reader_that_goes_away_ends_it_quietly(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None
    assert endless.stderr is not None
    endless.stdout.close()
    err = endless.stderr.read()
    endless.stderr.close()
    assert (endless.wait(timeout=60), err) == (141, b"")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"]])
def test_a_reader_that_does_not_even_want_the_help(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "treadle", *words]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_standard_error_that_is_closed_does_not_matter(gguf: str) -> None:
    command = [*FAKE, "run", gguf + "x", "Once"]
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=write, timeout=60)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_output_stays_text_whatever_the_encoding(gguf: str) -> None:
    program = (
        "import sys; from tests.cli.fake import *; from treadle.cli import main;"
        "install(FakeModel(text='caf\\xe9 \\u732b')); sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "run", gguf, "Once"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"caf\xe9 ?", b"")


def test_python_dash_m() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "treadle", "--help"], cwd=ROOT, capture_output=True, timeout=60
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith(b"Usage: treadle ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_output_that_could_not_be_written_is_a_failure() -> None:
    """The process ends without Python's own last flush, so ours must tell."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "treadle", "--help"], cwd=ROOT, stdout=full, timeout=60
        )
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--help"], {}),
        (["--version"], {}),
        (["rum"], {}),
        ([], {"_TREADLE_COMPLETE": "bash_complete", "COMP_WORDS": "treadle ", "COMP_CWORD": "1"}),
    ],
)
def test_what_runs_no_command_imports_none(words: list[str], variables: dict[str, str]) -> None:
    program = (
        "import sys; from treadle.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | variables,
    )
    *told, imported = ended.stdout.splitlines()
    assert {"numpy", "llvmlite", "rich", "treadle.cli.commands.run"} & set(
        imported.split()
    ) == set()
    assert "treadle.cli.app" in imported.split()
    if variables:
        assert [line.rpartition(",")[2] for line in told] == list(app.COMMANDS)


def test_a_run_imports_nothing_that_it_does_not_need(gguf: str) -> None:
    program = (
        "import sys; from tests.cli.fake import *; from treadle.cli import main;"
        f"install(FakeModel(text='')); main(['run', {gguf!r}, 'Once']);"
        "print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    imported = set(ended.stdout.decode().split())
    slow = {"rich", "prompt_toolkit", "huggingface_hub", "jinja2", "pydantic", "typer", "asyncio"}
    assert imported & slow == set()
    assert "click" in imported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "words"),
    [
        ("<&-", ["tokenize", "MODEL"]),
        (">&-", ["--version"]),
        (">&-", ["run", "-n", "2", "def"]),
        (">&-", ["inspect", "MODEL"]),
        ("2>&-", ["inspect", "absent.gguf"]),
        ("2>&-", ["--version"]),
        ("<&- >&- 2>&-", ["inspect", "MODEL"]),
    ],
)
def test_standard_streams_that_are_closed(gguf: str, closed: str, words: list[str]) -> None:
    """They are None in Python, and the numbers 0 to 2 go to the files that are opened next."""
    command = [gguf if word == "MODEL" else word for word in words]
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *TREADLE, *command],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    written = words == ["--version"] and closed != ">&-"
    assert ended.returncode == (0 if written else 1)
    assert b"Traceback" not in ended.stderr
    assert ended.stdout.decode() == (f"treadle {treadle.__version__}\n" if written else "")
    if closed == ">&-" and "MODEL" not in words:  # whose file here is none
        assert ended.stderr.decode() == "treadle: error: standard output is closed\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_part_behind(tmp_path: Path, number: signal.Signals) -> None:
    """A file that grows when the signal comes."""
    program = (
        "import time, treadle.cli as cli; from treadle.files.gguf import GGUFWriter;"
        "ask = lambda: (print('now', flush=True), time.sleep(60))[:0];"
        "writer = GGUFWriter('x.gguf'); writer.add_tensor('t', (4,), 'F32', ask);"
        "cli.main = lambda: writer.write(); cli.run_process()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["cli.main", "sys.stdout.flush"])
def test_ctrl_c_at_the_very_end_leaves_no_traceback(at: str) -> None:
    program = (
        "import os, signal, sys, treadle.cli as cli; cli.main = lambda: 0\n"
        f"{at} = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.run_process()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_a_signal_that_is_ignored_stays_so(gguf: str) -> None:
    """As under ``nohup``."""
    program = (
        "import os, signal, treadle.cli as cli; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "cli.main = lambda: (os.kill(os.getpid(), signal.SIGHUP), 7)[1]; cli.run_process()"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 7


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_callback_of_pythons_is_not_lost(number: signal.Signals, code: int) -> None:
    program = (
        "import os, time, weakref\n"
        "from treadle import cli\n"
        "def main():\n"
        "    some = type('some', (), {})()\n"
        f"    watch = weakref.ref(some, lambda _: os.kill(os.getpid(), {int(number)}))\n"
        "    del some\n"
        "    time.sleep(20)\n"
        "cli.main = main\n"
        "cli.run_process()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, b"")
