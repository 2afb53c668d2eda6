"""Blocks that signals wait for."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from treadle.base.interrupts import HELD, in_main_interpreter, interrupts_held

OTHERS = [number for number in HELD if number != signal.SIGINT]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each test leaves them as they were."""
    before = {number: signal.getsignal(number) for number in HELD}
    yield
    found = {number: signal.getsignal(number) for number in HELD}
    for number, usual in before.items():
        signal.signal(number, usual)
    assert found == before


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    reached = []

    def press() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        press()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_left_to_whoever_ignores_it() -> None:
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_other_threads_hold_no_interrupts() -> None:
    seen = []

    def look() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


class TimeIsOver(Exception):
    pass


def raising(*_: Any) -> None:
    raise TimeIsOver


@pytest.mark.parametrize("number", OTHERS)
def test_other_signals_wait_too(number: int) -> None:
    """A limit of time that raised in the middle left pages counted that nobody had written."""
    reached, usual = [], signal.signal(number, raising)

    def work() -> None:
        with interrupts_held() as held:
            signal.raise_signal(number)
            reached.append("held")
            with pytest.raises(TimeIsOver), held.allow():
                pass
            with pytest.raises(TimeIsOver), held.allow():
                signal.raise_signal(number)
            with interrupts_held():
                signal.raise_signal(number)
            reached.append("the end")

    try:
        with pytest.raises(TimeIsOver):
            work()
        assert reached == ["held", "the end"]
        assert signal.getsignal(number) is raising
    finally:
        signal.signal(number, usual)


@pytest.mark.parametrize("at", range(8))
def test_handlers_are_given_back_whatever_they_raise(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both signals arrive while the handlers are changed: at the ``at``-th change."""
    usual = signal.signal(signal.SIGALRM, raising)
    changes = [0]
    change = _signal.signal

    def changing(number: int, handler: Any) -> Any:
        changes[0] += 1
        if changes[0] == at:
            signal.raise_signal(signal.SIGALRM)
        if changes[0] == at + 1:
            signal.raise_signal(signal.SIGINT)
        return change(number, handler)

    raised: list[type[BaseException]] = []
    try:
        with monkeypatch.context() as patch:
            patch.setattr("_signal.signal", changing)
            try:
                with interrupts_held() as held, held.allow():
                    pass
            except (TimeIsOver, KeyboardInterrupt) as error:
                raised.append(type(error))
        assert len(raised) == (changes[0] > 0 and at <= changes[0])
        assert signal.getsignal(signal.SIGALRM) is raising
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, usual)


def test_what_is_raised_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of an interrupted call has pages: they are free when nobody refers to it."""

    class Held:
        pass

    alive: list[weakref.ref[Held]] = []
    pressed: list[int] = []
    change = _signal.signal

    def changing(number: int, handler: Any) -> Any:
        made = change(number, handler)
        if handler is signal.default_int_handler and not pressed:  # given back
            pressed.append(number)
            signal.raise_signal(signal.SIGINT)
        return made

    def work() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        with monkeypatch.context() as patch:
            patch.setattr("_signal.signal", changing)
            with interrupts_held():
                pass

    gc.disable()
    try:
        with suppress(KeyboardInterrupt):
            work()
        assert alive[0]() is None
    finally:
        gc.enable()


SUBINTERPRETER = """
import importlib, sys
for name in ("_interpreters", "_xxsubinterpreters"):
    try:
        interpreters = importlib.import_module(name)
        break
    except ImportError:
        pass
interpreters.run_string(interpreters.create(), '''
try:
    from treadle.errors import UnsupportedError
    from treadle.devices import open_device
    from treadle.base.interrupts import in_main_interpreter
except ImportError as error:  # numpy's, in an interpreter with a lock of its own
    print(False, "is a subinterpreter")
else:
    try:
        open_device("cpu", None, 1, None)
    except UnsupportedError as error:
        print(in_main_interpreter(), error)
''')
"""


def test_a_subinterpreter_is_refused() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SUBINTERPRETER]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.startswith("False "), ran.stderr
    assert "is a subinterpreter" in ran.stdout
    assert in_main_interpreter()
