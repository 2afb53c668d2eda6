"""Files that shrink while they are mapped, in processes of their own: a mistake would end one."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.conftest import ROOT, WriteTiny
from treadle.devices.cpu import mapping_faults
from treadle.errors import CacheError
from treadle.system import SYSTEM

pytestmark = pytest.mark.skipif(SYSTEM.sigbus() is None, reason="no handler here")

START = """
import faulthandler, mmap, os, signal, sys, tempfile
import numpy as np
import treadle

path = sys.argv[1]
model = treadle.load(path, threads=2)

def elsewhere():
    "A read of a file that is not treadle's and has no page there."
    file = tempfile.TemporaryFile()
    file.write(bytes(8192)); file.flush()
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.truncate(0)
    print("reads", flush=True)
    mapped[5000]

def shrinks():
    "The model's own file."
    os.truncate(path, 0)
    try:
        model.logits([5] * 40)
    except treadle.FileError as error:
        return str(error)
"""


@pytest.fixture
def copy(tiny: WriteTiny, tmp_path: Path) -> Path:
    """A model that may be damaged; several pages of weights."""
    made = tmp_path / "model.gguf"
    shutil.copy(tiny("llama", "F32", n_embd=128, n_ff=256), made)
    return made


def python(
    script: str, *args: object, options: tuple[str, ...] = (), first: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", first + START + script, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


LIBRARY = """
other = treadle.load(sys.argv[2], threads=2)
model.close()
model = treadle.load(path, threads=int(sys.argv[3]), deterministic=True)
ids = list(range(40))
expected, alone = other.logits(ids), model.logits(ids)
session = model.session()
session.feed(ids)
made = model.generate("once upon", max_tokens=5000, sampling=treadle.Sampling(temperature=0))
pieces = [next(made)]
os.truncate(path, int(sys.argv[4]))
texts = []
def asked(what):
    try:
        what()
    except treadle.FileError as error:
        texts.append(str(error))
asked(lambda: pieces.extend(made))
asked(lambda: model.logits(ids))
asked(lambda: model.embed("a"))
asked(lambda: session.feed(ids))
assert session.n_past == 40, session.n_past
assert texts == [texts[0]] * 4, texts
assert f"{path}: shrank to {sys.argv[4]} bytes while it was in use" in texts[0], texts
assert (other.logits(ids) == expected).all()
model.close()
other.close()
open(path, "wb").write(open(sys.argv[2], "rb").read())
again = treadle.load(path, threads=2)
assert np.array_equal(again.logits(ids), expected)
print("whole")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "n_bytes"), [(1, 0), (2, 0), (2, 100_000)])
def test_a_model_that_shrinks_is_an_error(
    copy: Path, tiny: WriteTiny, threads: int, n_bytes: int
) -> None:
    """Of every run from then on; sessions stay as they were, and so do other models."""
    ran = python(LIBRARY, copy, tiny("llama", "Q8_0"), threads, n_bytes)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "whole\n", "")


NUMPY = """
gguf = model.gguf
tensor = gguf.tensors["blk.0.ffn_up.weight"]
before = tensor.data[:4].copy()
os.truncate(path, tensor.offset)  # and what is left of the page is zeros
assert not tensor.data.any()
assert not bytes(tensor.data).strip(b"\\0")
try:
    gguf.check()
except treadle.FileError as error:
    print("shrank" in str(error))
"""


@pytest.mark.slow
def test_numpy_reads_zeros_and_check_tells(copy: Path) -> None:
    ran = python(NUMPY, copy)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")


FORK = """
import warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of every fork of a process with threads
child = os.fork()
text = shrinks()
if not child:
    os._exit(0 if "shrank" in text else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "shrank" in text)
"""


@pytest.mark.slow
def test_a_forked_child_is_guarded_too(copy: Path) -> None:
    ran = python(FORK, copy)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0 True\n", "")


# -- other people's faults ------------------------------------------------------------------------

