"""OpenAI's ``/v1/responses``: the order of events, the three indexes, conversations that go on."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from tests.server.test_openai import post
from treadle.server.protocols.openai.response_items import given_items, in_turns, read_items
from treadle.server.requests.request_stream import StreamPiece
from treadle.server.requests.response_store import ResponseStore, StoredResponse
from treadle.server.requests.service import Service

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 8}


def named(text: str) -> list[tuple[str, Any]]:
    """Name and data of each event."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def prompt_of(client: TestClient, messages: list[Any]) -> int:
    """Tokens of a conversation."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": 0}
    n: int = post(client, "/v1/chat/completions", **body)["usage"]["prompt_tokens"]
    return n


def test_a_response(client: TestClient, model: treadle.Model) -> None:
    hi = [{"role": "user", "content": "hi"}]
    expected = model.chat(hi, temperature=0, max_tokens=8).finish()
    found = post(client, PATH, input="hi", **GREEDY)
    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = found["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert item["content"][0]["text"] == expected
    assert found["usage"]["input_tokens"] == prompt_of(client, hi)
    assert found["usage"]["output_tokens"] == 8
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [5]}}
    done = post(client, PATH, input="hi", text={"format": form})
    assert (done["status"], done["incomplete_details"]) == ("completed", None)
    assert json.loads(done["output"][0]["content"][0]["text"]) == 5


@pytest.mark.parametrize(
    ("grammar", "last"), [('root ::= "a é"', "completed"), (None, "incomplete")]
)
def test_events_in_their_order(grammar: str | None, last: str, client: TestClient) -> None:
    body = {"input": "hi", "stream": True, "grammar": grammar, **GREEDY}
    events = named(client.post(PATH, json=body).text)
    names = [name for name, _ in events]
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{last}",
    ]
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(data["output_index"] == 0 for _, data in events[2:-1])
    inner = [data for name, data in events if "text" in name or "part" in name]
    assert all(data["content_index"] == 0 for data in inner)
    whole = events[-1][1]["response"]
    assert {data["item_id"] for data in inner} == {whole["output"][0]["id"]}
    said = "".join(data["delta"] for data in deltas)
    assert said == whole["output"][0]["content"][0]["text"]
    if grammar:
        assert said == "a é"


def test_items_are_messages(client: TestClient) -> None:
    items = [
        {"role": "developer", "content": "one"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b"}],
        },
        {"role": "user", "content": "c"},
    ]
    plain = [
        {"role": "system", "content": "zero\n\none"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    n = post(client, f"{PATH}/input_tokens", input=items, instructions="zero")["input_tokens"]
    assert n == prompt_of(client, plain)


def test_one_response_goes_on_from_another(client: TestClient) -> None:
    first = post(client, PATH, input="hi", instructions="be", **GREEDY)
    said = first["output"][0]["content"][0]["text"]
    second = post(client, PATH, input="and?", previous_response_id=first["id"], **GREEDY)
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and?"},
    ]
    assert second["usage"]["input_tokens"] == prompt_of(client, talk)
    more = post(client, PATH, previous_response_id=first["id"], **GREEDY)  # and no input
    assert more["usage"]["input_tokens"] == prompt_of(client, talk[:2])
    kept = client.get(f"{PATH}/{more['id']}/input_items").json()["data"]
    assert len(kept) == 2
    assert "input" in post(client, PATH, 400, instructions="be")["error"]["message"]
    error = post(client, PATH, 400, input="x", previous_response_id="resp_none")["error"]
    assert error["code"] == "previous_response_not_found"
    loose = post(client, PATH, input="hi", store=False, **GREEDY)
    post(client, PATH, 400, input="x", previous_response_id=loose["id"])


def test_items_that_are_told_by_their_ids(client: TestClient) -> None:
    """As the Vercel AI SDK has it: with ``store``, its default, it sends what was answered so."""
    first = post(client, PATH, input="hi", **GREEDY)
    (said,) = first["output"]
    user = {"role": "user", "content": "hi"}
    whole = [user, {"role": "assistant", "content": said["content"]}, user]
    n = post(client, f"{PATH}/input_tokens", input=whole)["input_tokens"]
    for item in ({"type": "item_reference", "id": said["id"]}, {"id": said["id"]}):
        items = [user, item, user]
        assert post(client, f"{PATH}/input_tokens", input=items)["input_tokens"] == n
    gone = [user, {"type": "item_reference", "id": "msg_none"}]
    error = post(client, PATH, 400, input=gone)["error"]
    assert (error["param"], error["code"]) == ("input[1]", "item_not_found")


def test_reasoning_goes_with_the_turn_behind_it() -> None:
    """Templates of gpt-oss and Qwen 3 show the model what it thought before it called."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    none = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    user = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "y"}
    items = [user, thought, call, thought, said, call, none, user, thought, user, thought]
    made = in_turns(read_items(given_items(items, ResponseStore())))
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert made == [
        user,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {**said, "reasoning_content": "hm", "tool_calls": calls},
        user,
        user,
    ]


