"""State shared by the router's handlers: the models, their engines, API keys and settings."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from treadle import __version__
from treadle.base.fast_classes import dataclass
from treadle.server.http.api_errors import ApiError, busy
from treadle.server.http.api_keys import (
    ASKED_HEADER,
    CHARGES,
    OWNER_HEADER,
    ApiKey,
    ApiKeyStore,
    current_key,
)
from treadle.server.http.http_io import MAX_MEDIA_BODY, Bodies
from treadle.server.http.log import log
from treadle.server.router.engine_client import EngineGoneError, call_engine
from treadle.server.router.launcher import EngineLauncher
from treadle.server.router.model_list import ModelList
from treadle.server.router.pool import EnginePool, LoadedEngine, PoolSettings

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.server.requests.service import ServerSettings
    from treadle.server.router.served_model import ServedModel

FOLLOW_S = 5.0  # seconds between two readings of the folders
DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", re.ASCII)
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class RouterSettings:
    """Settings of the router besides ``ServerSettings``.

    memory, idle_s, most_loaded: as of ``PoolSettings``. library: whether clients may download,
    remove and copy models. autoload: whether a call loads the model that it names.
    """

    memory: int | None = None
    idle_s: float = math.inf
    most_loaded: int | None = None
    library: bool = False
    autoload: bool = True


class EngineAnswer(NamedTuple):
    """The whole response of an engine to a request of the router itself."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class NoEngine:
    """Stands in for an ``EngineThread`` in the server's process: the router itself computes
    nothing.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self.warmed: Future[None] = Future()

    def start(self) -> None:
        """Start the router's background work: the warm process, loads of pinned models."""
        self._service.begin()
        self.warmed.set_result(None)

    @property
    def outputs(self) -> range:
        """A range whose length is the number of running calls, which the server's process reads."""
        return range(self._service.pool.n_running)


