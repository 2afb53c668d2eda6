"""Connections with a small stand-in for the protocol's package, which the quick tier lacks: what
treadle does around it. ``test_servers`` has the package itself.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from treadle.errors import TreadleError
from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.toolbox import Toolbox

# Answers lists of tools in two pages, adds numbers, and ends when it is told to.
SERVER = """
import json, sys
print('not a message', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get('name') == 'end':
        print('out of luck', file=sys.stderr, flush=True)
        sys.exit(3)
    if asked.get('name') == 'flood':
        print('x' * 5000, flush=True)
    elif 'name' in asked:
        print(json.dumps({'sum': sum(asked['arguments'].values())}), flush=True)
    else:
        page = asked['cursor']
        tool = {'name': 'add' if page else 'end'}
        print(json.dumps({'tools': [tool], 'next': None if page else 'p'}), flush=True)
"""


class FakeError(Exception):
    """The package's error of the protocol."""


class FakeMessage(SimpleNamespace):
    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(vars(self))


class FakeSent:
    def __init__(self, message: Any) -> None:
        self.message = message


class FakeClient:
    """One request and one answer at a time, over a transport's two streams."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def __aenter__(self) -> FakeClient:
        self._read, self._write = await self._transport.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._transport.__aexit__(*error)

    async def _ask(self, **asked: Any) -> dict[str, Any]:
        import anyio

        try:
            await self._write.send(SimpleNamespace(message=FakeMessage(**asked)))
            answer: dict[str, Any] = (await self._read.receive()).message
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise FakeError("connection closed") from error
        return answer

    async def list_tools(self, cursor: str | None) -> Any:
        page = await self._ask(cursor=cursor)
        schema = {"type": "object"}
        tools = [
            SimpleNamespace(name=each["name"], description=None, title="T", input_schema=schema)
            for each in page["tools"]
        ]
        return SimpleNamespace(tools=tools, next_cursor=page["next"])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if arguments.get("bad"):
            raise FakeError("no such tool")
        text = str((await self._ask(name=name, arguments=arguments))["sum"])
        block = SimpleNamespace(type="text", text=text)
        return SimpleNamespace(content=[block], structured_content=None, is_error=False)


@asynccontextmanager
async def streamable(url: str, **settings: Any) -> AsyncIterator[Any]:
    raise TreadleError(f"{url}: {settings['http_client'].headers['x-key']}")
    yield


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``client.connect`` over the stand-in."""

    def parsed(line: bytes, **_: Any) -> Any:
        return json.loads(line)

    modules: dict[str, dict[str, Any]] = {
        "mcp": {"Client": FakeClient, "MCPError": FakeError},
        "mcp.client": {},
        "mcp.client.streamable_http": {"streamable_http_client": streamable},
        "mcp.shared": {},
        "mcp.shared.message": {"SessionMessage": FakeSent},
        "mcp_types": {"jsonrpc_message_adapter": SimpleNamespace(validate_json=parsed)},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "treadle.mcp.client", raising=False)
    yield importlib.import_module("treadle.mcp.client").connect
    sys.modules.pop("treadle.mcp.client", None)


def test_a_process_is_asked_and_started_again(connect: Callable[..., Any]) -> None:
    servers = [
        ToolServerConfig("s", sys.executable, ("-Ic", SERVER)),
        ToolServerConfig("web", url="http://127.0.0.1:9/mcp", headers={"X-Key": "k"}),
    ]
    with Toolbox(servers, ToolBounds(message_bytes=1000), connect) as box:
        assert [(tool.name, tool.description) for tool in box.tools()] == [
            ("s__end", "T"),
            ("s__add", "T"),
        ]
        assert box.problems() == {"web": "http://127.0.0.1:9/mcp: k"}
        assert box.call("s__add", '{"a": 2, "b": 3}') == ("5", False)
        assert box.call("s__add", '{"bad": 1}') == ("error: no such tool", True)
        ended = "error: server s: it ended with exit code 3: out of luck"
        assert box.call("s__end", "{}").text == ended
        assert box.call("s__add", '{"a": 2}').text == "2"