def test_items_of_other_servers(client: TestClient) -> None:
    """A conversation that was begun elsewhere: calls of custom tools, searches, refusals."""
    items = [
        {"role": "user", "content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "y"},
    ]
    function = {"name": "apply_patch", "arguments": '{"input": "*** Begin"}'}
    plain = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "y"},
    ]
    n = post(client, f"{PATH}/input_tokens", input=items)["input_tokens"]
    assert n == prompt_of(client, plain)


def test_a_stream_that_fails(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex waits for ``response.failed``; the indexes go on."""
    from openai.types.responses import Response

    def fails(*_: object) -> int:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(StreamPiece, "parsed_parts", fails)
    with talking(service, raise_server_exceptions=False) as client:
        answer = client.post(PATH, json={"input": "hi", "stream": True, **GREEDY})
    events = named(answer.text)
    assert [name for name, _ in events][-2:] == ["error", "response.failed"]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    whole = Response.model_validate(events[-1][1]["response"], strict=False)
    assert whole.status == "failed"
    assert whole.error is not None
    assert whole.error.code == "server_error"
    assert "secret" not in answer.text


def test_tools_that_are_no_functions_are_left_out(client: TestClient) -> None:
    tools: list[Any] = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "web_search"}]
    found = post(client, PATH, input="hi", tools=tools, **GREEDY)
    assert found["output"]
    assert found["warnings"] == [
        "tools: type 'web_search' is not supported: the tool is left out",
        "tools: type 'local_shell' is not supported: the tool is left out",
    ]


def test_the_log_tells_once_of_tools_that_are_left_out(
    model: treadle.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(model, log=True) as service, talking(service) as client:
        for _ in range(2):
            post(client, PATH, input="hi", tools=[{"type": "mcp"}], **GREEDY)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in told if "message" in line] == [
        "tools: type 'mcp' is not supported: the tool is left out"
    ]


def test_a_call_cannot_be_forced_without_functions(client: TestClient) -> None:
    """As in chat; tools that are none of the model's are no functions."""
    named = {"type": "function", "name": "f"}
    for more in (
        {"tool_choice": "required"},
        {"tool_choice": named},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
    ):
        error = post(client, PATH, 400, input="hi", **GREEDY, **more)["error"]
        assert error["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, {"parallel_tool_calls": True, "store": True}),
        ({"parallel_tool_calls": None}, {"parallel_tool_calls": True}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"store": None}, {"store": True}),
        ({"store": False}, {"store": False}),
        ({}, {"reasoning": {"effort": None, "summary": None}}),
        ({"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low", "summary": None}}),
    ],
)
def test_what_was_asked_is_repeated(body: Any, told: dict[str, Any], client: TestClient) -> None:
    whole = post(client, PATH, input="hi", **GREEDY, **body)
    asked = {"input": "hi", "stream": True, **GREEDY, **body}
    first = named(client.post(PATH, json=asked).text)[0][1]["response"]
    assert {name: whole[name] for name in told} == {name: first[name] for name in told} == told


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"id": "x"}]},
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        {"input": "x", "background": True},
        {"input": "x", "text": {"format": {"type": "xml"}}},
        {"input": "x", "prompt": {"id": "p"}},
    ],
)
def test_refused(body: dict[str, Any], client: TestClient) -> None:
    assert post(client, PATH, 400, **body)["error"]["message"]


