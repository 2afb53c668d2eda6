"""An engine process: the ordinary server of one model, at a socket that only the router knows.

It reports on a pipe, as lines of JSON: ``progress`` of the load, ``ready`` with the address and the
memory, or ``failed`` with the reason. A second pipe carries nothing: it closes when the router
ends, and then the engine ends too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.base.fork_safety import declare_harmless

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from treadle.api.model import Model
    from treadle.api.speech import SpeechRecognizer
    from treadle.server.requests.service import ServerSettings

REPORT_S = 0.1  # between two reports of one stage of the load
GRACE_S = 0.0  # the router ends an engine only when its calls have ended, or are to end
ROUTER_GONE = 3  # exit code


@dataclass(frozen=True)
class EngineOrder:
    """The model and the settings that an engine is to serve.

    name: of the model. ref, args: as of ``ServedModel``. socket: path of the UNIX socket to listen
    on, "" for a TCP port of this machine. keys: secrets, one for each API key of the router, so
    that its keys share the engine fairly. kv_bytes: bound of the KV cache where the options name
    none. turns: folder of the locks by which engines take turns, "" for none.
    """

    name: str
    ref: str
    args: tuple[str, ...]
    socket: str
    keys: tuple[str, ...]
    kv_bytes: int
    turns: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the order as a JSON object."""
        return asdict(self)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> EngineOrder:
        """Return the order in ``value``, a JSON object that ``as_json`` has made."""
        lists = {name: tuple(value[name]) for name in ("args", "keys")}
        return cls(**{**value, **lists})


class ReportPipe:
    """The engine's end of the pipe to the router; ``number``: its file descriptor. It is also a
    progress callback: ``pipe(stage, done, total)``.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._stage = ""
        self._told_s = 0.0
        self._lock = threading.Lock()

    def send(self, **report: Any) -> None:
        """Write one report as a line of JSON. A closed pipe is ignored: ``end_with_router`` ends
        the process.
        """
        line = json.dumps(report).encode() + b"\n"
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._number, line) :]
            except OSError:
                pass

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report ``done`` of ``total`` of a stage of the load; the same stage at most once each
        ``REPORT_S`` seconds.
        """
        now = time.monotonic()
        if stage == self._stage and now - self._told_s < REPORT_S:
            return
        self._stage = stage
        self._told_s = now
        self.send(progress={"stage": stage, "done": done, "total": total})


def end_with_router(number: int) -> None:
    """Start a thread that ends this process when the router ends: when the pipe with file
    descriptor ``number`` is closed at its other end.
    """

    def wait() -> None:
        while True:
            try:
                if not os.read(number, 1 << 16):
                    break
            except InterruptedError:
                continue
            except OSError:
                break
        os._exit(ROUTER_GONE)

    watch = threading.Thread(target=wait, name="treadle-router-watch", daemon=True)
    declare_harmless(watch)
    watch.start()


def serve_engine(
    model: Model, settings: ServerSettings, order: EngineOrder, report: ReportPipe
) -> None:
    """Serve ``model`` to the router until SIGTERM, as ``order`` says; ``report`` gets the address
    and sizes once it is ready. Raises TreadleError.
    """
    from treadle.server.requests.service import Service
    from treadle.server.router.engine_app import build_engine_app

    media = model.media
    facts = {
        "n_bytes": model.gguf.n_bytes + (media.projector.gguf.n_bytes if media else 0),
        "cache_bytes": model.engine.cache.n_bytes,
        "n_ctx": min(model.n_ctx, model.engine.cache.n_tokens),
    }
    _run_engine(Service(model, settings), build_engine_app, facts, order, report)


def serve_speech_engine(
    recognizer: SpeechRecognizer, settings: ServerSettings, order: EngineOrder, report: ReportPipe
) -> None:
    """Serve the speech model of ``recognizer`` to the router until SIGTERM, as ``order`` says;
    ``report`` gets the address and sizes once it is ready. Raises TreadleError.
    """
    from treadle.server.router.engine_app import build_speech_engine_app
    from treadle.server.speech.speech_service import SpeechService

    model = recognizer.model
    facts = {
        "n_bytes": model.gguf.n_bytes,
        "cache_bytes": model.engine.cache.n_bytes,
        "n_ctx": model.config.n_text_ctx,
        "transcribes": True,
    }
    service = SpeechService(recognizer, settings)
    _run_engine(service, build_speech_engine_app, facts, order, report)


def _run_engine(
    service: Any,
    build: Callable[[Any], Starlette],
    facts: Mapping[str, int],
    order: EngineOrder,
    report: ReportPipe,
) -> None:
    """Serve ``service`` at the order's socket until SIGTERM; report its address and ``facts``
    (sizes and the kind) once it is ready. ``build`` makes its ASGI application.
    """
    from treadle.server.http.listeners import UNIX, Listeners
    from treadle.server.router.engine_turns import EngineStepLock
    from treadle.server.serve import SWITCH_S, ServerProcess

    listeners = Listeners([f"{UNIX}{order.socket}" if order.socket else "127.0.0.1"], 0)
    address: dict[str, Any] = {"socket": order.socket}
    if not order.socket:
        address = {"port": listeners.tcp[0].getsockname()[1]}
    if order.turns:
        service.engine.turns = EngineStepLock(order.turns)
    service.engine.warms_when_idle = True

    def ready(url: str) -> None:
        report.send(ready={**address, **facts})

    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(ServerProcess(service, GRACE_S, ready, build).run(listeners))
    finally:
        listeners.close()
        service.close()
