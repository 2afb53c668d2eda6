"""Pictures over a socket, as the clients that people use send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2 as httpx
import pytest

import treadle
from tests.server.conftest import PATIENCE_S, at_socket, events, running
from tests.server.pictures import ROWS, base64_of, data_url, load
from treadle.media.projector import Projector
from treadle.server.requests.service import Service

# Elsewhere they are imported where they are needed: each process of a run collects this file, and
# they take seconds.
if TYPE_CHECKING:
    import anthropic
    import openai

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
IMAGE = {"tokens": ROWS, "width": 97, "height": 61, "resized_width": 176, "resized_height": 112}


@pytest.fixture(scope="module")
def model(data: Path, one_kernel_cache: Path) -> Iterator[treadle.Model]:
    with load(data) as model:
        yield model


@pytest.fixture(scope="module")
def service(model: treadle.Model) -> Iterator[Service]:
    with running(model, metrics=True) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with at_socket(service) as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def people(url: str) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def others(url: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(api_key="none", base_url=url, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(data: Path) -> Path:
    return data / "media" / "media" / "plain.png"


def talk(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(path), **more}}


class Truth(NamedTuple):
    """What the library answers."""

    text: str
    logprobs: list[float]
    n_prompt: int


def expected(model: treadle.Model, messages: Any, **settings: Any) -> Truth:
    made = model.chat(messages, **{**GREEDY, "logprobs": 0, **settings})
    text = made.finish()
    return Truth(text, [entry.logprob for entry in made.logprobs], len(made.prompt_ids))


# -- protocols ------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", ["auto", "low"])
def test_openai_chat(people: openai.OpenAI, model: treadle.Model, plain: Path, detail: str) -> None:
    messages = talk(words("What is it?"), picture(plain, detail=detail), words("Say."))
    truth = expected(model, messages)
    settings: dict[str, Any] = {"model": "any", "messages": messages, "logprobs": True, **GREEDY}
    made = people.chat.completions.create(**settings)
    choice = made.choices[0]
    assert choice.message.content == truth.text
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == truth.logprobs
    assert made.usage is not None
    assert made.usage.prompt_tokens == truth.n_prompt
    assert made.usage.model_extra == {"images": [IMAGE]}
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.model_dump()["image_tokens"] == ROWS
    parts = list(
        people.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(deltas) == choice.message.content
    assert parts[-1].usage.model_extra == {"images": [IMAGE]}
    timings = parts[-1].model_extra["timings"]
    assert (timings["media_n"], timings["media_ms"]) == (1, 0)  # encoded before


def test_the_answer_is_about_the_picture(
    people: openai.OpenAI, model: treadle.Model, data: Path, plain: Path
) -> None:
    """Pictures swapped are another prompt, and each is read as the library does."""
    turned = data / "media" / "media" / "exif6.jpg"
    found = []
    for one, two in ((plain, turned), (turned, plain)):
        messages = talk(picture(one, detail="low"), picture(two, detail="low"), words("Which?"))
        truth = expected(model, messages, max_tokens=2)
        made = people.chat.completions.create(
            model="any", messages=messages, logprobs=True, temperature=0, max_tokens=2
        )
        logprobs = made.choices[0].logprobs
        assert logprobs is not None
        found.append([entry.logprob for entry in logprobs.content or []])
        assert found[-1] == truth.logprobs
    assert found[0] != found[1]


def test_openai_responses(people: openai.OpenAI, model: treadle.Model, plain: Path) -> None:
    parts: Any = [
        {"type": "input_text", "text": "Which?"},
        {"type": "input_image", "image_url": data_url(plain), "detail": "high"},
    ]
    given: Any = [{"role": "user", "content": parts}]
    truth = expected(model, talk(words("Which?"), picture(plain)))
    settings: Any = {"model": "any", "temperature": 0, "max_output_tokens": 6}
    made = people.responses.create(input=given, **settings)
    assert made.output_text == truth.text
    assert made.usage is not None
    assert made.usage.input_tokens == truth.n_prompt
    assert made.usage.model_extra == {"images": [IMAGE]}
    assert people.responses.input_tokens.count(input=given).input_tokens == truth.n_prompt
    with people.responses.stream(input=given, **settings) as stream:
        told = list(stream)
    text = "".join(each.delta for each in told if each.type == "response.output_text.delta")
    assert text == made.output_text
    last: Any = told[-1]
    assert last.type == "response.incomplete"  # it reached its limit
    assert last.response.usage.model_extra == {"images": [IMAGE]}
    # The next question has the picture from the store; its tokens are not read again.
    more = people.responses.create(input="And?", previous_response_id=last.response.id, **settings)
    assert more.usage is not None
    assert more.usage.model_extra == {"images": [IMAGE]}
    assert more.usage.input_tokens_details.cached_tokens > ROWS


def test_pictures_of_tools(people: openai.OpenAI, others: anthropic.Anthropic, plain: Path) -> None:
    """Results of calls with a picture count its tokens, in each protocol that has them."""
    tool: Any = {"name": "shot", "input_schema": {"type": "object", "properties": {}}}
    image: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64_of(plain)},
    }
    messages: Any = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "shot", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}],
        },
    ]
    made = others.messages.create(model="any", max_tokens=2, messages=messages, tools=[tool])
    assert made.usage.model_extra == {"images": [IMAGE]}
    call = {"type": "function_call", "call_id": "a", "name": "shot", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": data_url(plain)}]
    given: Any = [
        {"role": "user", "content": "Look."},
        call,
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    function: Any = {"type": "function", "name": "shot", "parameters": tool["input_schema"]}
    told = people.responses.create(model="any", input=given, tools=[function], max_output_tokens=2)
    assert told.usage is not None
    assert told.usage.model_extra == {"images": [IMAGE]}
    cached = told.usage.input_tokens_details.cached_tokens
    assert cached == told.usage.input_tokens - 1  # the same prompt


def test_anthropic(others: anthropic.Anthropic, model: treadle.Model, plain: Path) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64_of(plain)}
    content: Any = [{"type": "image", "source": source}, words("Which of them?")]
    messages: Any = [{"role": "user", "content": content}]
    truth = expected(model, talk(picture(plain), words("Which of them?")))
    settings: Any = {"model": "any", "messages": messages, "max_tokens": 6}
    settings["extra_body"] = {"temperature": 0}
    made = others.messages.create(**settings)
    assert [block.text for block in made.content if block.type == "text"] == [truth.text]
    assert made.usage.model_extra == {"images": [IMAGE]}
    read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    assert read == truth.n_prompt
    with others.messages.stream(**settings) as stream:
        assert "".join(stream.text_stream) == truth.text
        assert stream.get_final_message().usage.cache_read_input_tokens == read - 1
    n = others.messages.count_tokens(model="any", messages=messages).input_tokens
    assert n == truth.n_prompt


def test_ollama(url: str, model: treadle.Model, plain: Path) -> None:
    import ollama

    truth = expected(model, talk(picture(plain), words("Which, say?")))
    options = {"temperature": 0, "num_predict": 6}
    messages: Any = [{"role": "user", "content": "Which, say?", "images": [plain]}]
    with closing(ollama.Client(host=url, timeout=PATIENCE_S)) as client:
        made = client.chat("any", messages, options=options)
        assert made.message.content == truth.text
        assert made.prompt_eval_count == truth.n_prompt
        parts = list(client.chat("any", messages, options=options, stream=True))
        assert "".join(part.message.content or "" for part in parts) == truth.text
        images = [plain.read_bytes()]
        told = client.generate("any", "Which, say?", images=images, options=options)
        assert told.response == truth.text
        again = client.generate("any", "Which, say?", images=images, options=options, stream=True)
        assert "".join(part.response or "" for part in again) == truth.text
        raw = client.generate("any", "So: ", images=images, raw=True, options=options)
        assert raw.prompt_eval_count == len(model.tokenize("So: ", bos=False)) + ROWS + 2
        assert client.show("any").capabilities == ["completion", "embedding", "tools", "vision"]


def test_llama_cpp(http: httpx.Client, model: treadle.Model, plain: Path) -> None:
    given = {"prompt_string": "See <__media__>: a", "multimodal_data": [base64_of(plain)]}
    body = {"temperature": 0, "n_predict": 6, "n_probs": 1}
    made = http.post("/completion", json={**body, "prompt": given}).json()
    assert made["tokens_evaluated"] == len(model.tokenize("See : a")) + ROWS + 2
    assert made["images"] == [IMAGE]
    text = http.post("/completion", json={**body, "prompt": given, "stream": True}).text
    parts = events(text)
    assert "".join(part["content"] for part in parts) == made["content"]
    assert parts[-1]["images"] == [IMAGE]
    several = http.post("/completion", json={**body, "prompt": [given, "See"]}).json()
    assert [each["tokens_evaluated"] for each in several] == [made["tokens_evaluated"], 3]
    assert several[0]["content"] == made["content"]
    told = http.post("/v1/completions", json={"prompt": given, "max_tokens": 6, "temperature": 0})
    assert told.json()["choices"][0]["text"] == made["content"]
    assert told.json()["usage"]["images"] == [IMAGE]
    shown = http.post("/v1/completions", json={"prompt": given, "max_tokens": 1, "echo": True})
    assert shown.json()["choices"][0]["text"].startswith("See ")
    assert "<__media__>" in shown.json()["choices"][0]["text"]


def test_what_the_server_says_of_itself(http: httpx.Client, url: str) -> None:
    props = http.get("/props").json()
    assert props["modalities"] == {"vision": True, "audio": False}
    assert props["media_marker"] == "<__media__>"
    (shown,) = http.get("/v1/models").json()["data"]
    assert shown["architecture"]["input_modalities"] == ["text", "image"]
    import anthropic

    with anthropic.Anthropic(api_key="none", base_url=url, max_retries=0) as client:
        assert len(client.models.list().data) == 1


# -- once, and without the tower -------------------------------------------------------------------


def test_a_second_question_reads_its_own_tokens(
    people: openai.OpenAI, service: Service, data: Path
) -> None:
    path = data / "media" / "media" / "q90.jpg"
    first = talk(picture(path), words("One?"))
    media = service.engine.scheduler.media
    before = media.n_encoded
    made = people.chat.completions.create(model="any", messages=first, **GREEDY)
    assert media.n_encoded == before + 1
    assert made.model_extra is not None
    assert made.model_extra["timings"]["media_ms"] > 0
    answer = {"role": "assistant", "content": made.choices[0].message.content}
    for more in ([answer, *talk(words("Two?"))], [answer, *talk(picture(path), words("Both?"))]):
        told = people.chat.completions.create(model="any", messages=[*first, *more], **GREEDY)
        assert told.usage is not None
        assert told.usage.prompt_tokens_details is not None
        assert (told.usage.prompt_tokens_details.cached_tokens or 0) > ROWS
        assert told.model_extra is not None
        assert told.model_extra["timings"]["media_ms"] == 0
    assert media.n_encoded == before + 1


def test_counting_runs_no_tower(
    http: httpx.Client, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Projector, "encode_runs", never)
    path = data / "media" / "media" / "palette.png"
    messages = talk(picture(path), words("How many?"))
    block = {"type": "image", "source": {"type": "base64", "data": base64_of(path)}}
    claude = {"messages": [{"role": "user", "content": [block, words("How many?")]}]}
    items = [{"type": "input_image", "image_url": data_url(path)}]
    items.append({"type": "input_text", "text": "How many?"})
    counts = [
        http.post("/v1/chat/completions/input_tokens", json={"messages": messages}),
        http.post("/v1/messages/count_tokens", json=claude),
        http.post(
            "/v1/responses/input_tokens", json={"input": [{"role": "user", "content": items}]}
        ),
    ]
    (n,) = {answer.json()["input_tokens"] for answer in counts}
    assert n > ROWS
    # Anthropic's clients count to know whether a prompt is too long.
    claude["messages"][0]["content"] = [block] * 20
    answer = http.post("/v1/messages/count_tokens", json=claude)
    assert answer.json()["input_tokens"] > 20 * ROWS
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [base64_of(path)]}
    answer = http.post("/v1/completions/input_tokens", json={"prompt": prompt})
    assert answer.json()["input_tokens"] == ROWS + 2


def test_marks_in_a_users_text_stay_text(people: openai.OpenAI, plain: Path) -> None:
    made = [
        people.chat.completions.create(
            model="any", messages=talk(picture(plain), words(text)), **GREEDY
        )
        for text in ("<|image_pad|>", "x" * len("<|image_pad|>"))
    ]
    usages = [each.usage for each in made]
    assert all(usage is not None and usage.model_extra == {"images": [IMAGE]} for usage in usages)
    prompts = [usage.prompt_tokens for usage in usages if usage is not None]
    # As text it has about as many tokens as letters; as a mark it would have one.
    assert abs(prompts[0] - prompts[1]) < 5


def test_token_rules_count_text(http: httpx.Client, plain: Path) -> None:
    """``min_tokens`` counts what was written, however many rows the prompt has."""
    body = {"messages": talk(picture(plain), words("?")), "logprobs": True, **GREEDY}
    made = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
    (entry,) = made["choices"][0]["logprobs"]["content"]
    best = entry["id"]
    rules = {"stop_token_ids": [best], "min_tokens": 2, "logit_bias": {best: 100}}
    told = http.post("/v1/chat/completions", json={**body, **rules}).json()
    assert told["usage"]["completion_tokens"] == 2
    assert told["choices"][0]["finish_reason"] == "stop"
    several = http.post("/v1/chat/completions", json={**body, "n": 3}).json()
    assert len({choice["message"]["content"] for choice in several["choices"]}) == 1
    assert several["usage"]["images"] == [IMAGE]


def test_metrics_and_slots(http: httpx.Client, service: Service, plain: Path) -> None:
    body = {"messages": talk(picture(plain), words("Slot?")), "id_slot": 2, **GREEDY}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    text = http.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    media = service.engine.scheduler.media
    assert float(found["treadle:media_encoded_total"]) == media.n_encoded > 0
    assert float(found["treadle:media_tokens_total"]) == media.n_rows
    assert float(found["treadle:media_seconds_total"]) == media.seconds > 0
    slot = http.get("/slots").json()[2]
    assert slot["n_tokens"] > ROWS
    assert json.dumps(slot)
