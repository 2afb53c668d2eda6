"""State shared by all handlers: the model, its engine thread, a pool for slow preparation."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from treadle import __version__
from treadle.api.summary import card
from treadle.base.caller_warnings import warnings_to
from treadle.base.fast_classes import cached_property, dataclass
from treadle.chat.tools import TemplateDialect, dialect_of
from treadle.media.address_policy import AddressPolicy
from treadle.media.addresses import fetch_media
from treadle.scheduler.request import MediaPrompt
from treadle.server.http.api_errors import ApiError, busy, timed_out
from treadle.server.http.api_keys import ApiKey, ApiKeyStore, TokenCharges, charge_tokens
from treadle.server.http.http_io import (
    MAX_BODY,
    MAX_MEDIA_BODY,
    Bodies,
    is_large,
    seconds_of,
)
from treadle.server.http.log import log
from treadle.server.http.redaction import hide
from treadle.server.requests.admission import check_limit, check_usable
from treadle.server.requests.engine_thread import EngineThread
from treadle.server.requests.generation_request import GenerationRequest
from treadle.server.requests.kept_streams import KeptStream, KeptStreams, conversation_id
from treadle.server.requests.request_media import CONTENTS, AddressesNeeded, media_errors
from treadle.server.requests.request_stream import OutputStream, RequestStream
from treadle.server.requests.response_store import (
    MOST_CHARACTERS,
    MOST_MEDIA_CHARACTERS,
    ResponseStore,
)
from treadle.server.requests.stats import ServerStats

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from treadle.api.model import Model
    from treadle.mcp.toolbox import Toolbox
    from treadle.server.requests.http_responses import AbortableStream

T = TypeVar("T")
MAX_WARNED = 64  # different warnings in the log, since clients can cause any number
PREPARING = 4  # threads that render, tokenize and compile grammars
FETCHING = 16  # threads that read pictures from their addresses
FETCHING_REQUESTS = 4  # requests that have fetched pictures in memory at once
MAX_FETCHED = MAX_MEDIA_BODY  # bytes of fetched pictures of one request
MAX_PREPARED = 1 << 30  # bytes of prepared pictures and sounds of all requests
PREPARING_LARGE = 2  # of PREPARING at most, for large bodies: small ones are not blocked


@dataclass(frozen=True)
class ServerSettings:
    """The operator's settings of a server, from the command line."""

    alias: str | None = None  # the model's name
    api_keys: tuple[str, ...] = ()  # none: everyone on this machine may call
    allow_hosts: tuple[str, ...] = ()  # names allowed in the Host header, besides this machine's
    allow_origins: tuple[str, ...] = ()  # of web pages that may call
    metrics: bool = False  # whether /metrics is served
    max_requests: int = 512  # outputs at once, queued ones included
    max_queue_s: float = 300.0  # most seconds of queued prefill before a request
    log: bool = True  # write a line for each request
    log_text: bool = False  # with its prompts and outputs
    page: bool = True  # the web page at /
    hosts: tuple[str, ...] = ("127.0.0.1",)  # addresses that are listened on
    api_prefix: str = ""  # before all paths, as /a/b
    api_key_file: Path | None = None  # further keys
    ssl_cert_file: Path | None = None  # None: no TLS
    ssl_key_file: Path | None = None  # None: the key is in the file of the certificate
    props: bool = False  # whether clients may change the server's defaults
    is_engine: bool = False  # a router's engine: the router has checked each request
    slot_save_path: Path | None = None  # the folder of saved slots; None: none can be saved
    media_urls: bool = False  # whether addresses of pictures and sounds are fetched
    media_hosts: tuple[str, ...] = ()  # from these hosts only; empty: any public host
    toolbox: Toolbox | None = None  # tools of MCP servers; whoever opened it closes it


