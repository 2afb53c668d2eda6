"""Histories that agents send back, through every protocol that has messages: what the system says
late, pictures in tools' results, results without calls, answers with reasoning, words and a call.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from tests.chat.tools.test_history import GPT_OSS, MINISTRAL, QWEN_35
from tests.server.conftest import events, running, talking, with_template
from tests.server.test_ollama import lines
from tests.server.test_openai import post, stream
from tests.server.test_responses import named
from treadle.chat import prompt as chat_prompts
from treadle.chat.messages import lone_results
from treadle.server.requests import chat_prompt

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA = "/api/chat"
PNG = base64.b64encode(b"\x89PNG" + bytes(2996)).decode()
SENTENCE = "[The tool gave a {} here. It is left out: the model reads text alone.]"
PICTURE = "picture (image/png, 3000 bytes)"
# As the families' own have it, in short: a later message of the system's raises, is left out, or
# comes first.
LATER = {
    "Qwen 3.5": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
        + QWEN_35
    ),
    "gpt-oss": GPT_OSS,
    "Ministral 3": MINISTRAL,
    "DeepSeek V3.1": (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}\n\n{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    "Gemma 2": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    "Hermes": HERMES_TEMPLATE,
}
Served = Callable[[str], TestClient]


@pytest.fixture
def served(model: treadle.Model) -> Iterator[Served]:
    """A server of the model, with a template's source."""
    open_: list[Any] = []

    def start(source: str) -> TestClient:
        service = running(with_template(model, source))
        client = talking(service.__enter__())
        open_.extend((service, client))
        return client.__enter__()

    try:
        yield start
    finally:
        for each in reversed(open_):
            each.__exit__(None, None, None)


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def call(id: str = "call_1", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"text": "ARGUMENT"}'}
    made = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [made], **more}


