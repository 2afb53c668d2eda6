"""Connections to MCP servers by the ``mcp`` package, the only module that imports it.

The package's stdio transport reads lines of any length, and passes more environment variables to
the server than the file lists. So treadle starts the processes itself (``process``).
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
from mcp_types import jsonrpc_message_adapter

from treadle.errors import TreadleError
from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.http_bounds import BoundedTransport
from treadle.mcp.process import ToolServerProcess
from treadle.mcp.results import text_of
from treadle.mcp.session import MAX_TOOLS, ListedTool, ToolOutput

MAX_PAGES = 32  # of a list of tools


class ClientToolSession:
    """An open connection to one server. ``process``: the server's; None if it is used over HTTP."""

    def __init__(self, client: Client, process: ToolServerProcess | None) -> None:
        self._client = client
        self._process = process

    @property
    def is_over(self) -> bool:
        """Whether the server's process has ended, or sent too much; False for HTTP."""
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
        """Call the tool ``name``. A protocol error becomes an output with ``is_error``. Raises
        TreadleError if the server's process has ended.
        """
        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if self._process is not None and await self._process.has_ended():
                raise TreadleError(await self._process.last_words()) from error
            return ToolOutput(f"error: {error}", is_error=True)
        return ToolOutput(text_of(result), bool(result.is_error))


@asynccontextmanager
async def connect(config: ToolServerConfig, bounds: ToolBounds) -> AsyncIterator[ClientToolSession]:
    """Open a connection to the server of ``config``, and close it at the end of the block. Raises
    TreadleError if the server's process does not start, ends (with its exit code and last line) or
    sends more than ``bounds`` allow.
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
    process = await ToolServerProcess.start(config, bounds)
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
async def process_streams(process: ToolServerProcess) -> AsyncIterator[Any]:
    """Yield the two message streams (read, write) of an ``mcp`` client, connected to a process."""
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
