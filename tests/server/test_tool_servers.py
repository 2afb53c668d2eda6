"""Tools of MCP servers in requests. The servers are fakes, the model writes what a script says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from tests.mcp.fake import FakeServers, FakeSession
from tests.server.conftest import running, talking, with_template
from tests.server.test_openai import post, stream
from treadle.mcp.config import ToolBounds
from treadle.mcp.session import ToolOutput
from treadle.server.http.api_errors import GoneError
from treadle.server.requests.generation_request import GenerationRequest
from treadle.server.requests.service import Service
from treadle.server.requests.tool_turns import ToolCallLoop

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
FREE: dict[str, Any] = {"type": "mcp", "server_label": "s", "require_approval": "never"}
ASKS: dict[str, Any] = {"type": "mcp", "server_label": "s"}
OWN: dict[str, Any] = {"type": "function", "function": {"name": "own"}}
Script = Callable[..., list[str]]


def calling(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


@pytest.fixture(scope="module")
def servers() -> FakeServers:
    return FakeServers(s=["echo", "die", "long"], t=["echo"])


@pytest.fixture(scope="module")
def client(model: treadle.Model, servers: FakeServers) -> Iterator[TestClient]:
    own = with_template(model, HERMES_TEMPLATE)
    box = servers.toolbox(rounds=3, characters=60)
    with box, running(own, toolbox=box) as service, talking(service) as client:
        yield client


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make the model's answers these texts, one after the other; returns its prompts so far."""
    plan = GenerationRequest.plan

    def begin(*texts: str) -> list[str]:
        left = list(texts)
        prompts: list[str] = []

        def planned(self: GenerationRequest, model: Any, dialect: Any, prompt: str) -> None:
            prompts.append(prompt)
            grammar = f"root ::= {json.dumps(left.pop(0))}"
            self.options = replace(self.options, grammar=grammar)
            plan(self, model, dialect, prompt)

        monkeypatch.setattr(GenerationRequest, "plan", planned)
        return prompts

    return begin


