"""Programs of a page as copies of one process that has treadle imported: a page starts several, and
the imports take most of the processor time of each. ``python -m tests.docs.program_copies SOCKET``.

``copy_client.py`` sends a program's arguments, folder, environment and standard streams to the
socket, and gets its process id and its exit code.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from tests.docs import page_runner

# What pages' programs import, and no more: each of pytest's processes has a process of this kind.
IMPORTED = (
    "pydantic",
    "treadle.api.model",
    "treadle.cli.app",
    "treadle.cli.commands.run",
    "treadle.cli.commands.serve",
    "treadle.cli.default_options",
    "treadle.cli.generation_options",
    "treadle.cli.load",
    "treadle.devices.cpu",
    "treadle.grammar.json_schema",
    "treadle.scheduler.scheduler",
    "treadle.server.serve",
    "treadle.tokenizer.bpe",
)
MOST = 1 << 17  # bytes of a request
END = b"END"

Program = Callable[[], object]


def programs() -> dict[str, Program]:
    from treadle.cli import run_process

    return {"treadle": run_process, "page": page_runner.main}


def wait_for_requests(listener: socket.socket) -> Program | None:
    """Answer requests until one says END. In a copy, return what it is to run."""
    while True:
        connection, _ = listener.accept()
        with connection:
            request, streams, _, _ = socket.recv_fds(connection, MOST, 3)
            if request == END:
                return None
            if os.fork() == 0:
                listener.close()
                return begin(connection, request, streams)
        for stream in streams:
            os.close(stream)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def begin(connection: socket.socket, request: bytes, streams: list[int]) -> Program | None:
    """Fork once more: the inner process becomes the program, the outer one tells of its end."""
    copy = os.fork()
    if copy:
        for stream in streams:
            os.close(stream)
        tell(connection, copy)
        os._exit(0)
    connection.close()
    folder, n_words, *rest = request.decode("utf-8", "surrogateescape").split("\0")
    sys.argv = rest[: int(n_words)]
    os.chdir(folder)
    os.environ.clear()
    for entry in rest[int(n_words) :]:
        name, _, value = entry.partition("=")
        os.environ[name] = value
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return programs()[sys.argv[0]]


def tell(connection: socket.socket, copy: int) -> None:
    """Send the process id of a copy, then its exit code; end it if nobody waits any more."""
    connection.send(str(copy).encode())
    ended = os.pidfd_open(copy)
    if ended not in select.select([connection.fileno(), ended], [], [])[0]:
        os.kill(copy, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    with suppress(BrokenPipeError):
        connection.send(str(code).encode())


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    programs()
    gc.collect()
    gc.freeze()  # else a copy's first collection would write to every page
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{sys.argv[1]}.new")
        listener.listen(16)
        os.rename(f"{sys.argv[1]}.new", sys.argv[1])  # whoever sees it may connect
        program = wait_for_requests(listener)
    if program is not None:
        program()
        return
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main()
