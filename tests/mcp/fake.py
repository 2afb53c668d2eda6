"""MCP servers of a test without processes: sessions whose calls do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from treadle.errors import TreadleError
from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.session import ListedTool, ToolOutput
from treadle.mcp.toolbox import Toolbox

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


class FakeSession:
    """Tools: ``echo`` returns its arguments, ``long`` 1000 characters, ``hang`` never returns,
    ``die`` ends the server, ``fail`` is an error of the tool.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.is_over = False

    async def list_tools(self) -> list[ListedTool]:
        return [ListedTool(name, f"Tool {name}.", SCHEMA) for name in self.names]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        if name == "hang":
            await asyncio.Event().wait()
        if name == "die":
            self.is_over = True
            raise TreadleError("it ended with exit code 3: out of luck")
        if name == "fail":
            return ToolOutput("error: no such file", is_error=True)
        return ToolOutput("x" * 1000 if name == "long" else f"{name} {arguments}")


class FakeServers:
    """Counts the starts of each server; those in ``broken`` fail, those in ``slow`` hang."""

    def __init__(self, **tools: list[str]) -> None:
        self.tools = tools
        self.starts = dict.fromkeys(tools, 0)
        self.sessions: dict[str, FakeSession] = {}
        self.broken: set[str] = set()
        self.slow: set[str] = set()

    def toolbox(self, **bounds: Any) -> Toolbox:
        own = {"start_s": 5.0, "call_s": 5.0, **bounds}
        return Toolbox([ToolServerConfig(n) for n in self.tools], ToolBounds(**own), self.connect)

    @asynccontextmanager
    async def connect(
        self, config: ToolServerConfig, bounds: ToolBounds
    ) -> AsyncIterator[FakeSession]:
        self.starts[config.name] += 1
        if config.name in self.broken:
            raise TreadleError("no program 'x' in PATH")
        if config.name in self.slow:
            await asyncio.Event().wait()
        session = self.sessions[config.name] = FakeSession(self.tools[config.name])
        yield session