def result(content: Any = "RESULT", id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def prompt(client: TestClient, messages: list[Any], **more: Any) -> str:
    """The text that the server makes of a chat."""
    made: str = post(client, "/apply-template", messages=messages, **more)["prompt"]
    return made


# -- what the system says late --------------------------------------------------------------------


def read(client: TestClient, path: str, talk: list[Any]) -> tuple[int, int]:
    """Tokens of a conversation's prompt that the cache had, and all of them."""
    if path == RESPONSES:
        usage = post(client, path, input=talk, max_output_tokens=1)["usage"]
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    if path == MESSAGES:
        system = talk[0]["content"]
        usage = post(client, path, system=system, messages=talk[1:], max_tokens=1)["usage"]
        cached = usage["cache_read_input_tokens"]
        return cached, cached + usage["input_tokens"]
    usage = post(client, CHAT, messages=talk, max_tokens=1)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("name", LATER)
def test_what_the_system_says_late_leaves_the_cache_alone(
    name: str, path: str, served: Served
) -> None:
    """The whole conversation was read again in each turn."""
    client = served(LATER[name])
    talk: list[Any] = [{"role": "system", "content": f"You are {path}. " + "Be brief. " * 8}]
    last = 0
    for turn in range(4):
        talk += [user(f"question {turn}"), {"role": "system", "content": f"now it is {turn}"}]
        cached, n = read(client, path, talk)
        few = 16  # of the mark that the answer would begin with, and of the user's end
        assert cached >= last - few, (turn, cached, n, last)
        assert n - cached < 60 + few or not turn
        last = n
        talk.append({"role": "assistant", "content": f"answer {turn}"})


def test_what_the_system_says_late_to_a_response_that_is_kept(served: Served) -> None:
    client = served(LATER["Qwen 3.5"])
    late = {"role": "system", "content": "now it is late"}
    body: dict[str, Any] = {"max_output_tokens": 2, "temperature": 0}
    first = {"role": "system", "content": "You are kept. " * 8}
    made = post(client, RESPONSES, **body, input=[first, user("question"), late])
    for _ in range(3):
        before = made["id"]
        n = made["usage"]["input_tokens"]
        more = [user("another"), late]
        made = post(client, RESPONSES, **body, input=more, previous_response_id=before)
        assert made["usage"]["input_tokens_details"]["cached_tokens"] >= n - 16


def test_what_the_system_says_between_calls(served: Served) -> None:
    """At the end of the result: as a message of the user's it would end the turn."""
    client = served(LATER["Qwen 3.5"])
    late = {"role": "system", "content": "LATE"}
    made = prompt(client, [user("ASKED"), call(), late, result(), call("call_2"), late])
    assert "RESULT\n\nLATE" in made
    assert made.count("LATE") == 2
    talk = [{"role": "system", "content": "You are here."}, user("ASKED")]
    last = 0
    for turn in range(3):
        talk += [call(f"call_{turn}"), result(f"RESULT {turn}", f"call_{turn}"), late]
        cached, n = read(client, CHAT, talk)
        assert cached >= last - 16
        last = n


# -- pictures -------------------------------------------------------------------------------------

PARTS: dict[str, list[Any]] = {  # of a tool's result, by the protocol
    CHAT: [
        {"type": "text", "text": "BEFORE"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "BEHIND"},
    ],
    RESPONSES: [
        {"type": "input_text", "text": "BEFORE"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
        {"type": "input_text", "text": "BEHIND"},
    ],
    MESSAGES: [
        {"type": "text", "text": "BEFORE"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "text", "text": "BEHIND"},
    ],
}


def talk_of(path: str, content: Any) -> dict[str, Any]:
    """A body with a call and this result of it."""
    if path == RESPONSES:
        items = [
            user("ASKED"),
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": content},
        ]
        return {"input": items, "max_output_tokens": 2}
    if path == MESSAGES:
        used = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
        given = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
        talk = [user("ASKED"), {"role": "assistant", "content": [used]}]
        return {"messages": [*talk, {"role": "user", "content": [given]}], "max_tokens": 2}
    return {"messages": [user("ASKED"), call(), result(content)], "max_tokens": 2}


def prompts_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the server makes from now on."""
    made: list[str] = []
    own = chat_prompts.render_messages

    def noted(*args: Any, **more: Any) -> str:
        made.append(own(*args, **more))
        return made[-1]

    monkeypatch.setattr(chat_prompt, "render_messages", noted)
    return made


@pytest.mark.parametrize("path", PARTS)
def test_a_picture_in_a_result(
    path: str, agent: TestClient, model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a 400, for the rest of the conversation."""
    made = prompts_of(monkeypatch)
    body = talk_of(path, PARTS[path])
    warning = f"tool result 'call_1': a {PICTURE} was dropped, because the model reads only text"
    assert post(agent, path, **body)["warnings"] == [warning]
    assert f"BEFORE\n{SENTENCE.format(PICTURE)}\nBEHIND" in made[-1]
    answer = agent.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    told = json.dumps(events(answer.text))
    assert told.count(json.dumps(warning)) == 1
    if path == MESSAGES:
        n = post(agent, f"{MESSAGES}/count_tokens", **body)["input_tokens"]
        assert n == len(model.tokenizer.encode_prompt(made[-1]))
    if path == RESPONSES:
        kept = post(agent, path, **body)["id"]
        again = {"input": "MORE", "previous_response_id": kept, "max_output_tokens": 1}
        assert post(agent, path, **again)["warnings"] == [warning]
        assert SENTENCE.format(PICTURE) in made[-1]


def test_a_picture_in_a_result_of_ollama(
    agent: TestClient, model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prompts_of(monkeypatch)
    given = {"role": "tool", "tool_name": "f", "content": "BEFORE", "images": [PNG]}
    body: dict[str, Any] = {"messages": [user("ASKED"), call(), given]}
    body["options"] = {"num_predict": 2}
    (warning,) = post(agent, OLLAMA, **body, stream=False)["warnings"]
    assert warning == (
        "tool result 'f': a picture (3000 bytes) was dropped, because the model reads only text"
    )
    assert f"BEFORE\n{SENTENCE.format('picture (3000 bytes)')}" in made[-1]
    assert lines(agent, OLLAMA, **body)[-1]["warnings"] == [warning]
    own = [{"role": "user", "content": "ASKED", "images": [PNG]}]
    more: dict[str, Any] = {"options": {"num_predict": 2}, "stream": False}
    (warning,) = post(agent, OLLAMA, messages=own, **more)["warnings"]
    assert warning.startswith("message 0: a picture (3000 bytes) was dropped")
    assert "was sent here. It is left out: the model reads text alone.]\nASKED" in made[-1]
    body = {"prompt": "ASKED", "images": [PNG], **more}
    (warning,) = post(agent, "/api/generate", **body)["warnings"]
    assert warning.startswith("message 0: a picture (3000 bytes) was dropped")
    assert "images" in post(agent, "/api/generate", 400, **body, raw=True)["error"]


@pytest.mark.parametrize(
    ("part", "described"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
            "picture (https://a/b.png)",
        ),
        ({"type": "image", "data": PNG, "mimeType": "image/png"}, PICTURE),
        (
            {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
            "sound (audio/wav, 3000 bytes)",
        ),
        (
            {
                "type": "input_file",
                "filename": "a.pdf",
                "file_data": f"data:application/pdf;base64,{PNG}",
            },
            "PDF (application/pdf, a.pdf, 3000 bytes)",
        ),
        (
            {"type": "file", "file": {"filename": "a.bin", "file_data": PNG}},
            "file (a.bin, 3000 bytes)",
        ),
        (
            {
                "type": "document",
                "title": "A",
                "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
            },
            "PDF (application/pdf, A, 3000 bytes)",
        ),
        ({"type": "input_image", "file_id": "file-1"}, "picture (file-1)"),
        ({"type": "image"}, "picture"),
        ({"type": "odd", "x": 1}, "part of type 'odd'"),
    ],
)
def test_kinds_of_parts(part: Any, described: str, agent: TestClient) -> None:
    made = prompt(agent, [user("ASKED"), call(), result([part])])
    assert SENTENCE.format(described) in made


def test_a_document_of_parts_in_a_result(agent: TestClient, model: treadle.Model) -> None:
    inner = [{"type": "text", "text": "BEFORE"}, PARTS[MESSAGES][1]]
    document = {"type": "document", "title": "T", "source": {"type": "content", "content": inner}}
    body = talk_of(
        MESSAGES, [document, {"type": "document", "source": {"type": "text", "data": "D"}}]
    )
    (warning,) = post(agent, MESSAGES, **body)["warnings"]
    assert PICTURE in warning


def with_picture(path: str) -> dict[str, Any]:
    """A body whose last message, the user's, is a picture between texts."""
    body = talk_of(path, "RESULT")
    body["input" if path == RESPONSES else "messages"].append({**user(""), "content": PARTS[path]})
    return body


@pytest.mark.parametrize("path", PARTS)
def test_a_picture_of_the_user(
    path: str, agent: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is told of it, and so is the client; the conversation goes on."""
    made = prompts_of(monkeypatch)
    (warning,) = post(agent, path, **with_picture(path))["warnings"]
    assert warning == f"message 3: a {PICTURE} was dropped, because the model reads only text"
    words = f"[A {PICTURE} was sent here. It is left out: the model reads text alone.]"
    assert f"BEFORE\n{words}\nBEHIND" in made[-1]


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("whose", ["user", "tool"])
def test_a_strict_server_refuses_pictures(path: str, whose: str, model: treadle.Model) -> None:
    own = with_template(model, HERMES_TEMPLATE)
    own.defaults = replace(model.defaults, strict=True)
    body = with_picture(path) if whose == "user" else talk_of(path, PARTS[path])
    with running(own) as service, talking(service) as client:
        message = post(client, path, 400, **body)["error"]["message"]
    assert f"a {PICTURE} cannot be read: the model reads text alone" in message
    assert ".content[" in message or ".output[" in message


@pytest.mark.parametrize("path", PARTS)
def test_other_parts_of_the_user_are_refused(path: str, agent: TestClient) -> None:
    mine = {"role": "user", "content": [{"type": "video", "video": "x"}]}
    body = talk_of(path, "RESULT")
    body["input" if path == RESPONSES else "messages"].append(mine)
    error = post(agent, path, 400, **body)["error"]["message"]
    assert "content type 'video' is not supported: expected text, a picture or a sound" in error


# -- results without calls ------------------------------------------------------------------------


@pytest.mark.parametrize("source", [GPT_OSS, MINISTRAL, HERMES_TEMPLATE])
def test_a_lone_result(source: str, served: Served) -> None:
    client = served(source)
    (warning,) = lone_results([result()])
    for path in (CHAT, MESSAGES, RESPONSES):
        body = talk_of(path, "RESULT")
        key = "input" if path == RESPONSES else "messages"
        assert "warnings" not in post(client, path, **body)
        del body[key][1]
        assert post(client, path, **body)["warnings"] == [warning]
    (*_, end, _) = stream(client, CHAT, messages=[user("ASKED"), result()], max_tokens=1)
    assert end["warnings"] == [warning]
    body = {"messages": [user("ASKED"), {"role": "tool", "tool_name": "g", "content": "RESULT"}]}
    found = lines(client, OLLAMA, **body, options={"num_predict": 1})[-1]["warnings"]
    assert found == [warning.replace("call_1", "g")]
    assert "<tool_response>\nRESULT\n</tool_response>" in prompt(client, body["messages"])


@pytest.mark.parametrize("source", [QWEN_35, GPT_OSS, HERMES_TEMPLATE])
def test_the_system_alone(source: str, served: Served) -> None:
    client = served(source)
    alone = [{"role": "system", "content": "TOLD"}]
    assert prompt(client, alone).count("TOLD") == 1
    post(client, CHAT, messages=alone, max_tokens=1)
    post(client, RESPONSES, input=alone, max_output_tokens=1)
    post(client, RESPONSES, input=[], instructions="TOLD", max_output_tokens=1)
    post(client, OLLAMA, messages=alone, options={"num_predict": 1}, stream=False)


# -- reasoning, words and a call ------------------------------------------------------------------


def test_an_answer_of_three_parts_is_sent_back(
    served: Served, model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss' template raises on the three together."""
    client = served(GPT_OSS)
    made = prompts_of(monkeypatch)
    wanted = (
        "<|start|>assistant<|channel|>analysis<|message|>REASONED<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>WORDS<|end|>"
        "<|start|>assistant to=functions.f<|channel|>"
    )
    said = call(content="WORDS", reasoning_content="REASONED")
    post(client, CHAT, messages=[user("ASKED"), said, result()], max_tokens=1)
    assert wanted in made[-1]
    said = call(content="WORDS", thinking="REASONED")
    said["tool_calls"][0]["function"]["arguments"] = {}
    talk = [user("ASKED"), said, {"role": "tool", "tool_name": "f", "content": "RESULT"}]
    post(client, OLLAMA, messages=talk, options={"num_predict": 1}, stream=False)
    assert wanted in made[-1]
    body = talk_of(MESSAGES, "RESULT")
    body["messages"][1]["content"][:0] = [
        {"type": "thinking", "thinking": "REASONED", "signature": "treadle"},
        {"type": "text", "text": "WORDS"},
    ]
    post(client, MESSAGES, **body)
    assert wanted in made[-1]
    post(client, f"{MESSAGES}/count_tokens", **body)
    assert wanted in made[-1]
    body = talk_of(RESPONSES, "RESULT")
    body["input"][1:1] = [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "REASONED"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "WORDS"}],
        },
    ]
    kept = post(client, RESPONSES, **body)["id"]
    assert wanted in made[-1]
    more = {"type": "function_call_output", "call_id": "call_1", "output": "AGAIN"}
    before = {**body, "input": body["input"][:-1]}
    post(client, RESPONSES, **before)
    post(client, RESPONSES, input=[more], previous_response_id=kept, max_output_tokens=1)
    told = dict(named(client.post(RESPONSES, json={**body, "stream": True}).text))
    assert "response.failed" not in told


@pytest.mark.parametrize("content", ["", None, []])
def test_an_empty_answer_is_sent_back(content: Any, served: Served) -> None:
    client = served(MINISTRAL)
    empty: Any = {"role": "assistant", "content": content}
    for said in (empty, {**empty, "reasoning_content": "REASONED"}):
        made = prompt(client, [user("ASKED"), said, user("MORE")])
        assert made.index("ASKED") < made.index("MORE")
        assert ("[THINK]REASONED[/THINK]" in made) is ("reasoning_content" in said)
        post(client, CHAT, messages=[user("ASKED"), said, user("MORE")], max_tokens=1)
    talk = [user("ASKED"), {"role": "assistant", "content": content or []}, user("MORE")]
    post(client, MESSAGES, messages=talk, max_tokens=1)
    post(client, RESPONSES, input=talk, max_output_tokens=1)
    post(client, OLLAMA, messages=talk, options={"num_predict": 1}, stream=False)


def test_reasoning_that_is_sent_back_stays_in_the_cache(served: Served) -> None:
    client = served(MINISTRAL)
    talk: list[Any] = [user("ASKED " * 20)]
    last = 0
    for turn in range(3):
        cached, n = read(client, CHAT, talk)
        assert cached >= last - 8
        said = {"role": "assistant", "content": f"ANSWER {turn}", "reasoning_content": "so " * 9}
        talk = [*talk, said, user("MORE")]
        last = n
    assert prompt(client, talk).count("[THINK]so ") == 3


# -- what an answer must be -----------------------------------------------------------------------


def test_two_schemas(agent: TestClient) -> None:
    one = {"enum": [5]}
    other = {"enum": [6]}
    alone: dict[str, Any]
    form = {"type": "json_schema", "schema": one}
    any_object = {"type": "json_object"}
    found = post(agent, CHAT, messages=[user("hi")], response_format=any_object, json_schema=one)
    assert json.loads(found["choices"][0]["message"]["content"]) == 5
    for key in ("json_schema", "guided_json"):
        body: dict[str, Any] = {"messages": [user("hi")], "max_tokens": 9, key: other}
        error = post(agent, CHAT, 400, **body, response_format={**form, "json_schema": form})
        assert error["error"]["message"].startswith(f"response_format and {key}: ")
        error = post(agent, MESSAGES, 400, **body, output_config={"format": form})
        assert error["error"]["message"].startswith(f"output_config.format and {key}: ")
        alone = {"input": "hi", "text": {"format": form}, key: other}
        error = post(agent, RESPONSES, 400, **alone)
        assert error["error"]["message"].startswith(f"text.format and {key}: ")
        body = {"messages": [user("hi")], "options": {key: other}, "stream": False}
        error = post(agent, OLLAMA, 400, **body, format=one)
        assert error["error"].startswith(f"format and options.{key}: ")
        assert post(agent, OLLAMA, **body, format="json")["message"]["content"] == "6"


# -- tools ----------------------------------------------------------------------------------------


def test_two_tools_of_one_name(agent: TestClient) -> None:
    function = {"name": "twice", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}] * 2
    body: dict[str, Any] = {"messages": [user("hi")], "max_tokens": 1}
    for path in (CHAT, OLLAMA):
        error = post(agent, path, 400, **body, tools=tools)["error"]
        assert "twice" in (error if path == OLLAMA else error["message"])
    own = [{"name": "twice", "input_schema": {"type": "object"}}] * 2
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        assert "'twice'" in post(agent, path, 400, **body, tools=own)["error"]["message"]
    flat = [{"type": "function", **function}] * 2
    assert "'twice'" in post(agent, RESPONSES, 400, input="hi", tools=flat)["error"]["message"]


