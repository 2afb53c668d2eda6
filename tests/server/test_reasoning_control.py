"""``/v1/chat/completions/control``, the budget of the server and its message."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import (
    PATIENCE_S,
    Served,
    at_socket,
    running,
    talking,
    until,
    with_template,
)
from treadle.api.options import read_defaults
from treadle.server.protocols.openai.end_reasoning import find_stream
from treadle.server.requests.service import Service

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
OPENED = TURNS + "<think>\n{# </think> #}"
HI: list[Any] = [{"role": "user", "content": "hi"}]
ENDLESS = {"ignore_eos": True, "seed": 1, "max_tokens": 60}
CONTROL = "/v1/chat/completions/control"


def given(model: treadle.Model, source: str = OPENED, **settings: Any) -> treadle.Model:
    """The model behind a template, as ``load`` makes it with such settings."""
    other = with_template(model, source)
    defaults = read_defaults(chat_template=source, **settings)
    template = defaults.load_template(model.gguf, model.config.arch.name)
    other.__dict__.update(defaults=defaults, template=template)
    return other


@contextmanager
def held_after(service: Service, n: int) -> Iterator[Callable[[], None]]:
    """Texts of ``n`` tokens wait for a call of what this yields."""
    turns = service.engine.stepper
    step = turns.step
    over = threading.Event()

    def wait(*given: Any) -> Any:
        outputs = list(service.engine.outputs.values())
        if any(len(output.answer.ids) >= n for output in outputs):
            until(over.is_set)
        return step(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "step", wait)
        try:
            yield over.set
        finally:
            over.set()


def chat_delta(data: dict[str, Any]) -> tuple[str, str]:
    delta = data["choices"][0]["delta"] if data["choices"] else {}
    return delta.get("reasoning_content") or "", delta.get("content") or ""


def responses_delta(data: dict[str, Any]) -> tuple[str, str]:
    text = data.get("delta", "")
    if data["type"] == "response.reasoning_text.delta":
        return text, ""
    return "", text if data["type"] == "response.output_text.delta" else ""


def messages_delta(data: dict[str, Any]) -> tuple[str, str]:
    delta = data.get("delta", {})
    return delta.get("thinking", ""), delta.get("text", "")


WAYS: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("/v1/chat/completions", {"messages": HI, **ENDLESS}, lambda d: d["id"], chat_delta),
    (
        "/v1/responses",
        {"input": "hi", **ENDLESS, "max_output_tokens": 60},
        lambda d: d["response"]["id"],
        responses_delta,
    ),
    (
        "/v1/messages",
        {"messages": HI, **ENDLESS},
        lambda d: d["message"]["id"],
        messages_delta,
    ),
]


@pytest.mark.parametrize(("path", "body", "name", "delta"), WAYS)
@pytest.mark.parametrize("by", ["id", "X-Request-Id"])
def test_a_stream_answers_now(
    path: str, body: dict[str, Any], name: Any, delta: Any, by: str, model: treadle.Model
) -> None:
    words = "Enough."
    asked = {**body, "stream": True, "reasoning_control": True, "reasoning_budget_message": words}
    headers = {"X-Request-Id": "the-one"}
    reasoning, content = "", ""
    id = None
    ended: dict[str, Any] = {}
    with (
        running(given(model)) as service,
        at_socket(service) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        held_after(service, 8) as go_on,
        client.stream("POST", path, json=asked, headers=headers) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line.removeprefix("data: "))
            id = name(data) if id is None else id
            thought, said = delta(data)
            reasoning += thought
            content += said
            if len(reasoning) >= 3 and not ended:
                which = id if by == "id" else headers["X-Request-Id"]
                ended = client.post(CONTROL, json={"id": which, "action": "reasoning_end"}).json()
                assert ended == {"success": True}
                go_on()
        again = client.post(CONTROL, json={"id": id, "action": "reasoning_end"})
        assert again.json() == {"success": False, "message": "no active completion has this id"}
    assert reasoning.endswith(words)
    assert len(model.tokenize(reasoning, bos=False)) < 30
    assert content
    assert "think>" not in content


def test_a_whole_answer_of_several_texts(model: treadle.Model) -> None:
    """Their id is that of the HTTP request: the answer's own comes only with it."""
    with running(given(model)) as service, talking(service) as client:
        found: list[Any] = []
        body = {"messages": HI, **ENDLESS, "n": 2, "reasoning_control": True}

        def ask() -> None:
            headers = {"X-Request-Id": "several"}
            found.append(client.post("/v1/chat/completions", json=body, headers=headers).json())

        with held_after(service, 5) as go_on:
            thread = threading.Thread(target=ask)
            thread.start()
            until(lambda: any(o.answer.ids for o in list(service.engine.outputs.values())))
            ended = client.post(CONTROL, json={"id": "several", "action": "reasoning_end"})
            assert ended.json() == {"success": True}
            go_on()
            thread.join(PATIENCE_S)
        messages = [choice["message"] for choice in found[0]["choices"]]
        assert len(messages) == 2
        for message in messages:
            assert len(model.tokenize(message["reasoning_content"], bos=False)) < 20
            assert message["content"]


