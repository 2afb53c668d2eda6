"""Starts a program of a page: ``python copy_client.py SOCKET PROGRAM ARGUMENT...`` sends it to the
process of ``program_copies.py``, passes signals on, and ends as the program does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(sys.argv[1])
    words = sys.argv[2:]
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    text = "\0".join([os.getcwd(), str(len(words)), *words, *environment])
    socket.send_fds(server, [text.encode("utf-8", "surrogateescape")], [0, 1, 2])
    copy = int(server.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(copy, number))
    code = int(server.recv(64) or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
