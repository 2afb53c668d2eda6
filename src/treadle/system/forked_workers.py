"""Worker processes forked from this one: they share its memory, and so what it has imported.

All workers take messages from one queue, so that none is idle while another has two. They close
all files of this process. A worker ends when this process has ended or closed the queue, or after
``IDLE_S`` seconds without a message.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

assert sys.platform != "win32"  # the type checker skips the rest there

IDLE_S = 10.0
MAX_MESSAGE = 1 << 16  # bytes
Answer = Callable[[Any], bytes]

_FRAME = struct.Struct("=iq")  # number of a message, and the bytes of its answer that follow, or:
_TAKEN = -1  # the worker begins with the message
_FAILED = -2  # ``answer`` raised an exception


class ForkedWorker:
    """A worker process, with the socket of its answers. ``taken``: the number of the message that
    it works on; None between messages.
    """

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.answers = answers
        self.taken: int | None = None
        self._received = bytearray()

    def receive(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield each answer that has arrived, with its message's number first; the answer is None
        where ``answer`` raised an exception. Raises EOFError if the worker has ended.
        """
        ended = False
        while not ended:
            try:
                part = self.answers.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            ended = not part
            self._received += part
        while len(self._received) >= _FRAME.size:
            number, n_bytes = _FRAME.unpack_from(self._received)
            if n_bytes == _TAKEN:
                self.taken = number
                del self._received[: _FRAME.size]
                continue
            end = _FRAME.size + max(n_bytes, 0)
            if len(self._received) < end:
                break
            answer = bytes(self._received[_FRAME.size : end])
            del self._received[:end]
            self.taken = None
            yield number, None if n_bytes == _FAILED else answer
        if ended:
            raise EOFError

    def end(self) -> None:
        """Kill the process, unless it has ended, and wait for its end."""
        self.answers.close()
        with contextlib.suppress(ChildProcessError):  # the program has waited for it
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):  # so the number is still its own
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


class ForkedWorkers:
    """Up to ``n`` workers that call ``answer(message)``. ``start`` forks them: call it only where
    no other thread holds a lock that ``answer`` needs.

    Messages are pickled; answers are bytes. Each worker first calls ``begin``. Not thread-safe,
    except ``wait``.
    """

    def __init__(self, answer: Answer, n: int, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._answer = answer
        self._parent = os.getpid()
        self.workers: list[ForkedWorker] = []
        self._sent: set[int] = set()  # numbers of messages without an answer
        self._queue, self._end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._queue.setblocking(False)
        self._to_start = n

    @property
    def alive(self) -> bool:
        """Whether there are workers, or will be once they are started."""
        return bool(self.workers or self._to_start)

    def start(self) -> None:
        """Fork the workers; they begin with the messages that are queued already. Raises OSError if
        not even one can be forked.
        """
        failure: OSError | None = None
        while self._to_start and failure is None:
            self._to_start -= 1
            try:
                self._fork()
            except OSError as error:  # no memory, or too many processes
                failure = error
        self._to_start = 0
        self._end.close()
        if failure is not None and not self.workers:
            self.close()
            raise failure

    def _fork(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: see above
                pid = os.fork()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        if not pid:
            try:
                self._begin()
                _become_worker((self._end.fileno(), theirs.fileno()))
                work(self._answer, self._end, theirs)
            finally:
                os._exit(0)
        theirs.close()
        ours.setblocking(False)
        self.workers.append(ForkedWorker(pid, ours))

    def wants(self) -> int:
        """Return how many messages to send now: two per worker, less those without an answer."""
        return max(0, 2 * (len(self.workers) + self._to_start) - len(self._sent))

    def send(self, number: int, message: Any) -> bool:
        """Queue a message under a unique ``number``. Return False if it cannot be pickled, exceeds
        MAX_MESSAGE bytes, or the queue is full.
        """
        try:
            data = pickle.dumps((number, message))
        except Exception:  # a class inside a function, say
            return False
        if len(data) > MAX_MESSAGE:
            return False
        try:
            self._queue.send(data, socket.MSG_NOSIGNAL)
        except OSError:  # full, or nobody is left to read it
            return False
        self._sent.add(number)
        return True

    def wait(self, seconds: float) -> None:
        """Wait until an answer has arrived or a worker has ended, at most ``seconds``. Any thread
        may call this.
        """
        poll = select.poll()
        numbers = [worker.answers.fileno() for worker in [*self.workers]]
        numbers = [number for number in numbers if number >= 0]  # else another thread closed it
        for number in numbers:
            poll.register(number, select.POLLIN)
        if numbers:
            poll.poll(1000 * seconds)

    def receive(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield each answer that has arrived, with its message's number first; the answer is None
        where ``answer`` raised an exception, or the message was lost with its worker.
        """
        for worker in [*self.workers]:
            try:
                for number, answer in worker.receive():
                    self._sent.discard(number)
                    yield number, answer
            except EOFError:
                self.workers.remove(worker)
                worker.end()
                if worker.taken is not None:
                    self._sent.discard(worker.taken)
                    yield worker.taken, None
        if not self.workers and not self._to_start:
            lost = sorted(self._sent)
            self._sent.clear()
            for number in lost:
                yield number, None

    def close(self) -> None:
        """Kill the workers. Idempotent; in a forked child it only closes descriptors."""
        self._queue.close()
        self._end.close()
        for worker in self.workers:
            if os.getpid() == self._parent:
                worker.end()
            else:
                worker.answers.close()
        self.workers.clear()
        self._to_start = 0


def _become_worker(kept: tuple[int, ...]) -> None:
    """In a worker: reset signals, close all files but the descriptors ``kept``, detach the standard
    streams.
    """
    gc.freeze()  # else a collection would write to, and so copy, all of the parent's memory
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent decides
    for fd in _open_files():
        if fd not in kept and fd > 2:
            with contextlib.suppress(OSError):
                os.close(fd)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # whoever reads our output waits for the end of all who could write it
        if fd not in kept:
            os.dup2(nothing, fd)
    if nothing > 2:
        os.close(nothing)


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:  # without /proc: then they stay open
        return []


def work(answer: Answer, queue: socket.socket, answers: socket.socket) -> None:
    """Send ``answer(message)`` for each message of ``queue``, until the queue is closed, nothing
    comes for IDLE_S seconds, or nobody reads ``answers``. An exception in ``answer`` is reported as
    a failure, and the work goes on.
    """
    queue.settimeout(IDLE_S)
    answers.settimeout(IDLE_S)
    try:
        while data := queue.recv(MAX_MESSAGE):
            number, message = pickle.loads(data)
            answers.sendall(_FRAME.pack(number, _TAKEN))
            try:
                result = answer(message)
            except Exception:  # the parent answers it itself, and so meets the same error
                answers.sendall(_FRAME.pack(number, _FAILED))
            else:
                answers.sendall(_FRAME.pack(number, len(result)) + result)
    except OSError:  # too long without a message, or nobody reads the answers
        return