@pytest.mark.slow
def test_a_length_that_no_grammar_keeps(agent: TestClient) -> None:
    """The tool's whole schema was left out, and the warning named no keyword."""
    long = {"type": "string", "maxLength": 2**32}
    parameters = {
        "type": "object",
        "properties": {"a": long, "n": {"const": 1}},
        "required": ["a", "n"],
    }
    function = {"name": "f", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    body: dict[str, Any] = {"messages": [user("hi")], "max_tokens": 1}
    options = {"messages": body["messages"], "options": {"num_predict": 1}}
    fault = '"maxLength": 4294967296 cannot be enforced: at most 4294967295 (at #/properties/a)'
    for path, asked in ((CHAT, body), (OLLAMA, options)):
        (warning,) = post(agent, path, **asked, tools=tools, stream=False)["warnings"]
        assert warning == f"tool 'f': JSON schema: {fault}: left out"
    own = [{"name": "f", "input_schema": parameters}]
    assert post(agent, MESSAGES, **body, tools=own)["warnings"] == [warning]
    flat = [{"type": "function", **function}]
    assert post(agent, RESPONSES, input="hi", tools=flat, max_output_tokens=1)["warnings"] == [
        warning
    ]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    error = post(agent, CHAT, 400, **body, tools=strict)["error"]
    assert error["message"] == f"tool 'f': JSON schema: {fault}"