@pytest.mark.parametrize(
    ("source", "fields", "why"),
    [
        (OPENED, {}, "reasoning control is not enabled for this completion"),
        (TURNS, {"reasoning_control": True}, "this completion has no reasoning"),
        (
            OPENED,
            {"reasoning_control": True, "reasoning_budget": 1},
            "reasoning of this completion is over",
        ),
        (
            OPENED,
            {"reasoning_control": True, "reasoning_budget": 0},
            "this completion has no reasoning",
        ),
    ],
)
def test_nothing_to_end(
    source: str, fields: dict[str, Any], why: str, model: treadle.Model
) -> None:
    with running(given(model, source)) as service, talking(service) as client:
        with held_after(service, 12) as go_on:
            body = {"messages": HI, **ENDLESS, **fields}
            headers = {"X-Request-Id": "it"}
            thread = threading.Thread(
                target=client.post,
                args=("/v1/chat/completions",),
                kwargs={"json": body, "headers": headers},
            )
            thread.start()
            until(lambda: any(len(o.answer.ids) >= 12 for o in [*service.engine.outputs.values()]))
            said = client.post(CONTROL, json={"id": "it", "action": "reasoning_end"}).json()
            go_on()
            thread.join(PATIENCE_S)
        assert said["success"] is False
        assert why in said["message"]