FATAL = "Fatal Python error: Bus error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "script", "n_told"),
    [
        ((), "shrinks(); elsewhere()", 0),
        (("-X", "faulthandler"), "shrinks(); elsewhere()", 1),
        ((), "faulthandler.enable(); elsewhere()", 1),
        ((), "faulthandler.enable(); treadle.load(path); elsewhere()", 1),
        ((), "faulthandler.enable(); faulthandler.disable(); elsewhere()", 0),
        ((), "print('reads', flush=True); os.kill(os.getpid(), signal.SIGBUS)", 0),
        (
            ("-X", "faulthandler"),
            "print('reads', flush=True); os.kill(os.getpid(), signal.SIGBUS)",
            1,
        ),
    ],
)
def test_a_fault_elsewhere_ends_the_process_as_ever(
    copy: Path, options: tuple[str, ...], script: str, n_told: int
) -> None:
    """With the line of Python's own handler, once, if it is in place: before ours, or after."""
    ran = python(script, copy, options=options)
    assert (ran.returncode, ran.stdout) == (-signal.SIGBUS, "reads\n")
    assert ran.stderr.count(FATAL) == n_told
    assert (ran.stderr == "") == (n_told == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "script"),
    [
        (("-X", "faulthandler"), ""),
        ((), "faulthandler.enable(); faulthandler.disable();"),
        (("-X", "faulthandler"), "faulthandler.disable(); treadle.load(path);"),
        ((), "signal.signal(signal.SIGBUS, signal.SIG_DFL); treadle.load(path);"),
    ],
)
def test_other_handlers_do_not_see_ours(copy: Path, options: tuple[str, ...], script: str) -> None:
    ran = python(f"{script}print('shrank' in shrinks())", copy, options=options)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "seen"),
    [
        ("lambda number, frame: seen.append(int(number))", [int(signal.SIGBUS)]),
        ("signal.SIG_IGN", []),
    ],
)
def test_a_signal_that_was_sent_goes_to_the_handler_before(
    copy: Path, handler: str, seen: list[int]
) -> None:
    first = f"import signal; seen = []; signal.signal(signal.SIGBUS, {handler})"
    script = "os.kill(os.getpid(), signal.SIGBUS); print(seen, 'shrank' in shrinks())"
    ran = python(script, copy, first=first)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{seen} True\n", "")


PUT_BACK = """
from treadle.devices.cpu import mapping_faults
guard = mapping_faults._guard()
handler = lambda: mapping_faults._handler_of(guard._sigaction(None))
before = mapping_faults._handler_of(guard.before)
shown = [handler() == guard.address]
guard.remove()
guard.remove()
shown.append(handler() == before)
guard.install()
shown.append(handler() == guard.address)
print(shown, before > mapping_faults.IGNORE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
def test_what_was_there_before_is_put_back(copy: Path, options: tuple[str, ...]) -> None:
    ran = python(PUT_BACK, copy, options=options)
    shown = f"[True, True, {not options}] {bool(options)}\n"  # a handler by then stays in front
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, shown, "")


def test_without_a_handler_files_are_mapped_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line says so, once."""

    def refuse(*_: object) -> None:
        raise CacheError("not in the cache")

    monkeypatch.setattr(mapping_faults, "load_cached", lambda *_: None)
    monkeypatch.setattr(mapping_faults, "load_kernels", refuse)
    monkeypatch.setattr(mapping_faults, "_guard", lru_cache(mapping_faults._guard.__wrapped__))
    with caplog.at_level(logging.WARNING, "treadle"):
        mapping_faults.guard_mappings()
        mapping_faults.guard_mappings()
    assert [r.message for r in caplog.records] == [
        "not in the cache; without this handler, truncating a model file while it is read crashes "
        "the process"
    ]
    monkeypatch.setattr(SYSTEM, "sigbus", lambda: None)
    monkeypatch.setattr(mapping_faults, "_guard", lru_cache(mapping_faults._guard.__wrapped__))
    mapping_faults.guard_mappings()
    assert len(caplog.records) == 1
