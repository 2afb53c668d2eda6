from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest

from treadle.server.batch_file import work as module
from treadle.server.batch_file.lines import InputLine
from treadle.server.batch_file.work import OutputLine, work

LINES = [InputLine(n, b"%d" % n) for n in range(100)]


def run(answer: module.Answer, lines: Iterator[InputLine] | None = None) -> list[bytes]:
    out: list[bytes] = []
    asyncio.run(work(iter(LINES) if lines is None else lines, answer, lambda w: out.append(w.data)))
    return out


def test_order_is_kept_whatever_ends_first() -> None:
    pause = random.Random(4)

    async def answer(line: InputLine) -> OutputLine:
        for _ in range(pause.randrange(20)):
            await asyncio.sleep(0)
        return OutputLine(line.raw)

    assert run(answer) == [line.raw for line in LINES]
    assert run(answer, iter([])) == []


def test_lines_in_hand_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_HAND", 7)
    in_hand = most = 0
    full = threading.Event()

    async def answer(line: InputLine) -> OutputLine:
        nonlocal in_hand, most
        in_hand += 1
        most = max(most, in_hand)
        if in_hand == 7:
            await asyncio.sleep(0.05)  # an eighth would have time to begin
            full.set()
        while not full.is_set():  # none ends before all seven are there, however slow the reader
            await asyncio.sleep(0.001)
        in_hand -= 1
        return OutputLine(line.raw)

    assert len(run(answer)) == 100
    assert most == 7


@pytest.mark.parametrize(("most", "expected"), [(10, 5), (7, 3), (1, 1)])
def test_bytes_of_lines_in_hand_are_bounded(
    most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of two bytes each; one that is larger than the bound is answered alone."""
    monkeypatch.setattr(module, "MAX_LINES", most)
    lines = [InputLine(n, b"%02d" % n) for n in range(20)]
    in_hand = largest = 0

    async def answer(line: InputLine) -> OutputLine:
        nonlocal in_hand, largest
        in_hand += 1
        largest = max(largest, in_hand)
        await asyncio.sleep(0.01)
        in_hand -= 1
        return OutputLine(line.raw)

    assert run(answer, iter(lines)) == [line.raw for line in lines]
    assert largest == expected


def test_a_slow_line_bounds_what_is_kept_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 1000)
    begun: list[int] = []

    async def answer(line: InputLine) -> OutputLine:
        begun.append(line.number)
        if not line.number:
            while len(begun) < 20 and not quiet.is_set():
                before = len(begun)
                await asyncio.sleep(0.05)
                if len(begun) == before:
                    quiet.set()
        return OutputLine(bytes(100))

    quiet = threading.Event()
    assert len(run(answer)) == 100
    assert quiet.is_set()  # nothing more was begun, until the first line was written
    assert begun == list(range(100))


def test_what_cannot_be_survived_ends_it_and_cancels_the_rest() -> None:
    cancelled: list[int] = []
    begun: list[int] = []

    async def answer(line: InputLine) -> OutputLine:
        begun.append(line.number)
        if line.number == 3:
            while len(begun) < 20:
                await asyncio.sleep(0)
            raise RuntimeError("the disk is gone")
        try:
            await asyncio.sleep(0 if line.number < 3 else 60)
        except asyncio.CancelledError:
            cancelled.append(line.number)
            raise
        return OutputLine(line.raw)

    with pytest.raises(RuntimeError, match="the disk is gone"):
        run(answer)
    assert sorted(cancelled) == sorted(begun)[4:]


def test_an_input_that_breaks_ends_it_after_what_it_gave() -> None:
    def broken() -> Iterator[InputLine]:
        yield from LINES[:3]
        raise OSError("input/output error")

    out: list[bytes] = []

    async def answer(line: InputLine) -> OutputLine:
        return OutputLine(line.raw)

    with pytest.raises(OSError, match="input/output"):
        asyncio.run(work(broken(), answer, lambda w: out.append(w.data)))
    assert out == [line.raw for line in LINES[:3]]


def test_a_line_is_answered_before_the_next_one_comes() -> None:
    """As somebody who types them sees it."""
    written = threading.Semaphore(0)

    def typed() -> Iterator[InputLine]:
        for line in LINES[:3]:
            yield line
            assert written.acquire(timeout=60)

    async def answer(line: InputLine) -> OutputLine:
        return OutputLine(line.raw)

    asyncio.run(work(typed(), answer, lambda w: written.release()))