def test_calls_that_are_wrong(model: treadle.Model) -> None:
    with running(given(model)) as service, talking(service) as client:
        for body, param in (
            ({"action": "reasoning_end"}, "id"),
            ({"id": "x"}, "action"),
            ({"id": "x", "action": "stop"}, "action"),
            ({"id": 3, "action": "reasoning_end"}, "id"),
        ):
            answer = client.post(CONTROL, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        said = client.post("/chat/completions/control", json={"id": "x", "action": "reasoning_end"})
        assert (said.status_code, said.json()["success"]) == (200, False)


def test_one_key_ends_its_own_only(model: treadle.Model) -> None:
    """Whoever has another key cannot name the completion."""
    with (
        running(given(model), api_keys=("one", "two")) as service,
        talking(service) as client,
        held_after(service, 4) as go_on,
    ):
        body = {"messages": HI, **ENDLESS, "reasoning_control": True}
        own = {"Authorization": "Bearer one", "X-Request-Id": "mine"}
        thread = threading.Thread(
            target=client.post,
            args=("/v1/chat/completions",),
            kwargs={"json": body, "headers": own},
        )
        thread.start()
        until(lambda: any(o.answer.ids for o in [*service.engine.outputs.values()]))
        call = {"id": "mine", "action": "reasoning_end"}
        other = client.post(CONTROL, json=call, headers={"Authorization": "Bearer two"})
        assert other.json()["success"] is False
        assert find_stream(service, "mine", 0) is not None
        assert client.post(CONTROL, json=call, headers=own).json() == {"success": True}
        go_on()
        thread.join(PATIENCE_S)


# -- budgets ----------------------------------------------------------------------------------


def reasoning_of(client: TestClient, model: treadle.Model, path: str, **fields: Any) -> str:
    body: dict[str, Any] = {"ignore_eos": True, "seed": 1, "max_tokens": 50, **fields}
    if path == "/v1/responses":
        body |= {"input": "hi", "max_output_tokens": 50}
    else:
        body["messages"] = HI
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == "/v1/chat/completions":
        return found["choices"][0]["message"].get("reasoning_content") or ""
    if path == "/v1/messages":
        return "".join(block.get("thinking", "") for block in found["content"])
    items = [item for item in found["output"] if item["type"] == "reasoning"]
    return "".join(part["text"] for item in items for part in item["content"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_servers_budget_and_a_calls_own(path: str, model: treadle.Model) -> None:
    """With the message at its end; -1 is no limit at all."""
    settings: dict[str, Any] = {"reasoning_budget": 6, "reasoning_budget_message": " That is all."}
    with running(given(model, **settings)) as service, talking(service) as client:

        def n_of(**fields: Any) -> int:
            text = reasoning_of(client, model, path, **fields)
            assert text.endswith(" That is all.") or not text
            return len(model.tokenize(text.removesuffix(" That is all."), bos=False))

        assert 3 <= n_of() <= 7
        assert 7 < n_of(reasoning_budget=12) <= 13 or path == "/v1/messages"
        if path == "/v1/messages":
            assert 7 < n_of(thinking={"type": "enabled", "budget_tokens": 12}) <= 13
            assert n_of(thinking={"type": "disabled"}) == 0
        else:
            unlimited = reasoning_of(client, model, path, reasoning_budget=-1)
            assert len(model.tokenize(unlimited, bos=False)) > 30
            own = reasoning_of(client, model, path, reasoning_budget_message="So.")
            assert own.endswith("So.")
            none = reasoning_of(client, model, path, reasoning_budget_message="")
            assert "That" not in none
        props = client.get("/props").json()["treadle"]
        assert (props["reasoning"], props["reasoning_budget"]) == ("auto", 6)


def test_efforts_are_calls_own_budgets(model: treadle.Model) -> None:
    with running(given(model, reasoning_budget=6)) as service, talking(service) as client:
        path = "/v1/chat/completions"
        assert len(reasoning_of(client, model, path, reasoning_effort="low")) > 40  # 1024 tokens
        assert len(reasoning_of(client, model, path, reasoning_effort="high")) < 40  # no number
        assert reasoning_of(client, model, path, reasoning_effort="none") == ""
    with running(given(model, reasoning_budget=0)) as service, talking(service) as client:
        assert reasoning_of(client, model, path) == ""
        assert reasoning_of(client, model, path, chat_template_kwargs={"enable_thinking": True})
        assert client.get("/props").json()["treadle"]["reasoning"] == "off"


def test_a_message_with_a_mark_is_refused(model: treadle.Model) -> None:
    with running(given(model)) as service, talking(service) as client:
        body = {"messages": HI, "reasoning_budget": 3, "reasoning_budget_message": "so </think>"}
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert (error["param"], error["code"]) == ("reasoning_budget_message", error["code"])
        assert "without marks" in error["message"]


def test_reasoning_goes_on_in_every_protocol(model: treadle.Model) -> None:
    """The same prompt, which ends within the reasoning, and so the same text."""
    body: dict[str, Any] = {**ENDLESS, "max_tokens": 12, "temperature": 0}
    body["continue_final_message"] = "reasoning_content"
    begun = {"role": "assistant", "content": "", "reasoning_content": "First I look"}
    with running(given(model)) as service, talking(service) as client:
        prompt = client.post("/apply-template", json={**body, "messages": [*HI, begun]}).json()
        assert prompt["prompt"] == "<user>hi<assistant><think>\nFirst I look"
        found = client.post("/v1/chat/completions", json={**body, "messages": [*HI, begun]}).json()
        message = found["choices"][0]["message"]
        assert message["reasoning_content"]
        block = {"type": "thinking", "thinking": "First I look", "signature": "x"}
        talk = [*HI, {"role": "assistant", "content": [block]}]
        found = client.post("/v1/messages", json={**body, "messages": talk}).json()
        assert found["content"][0]["thinking"] == message["reasoning_content"]
        item = {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "First I look"}],
        }
        asked = [{"role": "user", "content": "hi"}, item]
        own = {**body, "max_output_tokens": 12, "input": asked}
        found = client.post("/v1/responses", json=own).json()
        assert "output" in found, found
        assert found["output"][0]["content"][0]["text"] == message["reasoning_content"]
        wrong = client.post("/v1/responses", json={**own, "input": "hi"})
        assert wrong.json()["error"]["param"] == "continue_final_message"


def test_a_server_as_it_is_started(process: Served, tmp_path: Path) -> None:
    """By options; a call's own fields win."""
    path = tmp_path / "opened.jinja"
    path.write_text("{{ mood }}" + OPENED)
    options = ["-c", "256", "--temp", "0", "--seed", "3", "--chat-template-file", str(path)]
    options += ["--reasoning-budget", "4", "--reasoning-budget-message", " Enough."]
    options += ["--chat-template-kwargs", '{"mood": "glad"}', "--jinja", "--top-k", "7"]
    started = process(*options)
    with httpx.Client(base_url=started.url, timeout=PATIENCE_S) as client:
        props = client.get("/props").json()
        assert props["treadle"]["reasoning_budget"] == 4
        assert props["treadle"]["template_from"] == "file opened.jinja, by option"
        params = props["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_k"], params["seed"]) == (0, 7, 3)

        def reasoning(**fields: Any) -> str:
            body = {"messages": HI, "max_tokens": 40, "ignore_eos": True, **fields}
            answer = client.post("/v1/chat/completions", json=body).json()
            return answer["choices"][0]["message"].get("reasoning_content") or ""

        own = reasoning()
        assert own == reasoning()
        assert own.endswith(" Enough.")
        assert len(reasoning(reasoning_budget=12)) > len(own)
        assert reasoning(reasoning_budget_message="So.").endswith("So.")
        assert reasoning(chat_template_kwargs={"enable_thinking": False}) == ""
        said = client.post("/apply-template", json={"messages": HI}).json()["prompt"]
        assert said.startswith("glad<user>hi")
    started.popen.terminate()
    assert started.end()[0] == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("a\n{{ raise_exception('never') }}", "line 2: never"),
    ],
)
def test_a_server_is_not_started_with_a_bad_template(
    source: str, said: str, process: Served, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jinja"
    path.write_text(source)
    code, err = process("--chat-template", str(path)).end()
    assert code in (1, 2)
    assert said in err
    assert "Traceback" not in err
