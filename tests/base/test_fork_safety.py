"""Forks while another thread uses a model: the child says so at once, and never hangs."""

import _imp
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import WriteTiny
from treadle.base.fork_safety import UseLock, is_held, library_lock
from treadle.errors import ForkedError

SCRIPT = """
import os, sys, threading, warnings
import treadle
warnings.simplefilter("ignore")  # Python 3.12 warns of every fork of a process with threads
path, where = sys.argv[1:]
model = treadle.load(path, threads=2)
expected = model.logits([5] * 40).tobytes()
session = model.session()
session.feed([1, 2])
there, go = threading.Event(), threading.Event()

def wait(*args):
    there.set()
    go.wait()
    return args[0] if args else None

made = model.generate([1], max_tokens=2, custom=wait)

def other():
    if where == "run":
        run = model.engine.device.run
        model.engine.device.run = lambda *args, **more: (wait(), run(*args, **more))[1]
        model.logits([7] * 40)
    else:
        made.finish()

thread = threading.Thread(target=other)
thread.start()
there.wait()
child = os.fork()
if not child:
    said = []
    for use in (
        lambda: model.logits([5]),
        lambda: model.generate([1], max_tokens=1).finish(),
        lambda: session.feed([3]),
        lambda: model.embed("a"),
        *([made.finish, lambda: next(made)] if where == "sampler" else []),  # another reads it
    ):
        try:
            use()
        except treadle.ForkedError as error:
            said.append(str(error))
    print(said.count(said[0]), said[0], flush=True)
    session.close()
    model.close()
    with treadle.load(path, threads=2) as own:
        print(own.logits([5] * 40).tobytes() == expected, flush=True)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
go.set()
thread.join()
print(model.logits([5] * 40).tobytes() == expected)
model.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("where", ["run", "sampler"])
def test_a_fork_in_the_middle_of_a_step(tiny: WriteTiny, where: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny("llama", n_layer=2)), where]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    why = (
        "this process was forked while another thread used the model: "
        "load the model in the child, or start the child with spawn instead of fork"
    )
    n = 6 if where == "sampler" else 4
    assert (ran.stdout, ran.stderr) == (f"{n} {why}\nTrue\n7\nTrue\n", "")


def test_a_lost_lock() -> None:
    lock = UseLock("slept", "wake it")
    with lock, lock:
        lock.after_fork()
    lock.mark_lost()
    assert not lock.acquire(blocking=False)
    with pytest.raises(ForkedError, match="while another thread slept: wake it"), lock:
        pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer here")
def test_a_signal_leaves_no_lock_taken() -> None:
    """What a handler raises comes in the block, or where the lock is free: of a ``with`` that is
    Python's every second time left it taken.
    """

    class Now(Exception):
        pass

    def ring(*_: object) -> None:
        raise Now

    def free() -> None:
        found.append(not is_held(lock))

    lock, found = UseLock(), list[bool]()
    usual = signal.signal(signal.SIGALRM, ring)
    try:
        for i in range(100):
            with suppress(Now):
                try:
                    # Again and again: Python drops what a handler raises within a finalizer.
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-6 * i, 0.5)
                    while True:
                        with lock:
                            pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            thread = threading.Thread(target=free)
            thread.start()
            thread.join()
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert found == [True] * 100


def test_the_own_thread_may_hold_a_lock() -> None:
    lock = threading.RLock()
    held = []
    with lock:
        assert not is_held(lock)
        thread = threading.Thread(target=lambda: held.append(is_held(lock)))
        thread.start()
        thread.join()
    assert held == [True]
    assert not is_held(lock)


IMPORT_SCRIPT = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from treadle.base.fast_classes import cached_property
import treadle.base.fork_safety
sys.path.insert(0, sys.argv[1])
there, go, parent = threading.Event(), threading.Event(), os.getpid()

class Thing:
    @cached_property
    def value(self):
        if os.getpid() == parent:
            there.set()
            go.wait()
        return 5

def work():
    if sys.argv[2] == "import":
        import slow
        return slow.value
    return Thing().value

sys.modules["meeting"] = sys.modules["__main__"]
found = []
thread = threading.Thread(target=lambda: found.append(work()))
thread.start()
there.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(work())
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go.set()
thread.join()
print(code, found)
"""
SLOW = """
import os
from meeting import go, parent, there
if os.getpid() == parent:
    there.set()
    go.wait()
value = 5
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("what", ["import", "property"])
def test_what_python_itself_leaves_locked(what: str, tmp_path: Path) -> None:
    """A module that another thread is importing, and, before Python 3.12, every cached property."""
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", IMPORT_SCRIPT, str(tmp_path), what]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout, ran.stderr) == ("5 [5]\n", "")


ONCE_SCRIPT = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
import treadle.base.fork_safety
sys.path.insert(0, sys.argv[1])
there = sys.begun = threading.Event()
thread = threading.Thread(target=lambda: __import__("once"))
thread.start()
there.wait()
child = os.fork()
import once
if not child:
    os._exit(once.value)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
ONCE = """
import sys, time
if sys.begun.is_set():
    raise ImportError("it is half made")
