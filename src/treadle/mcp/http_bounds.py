"""HTTP answers of MCP servers, of bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

from treadle.errors import TreadleError


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """An HTTP transport that raises an error for a response body of more than ``most`` bytes. Event
    streams are exempt: the MCP client limits the size of each event.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return the answer with its bounded body."""
        response = await super().handle_async_request(request)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        if not events and isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = BoundedStream(response.stream, self._most)
        return response


class BoundedStream(httpx2.AsyncByteStream):
    """A body of at most ``most`` bytes, read from ``stream``."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body. Raises TreadleError if it is longer than ``most`` bytes."""
        n = 0
        async for part in self._stream:
            n += len(part)
            if n > self._most:
                raise TreadleError(f"it sent more than {self._most} bytes in one answer")
            yield part

    async def aclose(self) -> None:
        """Close the stream that is read."""
        await self._stream.aclose()
