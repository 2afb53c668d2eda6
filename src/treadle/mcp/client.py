"""Connections to MCP servers by the ``mcp`` package, the only module that imports it.

The package's own transport for processes reads lines of any length, and passes on more of the
environment than the file gives; so processes are treadle's own (``process``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, jsonrpc_message_adapter

from treadle.base.humanize import n_bytes
from treadle.errors import TreadleError
from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.process import ServerProcess
from treadle.mcp.session import MAX_TOOLS, ListedTool, ToolOutput

MAX_PAGES = 32  # of a list of tools
KINDS = {"image": "a picture", "audio": "a sound", "resource": "a file", "resource_link": "a link"}


class ClientToolSession:
    """An open connection. ``process``: the server's, if it is one of treadle's own."""

    def __init__(self, client: Client, process: ServerProcess | None) -> None:
        self._client = client
        self._process = process

    @property
    def is_over(self) -> bool:
        """Whether the server's process has ended."""
        return self._process is not None and self._process.is_over

    async def list_tools(self) -> list[ListedTool]:
        """Return the server's tools."""
        found: list[ListedTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += [
                ListedTool(tool.name, tool.description or tool.title or "", tool.input_schema)
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None or len(found) >= MAX_TOOLS:
                break
        return found[:MAX_TOOLS]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Call a tool. Raises TreadleError if the server has ended."""
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if self._process is not None and await self._process.has_ended():
                raise TreadleError(await self._process.last_words()) from error
            return ToolOutput(f"error: {error}", is_error=True)
        return ToolOutput(text_of(result), bool(result.is_error))


def text_of(result: CallToolResult) -> str:
    """Return a result as one text; what is no text is named."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        else:
            data = getattr(block, "data", None)
            size = f", {n_bytes(len(data) * 3 // 4)}" if isinstance(data, str) else ""
            kind = getattr(block, "mime_type", None) or getattr(block, "uri", None) or ""
            name = KINDS.get(block.type, block.type)
            resource = getattr(block, "resource", None)
            text = getattr(resource, "text", None)
            parts.append(text if isinstance(text, str) else f"[{name}, not shown: {kind}{size}]")
    if not parts and result.structured_content is not None:
        import json

        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text


@asynccontextmanager
async def connect(config: ToolServerConfig, bounds: ToolBounds) -> AsyncIterator[ClientToolSession]:
    """Open a connection to one server. Raises TreadleError with what is known of a server that does
    not start.
    """
    if config.url:
        limits = httpx2.Timeout(30.0, read=bounds.call_s + 5.0)
        transport = BoundedTransport(bounds.message_bytes)
        async with httpx2.AsyncClient(
            headers=dict(config.headers), timeout=limits, transport=transport
        ) as http:
            streams = streamable_http_client(
                config.url, http_client=http, max_sse_event_size=bounds.message_bytes
            )
            async with Client(streams) as client:
                yield ClientToolSession(client, None)
        return
    process = await ServerProcess.start(config, bounds)
    try:
        async with Client(process_streams(process)) as client:
            yield ClientToolSession(client, process)
    except Exception as error:
        if process.flood or await process.has_ended():
            raise TreadleError(await process.last_words()) from error
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await process.close()


@asynccontextmanager
async def process_streams(process: ServerProcess) -> AsyncIterator[Any]:
    """Connect a process with the two streams of messages that a client has."""
    send_read, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, receive_write = anyio.create_memory_object_stream[SessionMessage](0)

    async def reader() -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with send_read:
                with suppress(TreadleError):  # ``last_words`` tells it
                    while line := await process.read():
                        try:
                            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                        except ValueError:
                            process.noise()
                            continue
                        await send_read.send(SessionMessage(message))

    async def writer() -> None:
        try:
            async with receive_write:
                async for sent in receive_write:
                    text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await process.write(text.encode())
        except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            await send_read.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(reader)
        group.start_soon(writer)
        try:
            yield read, write
        finally:
            for stream in (read, write):
                await stream.aclose()
            group.cancel_scope.cancel()


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """An HTTP transport whose answers end with an error after ``most`` bytes, unless they are
    streams of events, each of which the client bounds.
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
    """A body of at most ``most`` bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts. Raises TreadleError for a longer body."""
        n = 0
        async for part in self._stream:
            n += len(part)
            if n > self._most:
                raise TreadleError(f"it sent more than {self._most} bytes in one answer")
            yield part

    async def aclose(self) -> None:
        """Close the stream below."""
        await self._stream.aclose()