def test_talks_are_bounded() -> None:
    responses = ResponseStore(most=2, most_characters=300)
    none: dict[str, Any] = {"output": []}
    for name in "abc":
        item = {"id": f"of {name}", "content": name}
        responses.keep(
            name, StoredResponse([{"role": "user", "content": name}], [], {"output": [item]})
        )
    assert responses.get("a") is None
    assert responses.item("of a") is None
    assert responses.get("b") is not None
    responses.keep("d", StoredResponse([], [], none))
    assert responses.get("c") is None  # b was asked for later
    assert responses.item("of b") == {"id": "of b", "content": "b"}
    responses.keep("e", StoredResponse([], [], none))
    assert responses.get("d") is None  # an item of b was
    responses.keep("f", StoredResponse([{"content": "x" * 400}], [], none))
    responses.keep("g", StoredResponse([], [], {**none, "text": "x" * 400}))
    responses.keep("h", StoredResponse([], [{"id": "of h", "content": "x" * 400}], none))
    assert [responses.get(name) for name in "fghb"] == [None, None, None, None]
    assert (responses._n, responses._of_item) == (0, {})


def test_items_stay_while_one_response_has_them() -> None:
    responses = ResponseStore()
    item = {"id": "x"}
    responses.keep("a", StoredResponse([], [item, item], {"output": []}))
    responses.keep("b", StoredResponse([], [], {"output": [item]}))
    assert responses.drop("b")
    assert not responses.drop("b")
    assert responses.item("x") == item
    assert responses.drop("a")
    assert responses.item("x") is None
    assert (responses._n, responses._of_item) == (0, {})


def test_talks_of_several_threads() -> None:
    """The event loop keeps responses while threads of the pool look for older ones."""
    responses, over = ResponseStore(most=3), threading.Event()

    def look() -> int:
        n = 0
        while not over.is_set():
            for name in list(map(str, range(max(at[0] - 4, 0), at[0] + 1))):
                n += responses.get(name) is not None
                n += responses.item(f"of {name}") is not None
        return n

    at, before = [0], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            for at[0] in range(3000):
                responses.keep(
                    str(at[0]), StoredResponse([], [], {"output": [{"id": f"of {at[0]}"}]})
                )
            over.set()
            assert looking.result() >= 0
    finally:
        over.set()
        sys.setswitchinterval(before)
    assert len(responses._of_item) == 3


