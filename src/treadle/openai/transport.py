"""A transport of httpx, or of httpx2, that hands requests to a service of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from treadle.errors import TreadleError
from treadle.openai.in_process import Exchange, InProcessServer, LocalRequest

if TYPE_CHECKING:
    from treadle.api.model import Model

T = TypeVar("T")
CLOSED = "the client was closed during this request"


class TransportTypes(NamedTuple):
    """The transports for one HTTP package: ``plain`` for its clients without ``async``,
    ``asynchronous`` for those with it.
    """

    plain: Any
    asynchronous: Any


def read_timeout(request: Any) -> float | None:
    """Return how many seconds a request's client waits for the next part of the response; None:
    without limit.
    """
    timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
    return timeouts.get("read")


def exchange_of(server: InProcessServer, request: Any, body: bytes) -> Exchange:
    """Return the exchange on ``server`` for an HTTP client's request with ``body``, not yet
    begun.
    """
    url = str(request.url)
    return Exchange(server, LocalRequest(server.app, request.method, url, request.headers, body))


def transport_types(package: Any) -> TransportTypes:
    """Return the transports for clients of ``package``: httpx, or httpx2, which has the same
    classes. The openai package uses the one up to its version 2, the other from 3 on.
    """
    return TransportTypes(_plain_type(package), _async_type(package))


@cache
def _plain_type(package: Any) -> Any:
    class InProcessStream(package.SyncByteStream):  # type: ignore[misc]
        """The body of a response, read by a thread."""

        def __init__(self, transport: InProcessTransport, exchange: Exchange, request: Any) -> None:
            self._transport = transport
            self._exchange = exchange
            self._request = request

        def __iter__(self) -> Iterator[bytes]:
            while True:
                message = self._transport.wait(self._exchange.next(), self._request)
                if message is None:
                    return
                if body := message.get("body"):
                    yield body

        def close(self) -> None:
            """Cancel the request if its response has not been read to the end."""
            self._exchange.leave()

    class InProcessTransport(package.BaseTransport):  # type: ignore[misc]
        """Hands requests to the service of ``model``. ``owned``: close the model with its last
        client.
        """

        def __init__(self, model: Model, *, owned: bool) -> None:
            self._server = InProcessServer.join(model, owned=owned)
            self._leave = weakref.finalize(self, self._server.leave_soon)
            self._leave.atexit = False

        def wait(self, work: Coroutine[Any, Any, T], request: Any) -> T:
            """Return the result of ``work`` on the service's event loop."""
            future = self._server.submit(work)
            try:
                return future.result(read_timeout(request))
            except concurrent.futures.TimeoutError as error:
                raise package.ReadTimeout("no answer in time", request=request) from error
            except concurrent.futures.CancelledError as error:
                raise TreadleError(CLOSED) from error
            finally:  # after Ctrl-C as well
                future.cancel()

        def handle_request(self, request: Any) -> Any:
            """Return the response, whose body is written while it is read."""
            exchange = exchange_of(self._server, request, request.read())
            try:
                head = self.wait(exchange.begin(), request)
            except BaseException:
                exchange.leave()
                raise
            stream = InProcessStream(self, exchange, request)
            return package.Response(head["status"], headers=head["headers"], stream=stream)

        def close(self) -> None:
            """End the service, unless other clients of the model use it."""
            if self._leave.detach():
                self._server.leave()

    return InProcessTransport


@cache
def _async_type(package: Any) -> Any:
    class AsyncInProcessStream(package.AsyncByteStream):  # type: ignore[misc]
        """The body of a response, read by a coroutine."""

        def __init__(
            self, transport: AsyncInProcessTransport, exchange: Exchange, request: Any
        ) -> None:
            self._transport = transport
            self._exchange = exchange
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                message = await self._transport.wait(self._exchange.next(), self._request)
                if message is None:
                    return
                if body := message.get("body"):
                    yield body

        async def aclose(self) -> None:
            """Cancel the request if its response has not been read to the end."""
            self._exchange.leave()

    class AsyncInProcessTransport(package.AsyncBaseTransport):  # type: ignore[misc]
        """Hands requests to the service of ``model``; the caller's event loop stays free.
        ``owned``: close the model with its last client.
        """

        def __init__(self, model: Model, *, owned: bool) -> None:
            self._server = InProcessServer.join(model, owned=owned)
            self._leave = weakref.finalize(self, self._server.leave_soon)
            self._leave.atexit = False

        async def wait(self, work: Coroutine[Any, Any, T], request: Any) -> T:
            """Return the result of ``work`` on the service's event loop."""
            future = asyncio.wrap_future(self._server.submit(work))
            try:  # Python 3.11's wait_for may lose a cancellation
                await asyncio.wait([future], timeout=read_timeout(request))
                if not future.done():
                    raise package.ReadTimeout("no answer in time", request=request)
                if future.cancelled():  # not this task
                    raise TreadleError(CLOSED)
                return future.result()
            finally:
                future.cancel()

        async def handle_async_request(self, request: Any) -> Any:
            """Return the response, whose body is written while it is read."""
            exchange = exchange_of(self._server, request, await request.aread())
            try:
                head = await self.wait(exchange.begin(), request)
            except BaseException:
                exchange.leave()
                raise
            stream = AsyncInProcessStream(self, exchange, request)
            return package.Response(head["status"], headers=head["headers"], stream=stream)

        async def aclose(self) -> None:
            """End the service, unless other clients of the model use it."""
            if self._leave.detach():
                await asyncio.to_thread(self._server.leave)

    return AsyncInProcessTransport