class RouterService:
    """The state of a router: its ``models``, their engines (``pool``), API keys, and ``own``, the
    settings besides those of every server. ``end`` ends the engines.
    """

    def __init__(
        self,
        models: ModelList,
        settings: ServerSettings,
        own: RouterSettings,
        launcher: EngineLauncher,
        pool: EnginePool | None = None,
    ) -> None:
        self.models = models
        self.settings = settings
        self.own = own
        self.keys = ApiKeyStore(settings.api_keys, settings.api_key_file, self.warn)
        n_keys = max(1, len(self.keys))
        self.pool = pool or EnginePool(
            launcher,
            PoolSettings(own.memory, own.idle_s, n_keys, own.most_loaded, settings.log),
        )
        self.created = int(time.time())
        self.fingerprint = f"treadle-{__version__}"
        self.bodies = Bodies(MAX_MEDIA_BODY)
        self.engine = NoEngine(self)
        # Functions that cancel streams which outlive their connection, while their model is loaded:
        # by the key's name and the conversation's id.
        self.loading_streams: dict[tuple[str, str], Callable[[ApiError], None]] = {}
        self.draining = False
        self.n_open = 0
        self._scanning = asyncio.Lock()

    def begin(self) -> None:
        """Start the warm process, load the pinned models, and read the folders every ``FOLLOW_S``
        seconds.
        """
        self.pool.run(self.pool.launcher.prepare())
        for model in self.models.models:
            if model.pinned:
                self.pool.run(self.pool.load(model))
        if self.models.scans:
            self.pool.run(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            with suppress(OSError):
                await self.refresh()

    async def refresh(self) -> None:
        """Read the folders again. Engines of models that are gone are unloaded; engines whose
        model's file was replaced get no new calls.
        """
        async with self._scanning:
            gone = await asyncio.to_thread(self.models.refresh)
        for name in gone:
            model = self.models.get(name)
            if model is None or model.name != name:
                self.pool.run(self.pool.forget(name))
            else:
                self.pool.replace(model)
        if gone:
            self.pool.publish("*", "models_reload")

    async def listed(self) -> list[ServedModel]:
        """Return the models that the request's API key may use. Reads the folders first if they
        were last read more than a second ago.
        """
        if self.models.is_stale:
            await self.refresh()
        return [model for model in self.models.models if is_allowed(model)]

    async def find(self, name: str | None) -> ServedModel:
        """Return the model that a call names, None for the default one. For an unknown name the
        folders are read again. Raises ApiError (404), or if the key may not use the model (403).
        """
        if name and self.models.get(name) is None and self.models.is_stale:
            await self.refresh()
        model = self.models.find(name, is_allowed)
        check_allowed(model)
        return model

    def check_key(self, key: ApiKey) -> None:
        """Do nothing: ``find`` checks whether the key may use the model that the request names."""

    def warn(self, message: str) -> None:
        """Write a warning to the log."""
        if self.settings.log:
            log(level="warning", message=message)

    async def charge(self, engine: LoadedEngine) -> None:
        """Fetch the numbers of tokens that an engine has computed since the last time, and charge
        them to the API keys.
        """
        found = await self.ask(engine, CHARGES.encode())
        charges = json.loads(found.body) if found is not None and found.status == 200 else None
        if isinstance(charges, dict):
            self.keys.charge_by_name(charges)

    async def acquire(self, model: ServedModel) -> LoadedEngine:
        """Return the model's engine for one call, loaded if need be. Raises ApiError if it cannot
        be loaded, if it is not loaded and calls may not load models (``autoload``), or if the
        server is stopping.
        """
        if self.draining:
            raise busy("the server is stopping")
        if not self.own.autoload and self.pool.engine(model) is None:
            raise ApiError(
                400,
                f"{model.name} is not loaded, and the server loads no model by itself "
                "(--no-models-autoload): POST /models/load",
                param="model",
                code="model_not_loaded",
            )
        return await self.pool.acquire(model)

    async def ask(
        self,
        engine: LoadedEngine,
        target: bytes,
        method: str = "GET",
        body: bytes = b"",
        owner: str = "",
    ) -> EngineAnswer | None:
        """Send a request of the router itself to an engine and return the response; None if the
        engine has ended. ``target``: path and query; ``owner``: name of the API key for which the
        router asks, "" for none.
        """
        headers = [
            (b"host", b"localhost"),
            (b"authorization", b"Bearer " + engine.keys[0].encode()),
            (b"content-type", b"application/json"),
            (OWNER_HEADER.encode(), owner.encode()),
            (ASKED_HEADER.encode(), b"1"),
        ]
        try:
            response = await call_engine(engine.socket_address, method, target, headers, body)
            try:
                whole = await response.body()
            finally:
                response.close()
        except EngineGoneError:
            return None
        return EngineAnswer(response.status, dict(response.headers), whole)

    def check_engine(self, engine: LoadedEngine) -> None:
        """Ask in the background for the health of an engine that gave an internal error, and retire
        it if its model can no longer be used, such as one whose file has shrunk.
        """

        async def check() -> None:
            found = await self.ask(engine, b"/health")
            if found is not None and found.status == 500:
                if self.settings.log:
                    log(level="error", message="the engine is given up", model=engine.model.name)
                self.pool.retire(engine)

        self.pool.run(check())

    def stop_streams(self) -> None:
        """Send SIGTERM to all engines, at the end of the server; calls that still run end with an
        error.
        """
        for engine in self.pool.engines():
            engine.process.terminate()

    def close(self) -> None:
        """Do nothing: engines are ended by ``end``, which needs the event loop."""

    async def end(self) -> None:
        """End every engine."""
        await self.pool.close()


def is_allowed(model: ServedModel) -> bool:
    """Return whether the API key of the current request may use the model."""
    key = current_key.get()
    return key is None or key.may_use(model.name, *model.aliases)


def check_allowed(model: ServedModel) -> None:
    """Raise ApiError (403) unless the API key of the current request may use the model."""
    key = current_key.get()
    if key is not None:
        key.check(model.name, *model.aliases)


def service_of(request: HttpRequest) -> RouterService:
    """Return the RouterService that answers an HTTP request."""
    service: RouterService = request.app.state.service
    return service


def keep_seconds(value: Any) -> float | None:
    """Return the seconds in ``value``, Ollama's ``keep_alive``: a number, or a duration such as
    "5m"; negative ones are infinite. None for null and "". Raises ApiError.
    """
    if value is None or value == "":
        return None
    seconds: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        try:
            seconds = float(value)
        except ValueError:
            parts = DURATION.findall(value.lstrip("-"))
            if parts and "".join(number + unit for number, unit in parts) == value.lstrip("-"):
                seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
                seconds = -seconds if value.startswith("-") else seconds
    if seconds is None or math.isnan(seconds):
        raise ApiError(
            400,
            f"keep_alive: {str(value)[:50]!r}: expected seconds, or a duration such as '5m'",
            param="keep_alive",
        )
    return math.inf if seconds < 0 else seconds
