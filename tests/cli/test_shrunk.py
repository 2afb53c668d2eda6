"""The commands, as processes, when the model's file shrinks or changes while they read it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_process import ROOT, TREADLE
from tests.conftest import WriteTiny

# Something happens to the file (``WHAT``) when a function (``WHERE``) is called the second time.
PROGRAM = """
import importlib, itertools, os, signal, sys
module, name = {where!r}.split(":")
owner = importlib.import_module(module)
for word in name.split(".")[:-1]:
    owner = getattr(owner, word)
name = name.split(".")[-1]
whole, calls = getattr(owner, name), itertools.count()
def instead(*args, **named):
    if next(calls) == 1:
        {what}
    return whole(*args, **named)
setattr(owner, name, instead)
from treadle.cli import run_process
run_process()
"""
SHRINK = "os.truncate('model.gguf', 0)"
COPY_OVER = "open('model.gguf', 'wb').write(b'GGUF' * 999)"
TOUCH = "os.utime('model.gguf', ns=(1, 1))"
STRIP = "treadle.formats.format:Format.quantize_rows"
TENSOR = "treadle.convert.partial_file:PartFile.write"
COMMANDS = [
    (
        ["run", "model.gguf", "Once", "--temp", "0", "-t", "2"],
        "treadle.engine.engine:Engine.sample",
    ),
    (["chat", "model.gguf"], "treadle.engine.engine:Engine.sample"),
    (["quantize", "model.gguf", "new.gguf", "Q8_0"], STRIP),
    (["convert", "model.gguf", "new.gguf", "--type", "Q8_0"], TENSOR),
    (["convert", "model.gguf", "new.gguf"], "treadle.convert.partial_file:PartFile.copy"),
]


def ended(
    folder: Path, words: list[str], where: str, what: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(where=where, what=what), *words],
        cwd=folder,
        input="Once\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"},
    )


@pytest.fixture
def folder(tiny: WriteTiny, tmp_path: Path) -> Path:
    """With a model in it, of several pages."""
    shutil.copy(tiny("llama", "F32", n_embd=128, n_ff=256), tmp_path / "model.gguf")
    return tmp_path


CASES = [(SHRINK, *command) for command in COMMANDS]
CASES += [(COPY_OVER, *command) for command in COMMANDS[::2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words", "where"), CASES, ids=[f"{w[0]}-{where[-5:]}-{n[:4]}" for n, w, where in CASES]
)
def test_one_line_and_nothing_left(folder: Path, what: str, words: list[str], where: str) -> None:
    ran = ended(folder, words, where, what)
    *notes, last = ran.stderr.splitlines()
    assert ran.returncode == 1, ran
    assert last.startswith("treadle: error: model.gguf: shrank to "), ran.stderr
    assert words[0] == "chat" or not notes, ran.stderr
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "where"), COMMANDS[2:], ids=["quantize", "convert", "copy"])
def test_a_source_that_was_written_to(folder: Path, words: list[str], where: str) -> None:
    """What was read of it may be of two files."""
    ran = ended(folder, words, where, TOUCH)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("treadle: error: model.gguf: was modified while it was in use")
    assert ran.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "where"), COMMANDS[2:], ids=["quantize", "convert", "copy"])
def test_a_source_whose_name_went_to_another_file(
    folder: Path, words: list[str], where: str
) -> None:
    """A download that takes the file's place, say: what was begun is ended with the old one."""
    subprocess.run([*TREADLE, *words], cwd=folder, check=True, capture_output=True, timeout=120)
    (folder / "new.gguf").rename(folder / "expected.gguf")
    what = "open('x', 'wb').write(bytes(9000000)); os.replace('x', 'model.gguf')"
    ran = ended(folder, words, where, what)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (folder / "new.gguf").read_bytes() == (folder / "expected.gguf").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_quantize_keeps_what_is_done_when_it_is_stopped(
    folder: Path, number: signal.Signals
) -> None:
    what = f"os.kill(os.getpid(), {int(number)})"
    ran = ended(folder, COMMANDS[2][0], STRIP, what)
    kept = "treadle: partial output kept: run the same command to resume\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", kept)
    assert not (folder / "new.gguf").exists()
    again = subprocess.run([*TREADLE, *COMMANDS[2][0]], cwd=folder, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    made = (folder / "new.gguf").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["model.gguf", "new.gguf"]
    subprocess.run([*TREADLE, *COMMANDS[2][0], "--force"], cwd=folder, check=True)
    assert (folder / "new.gguf").read_bytes() == made