@dataclass
class Service:
    """One served model: its engine thread (``engine``; the ``Engine`` itself is ``model.engine``),
    threads that prepare requests, API keys, counters and stores. ``close`` ends the threads; the
    owner closes the model.

    Handlers of generations call ``begin``, which reads the request in a thread (``prepare``) and
    gives it to the engine thread (``start``). Handlers of vectors and scores call ``steps``.
    """

    model: Model
    settings: ServerSettings = field(default_factory=ServerSettings)

    def __post_init__(self) -> None:
        own = self.model.path.name.removesuffix(".gguf")
        self.name = self.settings.alias or own
        media = self.model.media  # opened here: its errors belong to the start
        projector = () if media is None else media.projector.gguf.paths
        for path in (self.model.path, *self.model.gguf.paths, *projector):
            hide(path)
        self.created = int(time.time())
        self.fingerprint = f"treadle-{__version__}"
        self.toolbox = self.settings.toolbox
        self.stats = ServerStats()
        self.kept_streams = KeptStreams()
        self.charges = TokenCharges()  # of an engine
        self.keys = ApiKeyStore(self.settings.api_keys, self.settings.api_key_file, self.warn)
        most = MOST_CHARACTERS if media is None else MOST_MEDIA_CHARACTERS
        self.responses = ResponseStore(most_characters=most)
        self.addresses = AddressPolicy(self.settings.media_urls, self.settings.media_hosts)
        self.bodies = Bodies(MAX_BODY if media is None else MAX_MEDIA_BODY)
        self.engine = EngineThread(self.model, self.stats)
        self.defaults = self.model.sampling
        self.writes = self.model.config.main_output == "logits"  # whether it generates text
        self.draining = False
        self.n_open = 0  # open HTTP requests that the shutdown waits for
        self.streams: set[RequestStream] = set()
        self.tool_turns: WeakSet[AbortableStream] = WeakSet()  # requests with calls between answers
        self._pool = ThreadPoolExecutor(PREPARING, "treadle-prepare")
        self._large = asyncio.Semaphore(PREPARING_LARGE)
        self._fetchers = ThreadPoolExecutor(FETCHING, "treadle-fetch")
        self._fetching = asyncio.Semaphore(FETCHING_REQUESTS)
        self._n_preparing = 0
        self._warned = set[str]()

    @cached_property
    def dialect(self) -> TemplateDialect:
        """The chat template's marks of reasoning and tool calls, found by rendering it a few
        times.
        """
        return dialect_of(self.model.template)

    def card(self) -> dict[str, str]:
        """Return a description of the model for people: its size, format and so on, texts by
        name.
        """
        return card(self.model.path, self.model.engine)

    def check_ready(self) -> None:
        """Raise ApiError if no request can be taken now: the server is stopping, the model is not
        usable, or there are too many requests.
        """
        if self.draining:
            raise busy("the server is stopping")
        self.check_model()
        check_limit(self._n_preparing + len(self.engine.outputs), self.settings.max_requests)

    def check_model(self) -> None:
        """Raise ApiError if the model is being loaded, or can no longer be used."""
        check_usable(self.engine)

    async def prepare(self, work: Callable[..., T], *args: Any) -> T:
        """Return ``work(*args)``, computed in a thread of the pool. If it raises AddressesNeeded,
        the contents are fetched in other threads, and ``work`` begins again. Raises ApiError if no
        request can be taken.
        """
        self.check_ready()
        return await self._prepare(work, *args)

    async def _prepare(self, work: Callable[..., T], *args: Any) -> T:
        """Return ``work(*args)`` as ``prepare`` does, for a request that was admitted before."""
        self.check_model()
        self._n_preparing += 1
        work = self._noting(work)
        try:
            try:
                return await self._in_pool(work, *args)
            except AddressesNeeded as needed:
                places = needed.places
            async with self._fetching:
                contents = CONTENTS.set(await self._fetched(places))
                try:
                    return await self._in_pool(work, *args)
                finally:
                    CONTENTS.reset(contents)
        finally:
            self._n_preparing -= 1

    async def _in_pool(self, work: Callable[..., T], *args: Any) -> T:
        submit = partial(self._pool.submit, copy_context().run, work, *args)
        if not is_large.get():
            return await asyncio.wrap_future(submit())
        await self._large.acquire()
        job = submit()
        loop = asyncio.get_running_loop()

        def done(_: Future[T]) -> None:  # not on disconnect, as the thread continues
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._large.release)

        job.add_done_callback(done)
        return await asyncio.wrap_future(job)

    async def _fetched(self, places: Mapping[str, str]) -> dict[str, bytes]:
        """Return the contents of addresses, bytes by address. ``places``: by address, the field in
        the request that has it. Raises ApiError.
        """
        loop = asyncio.get_running_loop()
        jobs = [
            loop.run_in_executor(self._fetchers, fetch_media, url, self.addresses, place)
            for url, place in places.items()
        ]
        try:
            with media_errors(self.model, places.values()):
                contents = dict(zip(places, await asyncio.gather(*jobs), strict=True))
        finally:
            for job in jobs:  # those that have not begun, after an error or a disconnect
                job.cancel()
        if sum(map(len, contents.values())) > MAX_FETCHED:
            place = next(iter(places.values()))
            raise ApiError(
                400,
                f"{place}: the pictures at the addresses of this request have more than "
                f"{MAX_FETCHED >> 20} MiB together",
                param=place,
                code="too_large",
            )
        return contents

    async def steps(self, runs: Generator[T | None, None, None]) -> T:
        """Return the first item of ``runs`` that is not None, such as the vectors of
        ``Engine.embed_runs``. Each item is computed as a job of the engine thread, so the
        scheduler's steps run in between. After a disconnect no further one is computed.
        """
        try:
            while True:
                result = await asyncio.wrap_future(self.engine.submit(lambda: next(runs)))
                if result is not None:
                    return result
        except BaseException:
            self.engine.submit(runs.close)  # after the current run
            raise

    def _noting(self, work: Callable[..., T]) -> Callable[..., T]:
        """Return a function that calls ``work`` and logs the warnings that it gives
        (``base.caller_warnings``), each once, unless ``work`` catches them.
        """

        def noted(*args: Any) -> T:
            with warnings_to(self.warn_once):
                return work(*args)

        return noted

    async def _in_time(self, arrival_s: float, within_s: float, work: Awaitable[T]) -> T:
        """Return the result of ``work``. Raises ApiError (504) if it takes more than ``within_s``
        seconds after ``arrival_s``, a time of ``perf_counter``.
        """
        if within_s == math.inf:
            return await work
        try:
            return await asyncio.wait_for(work, arrival_s + within_s - time.perf_counter())
        except asyncio.TimeoutError:
            raise timed_out(within_s) from None

    async def begin(
        self,
        request: HttpRequest,
        read: Callable[..., GenerationRequest],
        *args: Any,
        keep_stream: bool = True,
        admitted: bool = False,
    ) -> RequestStream:
        """Start the generation request that ``read(service, *args)`` returns for an HTTP request,
        as ``start`` does, within the time limit in its headers. ``keep_stream``: keep a streamed
        answer for the conversation that the headers name. ``admitted``: it is a further answer of a
        running request, which counts for no limit, and which a stopping server lets end.
        """
        arrival_s = request.scope["treadle.came"]
        key = request.scope.get("treadle.key")
        conversation_id(request.headers.get("x-conversation-id"))  # refuses an invalid id first
        bounds: dict[str, Any] = {"within_s": seconds_of(request), "arrival_s": arrival_s}
        stream = await self.start(read, *args, **bounds, key=key, admitted=admitted)
        request.scope["treadle.stream"] = stream  # for the log
        stream.ids.add(request.scope["treadle.id"])
        if keep_stream and stream.is_streamed:
            try:
                stream.kept = self.keep(request, stream)
            except ApiError:
                stream.close()
                raise
        return stream

    def keep(self, request: HttpRequest, stream: AbortableStream) -> KeptStream | None:
        """Return a kept stream for the answer of ``stream`` if the request's headers name a
        conversation, else None. Raises ApiError if too many are kept.
        """
        conversation = conversation_id(request.headers.get("x-conversation-id"))
        if conversation is None:
            return None
        return self.kept_streams.open(self.owner_of(request), conversation, stream)

    def owner_of(self, request: HttpRequest) -> str:
        """Return the name of a request's API key; "" without keys."""
        owner: str = request.scope.get("treadle.owner", "")
        return owner

    async def start(
        self,
        read: Callable[..., GenerationRequest],
        *args: Any,
        within_s: float = math.inf,
        arrival_s: float | None = None,
        key: int | None = None,
        admitted: bool = False,
    ) -> RequestStream:
        """Call ``read(service, *args)`` in the pool, and start the generation request that it
        returns. ``arrival_s``: arrival by ``perf_counter``, None for now; ``within_s``: time limit
        in seconds from then. ``key``: number of the API key for fair sharing, None if there is only
        one. ``admitted``: see ``begin``. Raises ApiError and TreadleError.
        """

        if not self.writes:  # refused before a stream begins
            raise ApiError(
                400, f"{self.name} does not generate text: it is an embedding or reranking model"
            )

        def prepared() -> tuple[GenerationRequest, Any]:
            told: dict[str, None] = {}
            with warnings_to(told.setdefault):
                generation = read(self, *args)
            if told:
                given = (*generation.planned.warnings, *told)
                generation.planned = replace(generation.planned, warnings=given)
            if len(generation.prompts) * generation.n > self.settings.max_requests:
                raise ApiError(
                    400,
                    f"n: more than {self.settings.max_requests} outputs in one request "
                    "(--max-requests)",
                    param="n",
                )
            return generation, generation.requests(self.model)

        arrival_s = time.perf_counter() if arrival_s is None else arrival_s
        work = self._prepare(prepared) if admitted else self.prepare(prepared)
        generation, requests = await self._in_time(arrival_s, within_s, work)
        if not admitted:
            self.check_room(len(requests))
        n_bytes = sum(ids.n_bytes for ids in generation.prompts if isinstance(ids, MediaPrompt))
        self._check_prepared(n_bytes)
        seconds = min(within_s, generation.timeout_s or math.inf)
        stream = RequestStream(
            self.engine.drop,
            self.engine.wake,
            generation=generation,
            arrival_s=arrival_s,
            timeout_s=None if seconds == math.inf else seconds,
        )
        for made, _ in requests:
            made.key = key
        stream.outputs = [
            OutputStream(stream, made, i, at) for i, (made, at) in enumerate(requests)
        ]
        stream.n_prepared = n_bytes
        self.streams.add(stream)
        charge = charge_tokens.get()

        def closed() -> None:
            if stream in self.streams:  # the first time
                self.streams.discard(stream)
                charge(n_computed(stream))

        stream.on_close = closed
        self.engine.add(stream.outputs)
        return stream

    def check_key(self, key: ApiKey) -> None:
        """Raise ApiError (403) if the key may not use this server's model."""
        key.check(self.name)

    def note_embedded(self, n_tokens: int, seconds: float) -> None:
        """Count ``n_tokens`` that were processed in ``seconds`` for vectors or scores, and charge
        them to the current request's API key.
        """
        self.stats.note_embedded(n_tokens, seconds)
        charge_tokens.get()(n_tokens)

    def warn(self, message: str) -> None:
        """Write a warning to the log."""
        if self.settings.log:
            log(level="warning", message=message)

    def warn_once(self, message: str) -> None:
        """Log a warning about ignored or unsupported fields, unless the same was logged before."""
        if not self.settings.log or message in self._warned or len(self._warned) >= MAX_WARNED:
            return
        self._warned.add(message)
        log(level="warning", message=message)

    def check_room(self, n: int) -> None:
        """Raise ApiError (503) if ``n`` more outputs exceed ``max_requests``, or if the queued
        prefill takes more than ``max_queue_s`` seconds.
        """
        self.check_ready()
        if len(self.engine.outputs) + n > self.settings.max_requests:
            raise busy(
                f"{n} more requests would exceed the limit of {self.settings.max_requests} "
                "(--max-requests)"
            )
        queued_s = self.engine.queued_s()
        most_s = self.settings.max_queue_s
        if queued_s > most_s:
            raise busy(
                f"{queued_s:.0f} s of prompt processing are queued, more than --max-queue allows",
                queued_s - most_s,
            )

    def _check_prepared(self, n_bytes: int) -> None:
        """Raise ApiError (503) if the prepared pictures of all requests, with ``n_bytes`` more,
        exceed ``MAX_PREPARED``. Those of a single request are always accepted.
        """
        held = sum(stream.n_prepared for stream in self.streams)
        if n_bytes and held and held + n_bytes > MAX_PREPARED:
            raise busy("too many pictures are waiting")

    def stop_streams(self) -> None:
        """Abort the unfinished streams: the server is stopping."""
        for each in (*self.streams, *self.tool_turns):
            each.abort(busy("the server is stopping"))

    def close(self) -> None:
        """End the threads. The owner closes the model."""
        self.engine.stop()
        self.kept_streams.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)


def n_computed(stream: RequestStream) -> int:
    """Return how many tokens were computed for a request: prompts without their cached part, and
    output.
    """
    total = 0
    for output in stream.outputs:
        timings = output.answer.timings
        n_prompt = timings.n_prompt - timings.n_cached if output.request.started else 0
        total += n_prompt + len(output.answer.ids)
    return total


def service_of(request: HttpRequest) -> Service:
    """Return the Service that answers an HTTP request."""
    service: Service = request.app.state.service
    return service
