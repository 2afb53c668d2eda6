"""The word that a signal changes: at once, for the main thread alone, and nothing is left of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from treadle.devices.cpu import thread_team as module
from treadle.devices.cpu.thread_team import AbortFlag


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that a handler in Python saw."""
    numbers: list[int] = []
    usual = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, usual)


def word(alarm: AbortFlag) -> int:
    return ctypes.c_int64.from_address(alarm.address).value


def test_a_signal_changes_the_word(heard: list[int]) -> None:
    for _ in range(3):  # each time anew
        with AbortFlag() as alarm:
            assert (word(alarm), alarm.is_set) == (0, False)
            signal.raise_signal(signal.SIGUSR1)
            assert (word(alarm), alarm.is_set) == (signal.SIGUSR1, True)
            for _ in range(20):  # more than the word has room for
                signal.raise_signal(signal.SIGUSR1)
    with AbortFlag() as alarm:
        assert not alarm.is_set
    assert len(heard) == 63


def test_an_event_loop_hears_of_it_too(heard: list[int]) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    usual = signal.set_wakeup_fd(write)
    try:
        with AbortFlag():
            signal.raise_signal(signal.SIGUSR1)
        assert signal.set_wakeup_fd(write) == write
        assert os.read(read, 9) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(usual)
        os.close(read)
        os.close(write)


def test_other_threads_have_none() -> None:
    seen: list[tuple[int, bool]] = []

    def look() -> None:
        with AbortFlag() as alarm:
            seen.append((alarm.address, alarm.is_set))

    with AbortFlag():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        mine = signal.set_wakeup_fd(-1)  # still in place
        signal.set_wakeup_fd(mine)
    assert seen == [(0, False)]
    assert mine >= 0


def test_a_handler_that_raises_leaves_nothing(heard: list[int]) -> None:
    def leave(*_: object) -> None:
        raise TimeoutError

    usual = signal.signal(signal.SIGUSR2, leave)
    try:
        with pytest.raises(TimeoutError), AbortFlag():
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, usual)
    assert signal.set_wakeup_fd(-1) == -1
    with AbortFlag() as alarm:
        assert not alarm.is_set


def test_systems_without_files_in_memory(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    module._word.cache_clear()
    try:
        with AbortFlag() as alarm:
            signal.raise_signal(signal.SIGUSR1)
            assert word(alarm) == signal.SIGUSR1
    finally:
        module._word.cache_clear()


def test_a_forked_child_has_one_of_its_own() -> None:
    program = """
import os, signal
from treadle.devices.cpu.thread_team import AbortFlag
signal.signal(signal.SIGUSR1, lambda *_: None)
with AbortFlag():
    pass
child = os.fork()
if not child:
    with AbortFlag():
        signal.raise_signal(signal.SIGUSR1)
        os._exit(0)
os.waitpid(child, 0)
with AbortFlag() as alarm:
    print(alarm.is_set)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == ("False\n", "")
