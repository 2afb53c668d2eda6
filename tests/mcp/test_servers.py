"""Real MCP servers, written with the ``mcp`` package: processes and HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mcp  # noqa: F401 (the whole file needs it)
import pytest

from treadle.mcp.config import ToolBounds, ToolServerConfig
from treadle.mcp.toolbox import Toolbox

SERVER = Path(__file__).with_name("server.py")
PATIENCE_S = 120.0
BOUNDS = ToolBounds(start_s=PATIENCE_S, call_s=PATIENCE_S, message_bytes=1 << 16)
NAMES = ["add", "variable", "end", "flood", "refuse"]


def program(text: str) -> ToolServerConfig:
    """A server that is a line of Python."""
    return ToolServerConfig("bad", sys.executable, ("-c", text))


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    """A good server, and three that are none."""
    os.environ["TREADLE_TEST_SECRET"] = "s"
    servers = [
        ToolServerConfig("small", sys.executable, (str(SERVER),), {"GIVEN": "yes"}),
        ToolServerConfig("none", "no-such-program"),
        program("import sys; print('cannot do it', file=sys.stderr); sys.exit(4)"),
        ToolServerConfig("noisy", sys.executable, ("-c", "while True: print('x' * 100)")),
        ToolServerConfig("endless", sys.executable, ("-c", "while True: print('x', end='')")),
    ]
    with Toolbox(servers, BOUNDS) as box:
        box.tools()
        yield box
    del os.environ["TREADLE_TEST_SECRET"]


def test_tools_are_listed_and_called(toolbox: Toolbox) -> None:
    tools = toolbox.tools()
    assert [tool.name for tool in tools] == [f"small__{name}" for name in NAMES]
    assert tools[0].description == "Add two numbers."
    assert set(tools[0].schema["properties"]) == {"a", "b"}
    assert toolbox.call("small__add", '{"a": 2, "b": 3}') == ("5", False)
    refused = toolbox.call("small__refuse", "{}")
    assert refused.is_error
    assert refused.text.startswith("error: ")


def test_a_server_gets_the_environment_of_the_file_alone(toolbox: Toolbox) -> None:
    def variable(name: str) -> str:
        return toolbox.call("small__variable", f'{{"name": "{name}"}}').text

    assert variable("GIVEN") == "yes"
    assert variable("TREADLE_TEST_SECRET") == "none"
    assert variable("PATH") == os.environ["PATH"]


def test_servers_that_are_none_say_why(toolbox: Toolbox) -> None:
    problems = toolbox.problems()
    assert problems["none"] == "no program 'no-such-program' in PATH"
    assert problems["bad"] == "it ended with exit code 4: cannot do it"
    assert problems["noisy"] == "it sent more than 1000 lines that are no messages, and was stopped"
    assert problems["endless"] == "it sent a message of more than 65536 bytes, and was stopped"


def test_a_server_that_ends_or_floods_is_started_again(toolbox: Toolbox) -> None:
    said = toolbox.call("small__end", "{}").text
    assert said == "error: server small: it ended with exit code 3: out of luck"
    assert toolbox.call("small__add", '{"a": 2, "b": 3}').text == "5"
    said = toolbox.call("small__flood", '{"n": 100000}').text
    why = "it sent a message of more than 65536 bytes, and was stopped"
    assert said == f"error: server small: {why}"
    assert toolbox.call("small__flood", '{"n": 3}').text == "xxx"


def test_a_server_over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(SERVER), "http", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.05)
        with Toolbox([ToolServerConfig("web", url=f"http://127.0.0.1:{port}/mcp")], BOUNDS) as box:
            assert [tool.name for tool in box.tools()] == [f"web__{name}" for name in NAMES]
            assert box.call("web__add", '{"a": 2, "b": 3}').text == "5"
            flooded = box.call("web__flood", '{"n": 100000}').text
            assert flooded.startswith("error: ")
            assert len(flooded) < 1000
            server.kill()
            server.wait()
            gone = box.call("web__add", '{"a": 2, "b": 3}')
            assert gone.is_error
            assert gone.text.startswith("error: ")
    finally:
        server.kill()
        server.wait()