def test_calls_are_run_between_answers(client: TestClient, script: Script) -> None:
    prompts = script("so " + calling("s__echo", n=1), "done")
    found = post(client, CHAT, messages=HI, tools=[FREE, OWN])
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("done", "stop")
    asked, told = found["mcp_messages"]
    assert asked["content"] == "so "
    assert asked["tool_calls"][0]["function"]["name"] == "s__echo"
    assert told["content"] == "echo {'n': 1}"
    assert told["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert all(f'"name": "{name}"' in prompts[0] for name in ("s__echo", "s__die", "own"))
    assert "t__echo" not in prompts[0]
    assert prompts[1].endswith("tool\necho {'n': 1}<|im_end|>\n<|im_start|>assistant\n")
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0  # the second answer's beginning


def test_a_stream_tells_each_call(client: TestClient, script: Script) -> None:
    script("so " + calling("s__echo", n=1), "done")
    options = {"include_usage": True}
    *chunks, _ = stream(client, CHAT, messages=HI, tools=[FREE], stream_options=options)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "so done"
    assert not any("tool_calls" in delta for delta in deltas)
    asked, told = (delta["mcp_call"] for delta in deltas if "mcp_call" in delta)
    assert asked.pop("id") == told.pop("id")
    assert asked.pop("arguments") == '{"n": 1}'
    assert asked == {"server_label": "s", "name": "echo"}
    assert told == {"output": "echo {'n': 1}", "is_error": False}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert len(chunks[-2]["mcp_messages"]) == 2
    assert chunks[-1]["usage"]["completion_tokens"] > 10  # of both answers


@pytest.mark.parametrize("tools", [[ASKS], [FREE, OWN]])
def test_calls_that_the_client_runs(client: TestClient, script: Script, tools: list[Any]) -> None:
    """One that it must allow, and one beside a call of its own function."""
    text = calling("s__echo", n=1) + (calling("own") if OWN in tools else "")
    script(text)
    found = post(client, CHAT, messages=HI, tools=tools)["choices"][0]
    names = [call["function"]["name"] for call in found["message"]["tool_calls"]]
    assert names == ["s__echo", "own"][: len(names)]
    assert found["finish_reason"] == "tool_calls"
    script(text)
    *chunks, _ = stream(client, CHAT, messages=HI, tools=tools)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"]["name"] for call in calls if "id" in call] == names
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_server_that_ends_is_told_to_the_model(client: TestClient, script: Script) -> None:
    prompts = script(calling("s__die"), calling("s__long"), "done")
    found = post(client, CHAT, messages=HI, tools=[FREE])
    assert found["choices"][0]["message"]["content"] == "done"
    assert "error: server s: it ended with exit code 3: out of luck" in prompts[1]
    assert "x" * 60 + "\n[cut: 940 more characters]" in prompts[2]


def test_the_last_answer_cannot_call(client: TestClient, script: Script) -> None:
    """After as many answers as the bounds allow."""
    again = calling("s__echo")
    prompts = script(again, again, again)
    found = post(client, CHAT, messages=HI, tools=[FREE], tool_choice="required")
    assert found["choices"][0]["message"]["content"] == again  # text: no tool is offered
    assert len(found["mcp_messages"]) == 4
    assert "s__die" not in prompts[2]


def service_of(client: TestClient) -> Service:
    app: Any = client.app
    service: Service = app.state.service
    return service


def test_a_request_with_calls_is_admitted_once(
    client: TestClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later answers do not count for ``--max-requests``, and a server that stops waits."""
    service = service_of(client)

    async def call(self: FakeSession, name: str, arguments: Any) -> ToolOutput:
        monkeypatch.setattr(service, "draining", True)
        monkeypatch.setattr(service, "settings", replace(service.settings, max_requests=1))
        monkeypatch.setattr(service, "_n_preparing", 1)
        return ToolOutput("ok")

    monkeypatch.setattr(FakeSession, "call", call)
    script(calling("s__echo"), "done")
    found = post(client, CHAT, messages=HI, tools=[FREE])
    assert found["choices"][0]["message"]["content"] == "done"


def test_a_call_ends_with_the_server(
    client: TestClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(self: FakeSession, name: str, arguments: Any) -> ToolOutput:
        assert client.portal is not None
        client.portal.start_task_soon(service_of(client).stop_streams)
        await asyncio.Event().wait()
        return ToolOutput("")

    monkeypatch.setattr(FakeSession, "call", hang)
    script(calling("s__echo"))
    error = post(client, CHAT, 503, messages=HI, tools=[FREE])["error"]
    assert error["message"] == "the server is stopping"


def test_a_request_that_is_given_up_before_its_first_answer_began() -> None:
    """As by a server that stops while pictures of the prompt are fetched."""
    told: list[BaseException] = []
    why = GoneError()
    stream = SimpleNamespace(is_streamed=False, ids=set(), abort=told.append)

    async def begin(*args: Any, **settings: Any) -> Any:
        turns.abort(why)
        return stream

    service: Any = SimpleNamespace(tool_turns=set(), begin=begin)
    servers: Any = SimpleNamespace(toolbox=SimpleNamespace(bounds=ToolBounds()))
    unread: Any = None
    turns = ToolCallLoop(unread, service, unread, servers)
    asyncio.run(turns.begin({}))
    assert told == [why]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("entry", "status", "said"),
    [
        ({"server_label": "x"}, 400, "no server 'x'; there are: s, t"),
        ({}, 400, "tools[0].server_label"),
        ({"server_label": "s", "server_url": "http://a"}, 400, "those of the file of --mcp"),
        ({"server_label": "s", "allowed_tools": ["no"]}, 400, "the server has no tool 'no'"),
        ({"server_label": "s", "require_approval": "maybe"}, 400, "always, never"),
    ],
)
def test_wrong_entries(client: TestClient, entry: Any, status: int, said: str) -> None:
    error = post(client, CHAT, status, messages=HI, tools=[{"type": "mcp", **entry}])["error"]
    assert said in error["message"]


def test_allowed_tools_and_approval_by_name(client: TestClient, script: Script) -> None:
    entry = {**ASKS, "allowed_tools": ["echo", "long"]}
    entry["require_approval"] = {"never": {"tool_names": ["echo"]}}
    prompts = script(calling("s__echo"), calling("s__long"))
    found = post(client, CHAT, messages=HI, tools=[entry])
    assert "s__die" not in prompts[0]
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "s__long"
    assert len(found["mcp_messages"]) == 2


def test_the_endpoints_of_clients_that_ask(client: TestClient) -> None:
    post(client, "/v1/mcp/call", name="s__echo", arguments="{}")  # starts it if a test ended it
    found = client.get("/v1/mcp/tools").json()
    assert found["servers"] == [{"name": "s", "error": None}, {"name": "t", "error": None}]
    tool = found["data"][0]
    assert (tool["function"]["name"], tool["server_label"]) == ("s__echo", "s")
    ran = post(client, "/v1/mcp/call", name="t__echo", arguments='{"n": 2}')
    assert ran == {"output": "echo {'n': 2}", "is_error": False}
    assert "no tool 'u'" in post(client, "/v1/mcp/call", 404, name="u")["error"]["message"]


def test_without_servers(agent: TestClient) -> None:
    assert agent.get("/v1/mcp/tools").json()["data"] == []
    assert "--mcp" in post(agent, "/v1/mcp/call", 501, name="u")["error"]["message"]
    error = post(agent, CHAT, 400, messages=HI, tools=[FREE])["error"]
    assert "tools[0].type: expected function" in error["message"]


# -- /v1/responses ----------------------------------------------------------------------------

RESPONSES = "/v1/responses"


def kinds(found: Any) -> list[str]:
    return [item["type"] for item in found["output"]]


def test_a_response_lists_and_calls(client: TestClient, script: Script) -> None:
    prompts = script("so " + calling("s__echo", n=1), "done")
    tools = [{**FREE, "allowed_tools": ["echo"]}]
    found = post(client, RESPONSES, input="hi", tools=tools)
    assert kinds(found) == ["mcp_list_tools", "message", "mcp_call", "message"]
    listing, _, call, said = found["output"]
    assert (listing["server_label"], [each["name"] for each in listing["tools"]]) == ("s", ["echo"])
    assert call.pop("id").startswith("mcp_")
    assert call == {
        "type": "mcp_call",
        "status": "completed",
        "server_label": "s",
        "name": "echo",
        "arguments": '{"n": 1}',
        "output": "echo {'n': 1}",
        "error": None,
        "approval_request_id": None,
    }
    assert said["content"][0]["text"] == "done"
    assert found["tools"] == tools
    assert "tool\necho {'n': 1}<|im_end|>" in prompts[1]
    # It goes on: by its id, and by its items.
    prompts = script("well", "well")
    after = post(client, RESPONSES, input="and?", tools=tools, previous_response_id=found["id"])
    assert kinds(after) == ["message"]
    first = {"role": "user", "content": "hi"}
    said = [first, *found["output"], {"role": "user", "content": "and?"}]
    assert kinds(post(client, RESPONSES, input=said, tools=tools)) == ["message"]
    assert prompts[0] == prompts[1]
    items = client.get(f"/v1/responses/{after['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in items] == ["message", *kinds(found), "message"]


def test_a_stream_of_a_response(client: TestClient, script: Script) -> None:
    script(calling("s__echo", n=1) + calling("s__die"), "done")
    events = stream(client, RESPONSES, input="hi", tools=[FREE])
    told = [event["type"].removeprefix("response.") for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert told[:6] == ["created", "in_progress", "output_item.added",
                        "mcp_list_tools.in_progress", "mcp_list_tools.completed",
                        "output_item.done"]  # fmt: skip
    calls = [each for each in told if each.startswith("mcp_call")]
    assert [each for each in calls if each != "mcp_call_arguments.delta"] == [
        *["mcp_call.in_progress", "mcp_call_arguments.done"] * 2,
        "mcp_call.completed",
        "mcp_call.failed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    whole = events[-1]["response"]
    assert (told[-1], done) == ("completed", whole["output"])
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert done[2]["status"] == "failed"
    assert "out of luck" in done[2]["error"]["content"][0]["text"]
    for event in events:
        if event["type"].startswith("response.mcp_call"):
            item = whole["output"][event["output_index"]]
            assert event["item_id"] == item["id"]


@pytest.mark.parametrize("stored", [True, False])
def test_calls_that_the_client_allows(client: TestClient, script: Script, stored: bool) -> None:
    """One is allowed, one refused; by ``previous_response_id`` or with all items."""
    prompts = script(calling("s__echo", n=1) + calling("s__echo", n=2), "done")
    found = post(client, RESPONSES, input="hi", tools=[ASKS])
    assert kinds(found) == ["mcp_list_tools", "mcp_approval_request", "mcp_approval_request"]
    asked = found["output"][1:]
    assert asked[0]["arguments"] == '{"n": 1}'
    answers = [
        {"type": "mcp_approval_response", "approval_request_id": item["id"], "approve": approve}
        for item, approve in zip(asked, [True, False], strict=True)
    ]
    given: dict[str, Any] = {"input": answers, "previous_response_id": found["id"]}
    if not stored:
        given = {"input": [{"role": "user", "content": "hi"}, *found["output"], *answers]}
    after = post(client, RESPONSES, tools=[ASKS], **given)
    assert kinds(after) == ["mcp_call", "mcp_call", "message"]
    ran, refused, _ = after["output"]
    assert (ran["output"], ran["approval_request_id"]) == ("echo {'n': 1}", asked[0]["id"])
    assert (refused["output"], refused["status"]) == (None, "failed")
    assert "the user did not allow this call" in prompts[1]
    assert prompts[1].count("echo {'n'") == 1


def test_a_server_that_takes_no_request_runs_no_allowed_call(
    client: TestClient, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(calling("s__echo", n=1))
    found = post(client, RESPONSES, input="hi", tools=[ASKS])
    asked = found["output"][1]["id"]
    answer = {"type": "mcp_approval_response", "approval_request_id": asked, "approve": True}
    monkeypatch.setattr(service_of(client), "draining", True)
    ran: list[str] = []
    monkeypatch.setattr(FakeSession, "call", lambda self, name, arguments: ran.append(name))
    given = {"input": [answer], "previous_response_id": found["id"]}
    post(client, RESPONSES, 503, tools=[ASKS], **given)
    assert not ran


def test_a_call_of_the_clients_own_beside_it(client: TestClient, script: Script) -> None:
    script(calling("s__echo", n=1) + calling("own"))
    own = {"type": "function", **OWN["function"]}
    choice = {"type": "mcp", "server_label": "s", "name": "echo"}
    found = post(client, RESPONSES, input="hi", tools=[FREE, own])
    assert kinds(found) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert found["output"][1]["output"] == "echo {'n': 1}"
    error = post(client, RESPONSES, 400, input="hi", tools=[own, FREE],
                 tool_choice={**choice, "name": "no"})["error"]  # fmt: skip
    assert "tool_choice: no such tool of server 's'" in error["message"]


def test_openais_client_reads_it(client: TestClient, script: Script) -> None:
    """Each event and the whole response are of its types."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    script(calling("s__echo", n=1) + calling("s__die"), calling("t__echo"))
    tools = [{**FREE, "allowed_tools": ["echo", "die"]}, {**ASKS, "server_label": "t"}]
    events = stream(client, RESPONSES, input="hi", tools=tools)
    types = {type(reader.validate_python(event)).__name__ for event in events}
    assert {"ResponseMcpCallFailedEvent", "ResponseMcpListToolsCompletedEvent"} < types
    whole = Response.model_validate(events[-1]["response"])
    names = [type(item).__name__ for item in whole.output]
    assert names == ["McpListTools", "McpListTools", "McpCall", "McpCall", "McpApprovalRequest"]
