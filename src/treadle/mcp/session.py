"""The interface of a connection to an MCP server, however it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from treadle.mcp.config import ToolBounds, ToolServerConfig

MAX_TOOLS = 256  # of all servers together


class ListedTool(NamedTuple):
    """A tool as its server describes it; ``schema``: the JSON schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


class ToolOutput(NamedTuple):
    """The result of a call: a text for the model, and whether it reports an error."""

    text: str
    is_error: bool = False


class ToolSession(Protocol):
    """An open connection to one server."""

    @property
    def is_over(self) -> bool:
        """Whether the server is known to have ended."""

    async def list_tools(self) -> list[ListedTool]:
        """Return the server's tools."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Call the tool ``name``. Raises TreadleError, with what is known of the server, if it has
        ended.
        """


Connect = Callable[[ToolServerConfig, ToolBounds], AbstractAsyncContextManager[ToolSession]]