sys.begun.set()
time.sleep(0.2)
value = 5
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_imports_of_other_threads(tmp_path: Path) -> None:
    """Modules in C, numpy.random's for example, cannot be imported anew when they are half made."""
    (tmp_path / "once.py").write_text(ONCE)
    command = [sys.executable, "-c", ONCE_SCRIPT, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout, ran.stderr) == ("5\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_calls_that_must_not_be_cut() -> None:
    there, ended = threading.Event(), threading.Event()

    def work() -> None:
        with library_lock:
            there.set()
            time.sleep(0.2)
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    there.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
    if not child:
        os._exit(ended.is_set() + 2 * library_lock.locked())
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert not library_lock.locked()


class Now(Exception):
    """What a signal's handler raises."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer here")
def test_a_signal_in_the_middle_of_a_fork() -> None:
    """It had ended the wait, been dropped, and left ``library_lock`` taken for ever."""

    def ring(*_: object) -> None:
        raise Now

    def work() -> None:
        with library_lock:
            there.set()
            time.sleep(0.3)

    there, usual = threading.Event(), signal.signal(signal.SIGALRM, ring)
    thread = threading.Thread(target=work)
    thread.start()
    there.wait()
    raised = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            child = os.fork()
        if not child:
            kept = signal.getsignal(signal.SIGALRM) is ring
            os._exit(kept + 2 * library_lock.locked() + 4 * thread.is_alive())
        time.sleep(5)
    except Now:
        raised = True
    finally:
        signal.signal(signal.SIGALRM, usual)
        thread.join()
    assert raised
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert not library_lock.locked()
    assert not _imp.lock_held()


MANY_SCRIPT = """
import faulthandler, os, sys, threading, warnings
import treadle
warnings.simplefilter("ignore")
path, n = sys.argv[1], int(sys.argv[2])
model, over = treadle.load(path, threads=2), threading.Event()
uses = (
    lambda: model.logits([5] * 9),
    lambda: model.generate([1, 5], max_tokens=3).finish(),
    lambda: treadle.load(path, threads=2).close(),
)

def other(use):
    while not over.is_set():
        use()

threads = [threading.Thread(target=other, args=(use,)) for use in uses]
for thread in threads:
    thread.start()
found = set()
for _ in range(n):
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)
        for use in uses:
            try:
                use()
            except treadle.ForkedError:
                pass
        os._exit(0)
    found.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
for thread in threads:
    thread.join()
print(found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_many_forks_beside_threads_at_work(tiny: WriteTiny) -> None:
    """Wherever the others are at the fork, no child hangs. By hand, with more of them."""
    command = [sys.executable, "-c", MANY_SCRIPT, str(tiny("llama", n_layer=2)), "25"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ran.stdout, ran.stderr) == ("{0}\n", "")