def test_the_items_that_a_response_was_asked_with(client: TestClient) -> None:
    """Those of responses before it, too; the last comes first, unless that is asked otherwise."""
    import openai

    people = openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )
    first = post(client, PATH, input="hi", instructions="be brief", **GREEDY)
    own = {"id": "msg_mine", "role": "user", "content": [{"type": "input_text", "text": "and?"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    items = [{"type": "item_reference", "id": first["output"][0]["id"]}, own, call, output]
    second = post(client, PATH, input=items, previous_response_id=first["id"], **GREEDY)
    (said,) = people.responses.input_items.list(first["id"])
    assert said.to_dict() == {
        "id": said.id,
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    whole = [
        each.to_dict() for each in people.responses.input_items.list(second["id"], order="asc")
    ]
    kinds = ["message"] * 4 + ["function_call", "function_call_output"]
    assert [each["type"] for each in whole] == kinds
    assert [each["id"] for each in whole][:4] == [
        said.id,
        first["output"][0]["id"],
        first["output"][0]["id"],
        "msg_mine",
    ]
    assert whole[1] == first["output"][0]
    pages = people.responses.input_items.list(second["id"], limit=4)
    assert [each.to_dict() for each in pages] == whole[:1:-1] + whole[:1]
    path = f"{PATH}/{second['id']}/input_items"
    page = client.get(path, params={"limit": 2}).json()
    assert (page["first_id"], page["last_id"]) == (whole[-1]["id"], whole[-2]["id"])
    assert (page["object"], page["has_more"]) == ("list", True)
    end = client.get(path, params={"after": said.id}).json()
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
    reference = {"type": "item_reference", "id": "msg_mine"}
    assert post(client, f"{PATH}/input_tokens", input=[reference]) == post(
        client, f"{PATH}/input_tokens", input="and?"
    )
    for wrong in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "5"}):
        assert client.get(path, params=wrong).json()["error"]["param"] in wrong
    assert client.get(f"{PATH}/resp_none/input_items").status_code == 404


def test_a_response_by_its_id(client: TestClient) -> None:
    import openai

    people = openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )
    made = post(client, PATH, input="hi", **GREEDY)
    told = named(client.post(PATH, json={"input": "hi", "stream": True, **GREEDY}).text)
    for whole in (made, told[-1][1]["response"]):
        assert client.get(f"{PATH}/{whole['id']}").json() == whole
        assert people.responses.retrieve(whole["id"]).id == whole["id"]
        with pytest.raises(openai.BadRequestError, match="stream"):
            people.responses.retrieve(whole["id"], stream=True)
        with pytest.raises(openai.BadRequestError, match="background"):
            people.responses.cancel(whole["id"])
        gone = client.delete(f"{PATH}/{whole['id']}").json()
        assert gone == {"id": whole["id"], "object": "response", "deleted": True}
        post(client, PATH, 400, input="x", previous_response_id=whole["id"])
        for ask in (people.responses.retrieve, people.responses.delete, people.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="no stored response"):
                ask(whole["id"])
    loose = post(client, PATH, input="hi", store=False, **GREEDY)
    assert client.get(f"{PATH}/{loose['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "x"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}},
            "text.format",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"content": "x"}], "instructions": "x"}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
        ({"input": []}, "input"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"input": [{"type": {}}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0].tool_calls.function.name"),
        ({"max_output_tokens": -9}, "max_output_tokens"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_fields_have_their_own_names(body: dict[str, Any], param: str, client: TestClient) -> None:
    error = post(client, "/v1/responses", 400, **{"input": "hi", **body})["error"]
    assert error["param"] == param
    if param != "text.format":
        assert error["message"].startswith(param)


def test_logprobs_of_a_text_that_was_held_back(
    client: TestClient, request: pytest.FixtureRequest
) -> None:
    """White space, which may stand before a call: its tokens are told with the text."""
    body: dict[str, Any] = {
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "regex": r'\n    """x ',
        "include": ["message.output_text.logprobs"],
        "temperature": 0,
    }
    (whole,) = post(client, PATH, **body)["output"][0]["content"]
    request.getfixturevalue("each_piece")  # now, for it waits until pieces are taken
    told = named(client.post(PATH, json={**body, "stream": True}).text)
    parts = [e["logprobs"] for name, e in told if name == "response.output_text.delta"]
    (done,) = [e["logprobs"] for name, e in told if name == "response.output_text.done"]
    (last,) = told[-1][1]["response"]["output"][0]["content"]
    tokens = [entry["token"] for entry in whole["logprobs"]]
    assert "".join(tokens) == whole["text"] == '\n    """x '
    for found in ([entry for part in parts for entry in part], done, last["logprobs"]):
        assert [entry["token"] for entry in found] == tokens


def test_an_answer_is_of_the_client_s_type(client: TestClient) -> None:
    """With all that it requires."""
    from openai.types.responses import Response

    Response.model_validate(post(client, PATH, input="hi", **GREEDY))
