"""Tools of several servers: names, bounds of time and size, servers that fail."""

from __future__ import annotations

import time

import pytest

from tests.mcp.fake import FakeServers
from treadle.mcp.toolbox import MAX_NAME, public_name, unique


def test_tools_have_the_servers_name() -> None:
    servers = FakeServers(**{"a b": ["echo", "x.y"], "a_b": ["echo"]})
    with servers.toolbox() as box:
        tools = box.tools()
        assert [tool.name for tool in tools] == ["a_b__echo", "a_b__x_y", "a_b__echo_2"]
        assert box.call("a_b__echo_2", '{"n": 1}').text == "echo {'n': 1}"
        assert box.call("a_b__x_y", "").text == "x.y {}"
        assert [tool.server for tool in box.tools(["a_b"])] == ["a_b"]
        function = tools[0].function["function"]
        assert function["parameters"]["properties"] == {"n": {"type": "integer"}}


def test_long_names_stay_apart() -> None:
    name = public_name("s" * 40, "t" * 40)
    assert len(name) == MAX_NAME
    assert len(unique(name, {name})) == MAX_NAME
    assert unique(name, {name}) != name


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("s__none", "{}", "error: no tool 's__none'"),
        ("s__echo", "{", "error: the arguments are no JSON"),
        ("s__echo", "[]", "error: the arguments are no JSON object"),
        ("s__fail", "{}", "error: no such file"),
    ],
)
def test_errors_are_results(name: str, arguments: str, said: str) -> None:
    with FakeServers(s=["echo", "fail"]).toolbox() as box:
        box.tools()
        found = box.call(name, arguments)
        assert found.is_error
        assert found.text.startswith(said)


def test_a_long_result_is_cut() -> None:
    with FakeServers(s=["long"]).toolbox(characters=100) as box:
        box.tools()
        assert box.call("s__long", "{}").text == "x" * 100 + "\n[cut: 900 more characters]"


def test_a_server_that_hangs_is_stopped_and_the_others_go_on() -> None:
    servers = FakeServers(s=["hang", "echo"], t=["echo"])
    with servers.toolbox(call_s=0.05) as box:
        box.tools()
        hanging = box.submit("s__hang", "{}")
        assert box.call("t__echo", "{}").text == "echo {}"
        why = "it did not answer within 0.05 s, and was stopped"
        assert hanging.result().text == f"error: server s: {why}"
        assert box.problems() == {"s": why}
        assert box.call("s__echo", "{}").text == "echo {}"  # it was started again
        assert (servers.starts, box.problems()) == ({"s": 2, "t": 1}, {})


def test_a_server_that_ends_is_started_again_at_the_next_call() -> None:
    servers = FakeServers(s=["die", "echo"])
    with servers.toolbox() as box:
        box.tools()
        told = "error: server s: it ended with exit code 3: out of luck"
        assert box.call("s__die", "{}").text == told
        assert box.call("s__echo", "{}").text == "echo {}"
        servers.sessions["s"].is_over = True  # by itself, between two calls
        assert box.call("s__echo", "{}").text == "echo {}"
        assert servers.starts == {"s": 3}
        servers.broken = {"s"}
        servers.sessions["s"].is_over = True
        told = "error: server s: no program 'x' in PATH"
        assert box.call("s__echo", "{}").text == told


def test_servers_that_do_not_start() -> None:
    servers = FakeServers(s=["echo"], t=["echo"], u=["echo"])
    servers.broken = {"s"}
    servers.slow = {"t"}
    began = time.monotonic()
    with servers.toolbox(start_s=0.05) as box:
        assert [tool.server for tool in box.tools()] == ["u"]
        problems = box.problems()
    assert problems["s"] == "no program 'x' in PATH"
    assert problems["t"] == "it did not start within 0.05 s"
    assert time.monotonic() - began < 60  # all of it is bounded
