"""An engine process without a model: ``python -m`` this, as ``treadle.cli.engine_process``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from treadle.server.router.engine import EngineOrder, ReportPipe, end_with_router


def run(value: Mapping[str, Any], report: int, life: int) -> int:
    """What the order's ``ref`` says: wait for SIGTERM, fail, or break."""
    order = EngineOrder.of(value)
    pipe = ReportPipe(report)
    end_with_router(life)
    if order.ref == "fail":
        pipe.send(failed="as it was told")
        return 1
    if order.ref == "break":
        os.kill(os.getpid(), signal.SIGSEGV)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    pipe("compile", 1, 2)
    print("this is no report", flush=True)
    pipe.send(ready={"socket": order.socket, "pid": os.getpid(), "parent": os.getppid()})
    while not over.wait(0.01):
        pass
    return 0


if __name__ == "__main__":
    if "--warm" in sys.argv:
        from treadle.system.fork_server import ForkServer

        ForkServer(run).serve()
        os._exit(0)
    line = sys.stdin.buffer.readline()
    report = os.dup(1)
    os.dup2(2, 1)
    os._exit(run(json.loads(line), report, 0))
