"""Process that renders chat templates: requests on standard input, replies on standard output.

``renderer`` starts it. A request is its length in eight bytes and a JSON list:

::

    ["render", source, variables, now]
    ["names", source]
    ["check", source]      the reply's text is empty
    ["compile", source]    no reply

A reply is one byte (1 for a result, 0 for an error message), the length in eight bytes, and UTF-8
text. When the process has started it writes one byte, READY.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import struct
import sys
from contextlib import suppress
from datetime import datetime
from typing import NoReturn

from treadle.errors import TemplateError
from treadle.system import SYSTEM

MAX_TEXT = 1 << 24  # characters a template may render: a context of millions of tokens
SIZE = struct.Struct("<Q")
REPLY = struct.Struct("<?Q")
READY = b"r"
# exit codes; faulthandler's is 1
SPENT_TIME = 1
SPENT_MEMORY = 12
BROKEN = 13


def serve(limit_s: float, limit_bytes: int) -> NoReturn:
    """Answer requests until standard input ends. The process exits when a request takes more than
    ``limit_s`` seconds or ``limit_bytes`` of memory beyond those at its start.
    """
    try:
        _bound(limit_bytes)
        importlib.import_module("treadle.chat.template.sandbox")  # not counted as rendering time
        requests = sys.stdin.buffer
        replies = sys.stdout.buffer
        replies.write(READY)
        replies.flush()
        while head := requests.read(SIZE.size):
            _end_after(limit_s)
            reply = _answer(requests.read(*SIZE.unpack(head)))
            _end_after(0)
            replies.write(reply)
            replies.flush()
    except MemoryError:
        os._exit(SPENT_MEMORY)
    except BaseException:
        os._exit(BROKEN)
    os._exit(0)


def _answer(request: bytes) -> bytes:
    # With jinja2, which the parent process does not import.
    from treadle.chat.template import sandbox

    task, source, *rest = json.loads(request.decode("utf-8", "surrogatepass"))
    if task == "compile":
        with suppress(Exception):  # the rendering will report it
            sandbox.compiled(source)
        return b""
    fine = True
    try:
        if task == "names":
            text = "\n".join(sandbox.names(source))
        elif task == "check":
            sandbox.check(source)
            text = ""
        else:
            variables, now = rest
            text = sandbox.render(source, variables, datetime.fromisoformat(now))
        if len(text) > MAX_TEXT:
            raise TemplateError(f"chat template: its output has more than {MAX_TEXT} characters")
    except TemplateError as e:
        fine = False
        text = str(e)
    octets = text.encode("utf-8", "surrogatepass")
    return REPLY.pack(fine, len(octets)) + octets


def _bound(limit_bytes: int) -> None:
    """Limit this process to ``limit_bytes`` more memory, where the system can, and
    ignore SIGINT.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    SYSTEM.bound_memory(limit_bytes)


def _end_after(seconds: float) -> None:
    """End this process after ``seconds``, even inside C code; 0 cancels."""
    if SYSTEM.TIMERS:
        SYSTEM.end_after(seconds)
        return
    import faulthandler

    faulthandler.cancel_dump_traceback_later()
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
