"""A server of an encoder-decoder model: prompts, several answers, chats, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import events, running, talking
from tests.tiny_t5 import write_t5

N = 6
PROMPT = "the cat sat on the mat"
GREEDY = {"max_tokens": N, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[treadle.Model]:
    path = write_t5(tmp_path_factory.mktemp("t5") / "t5.gguf", "flan")
    with treadle.load(path, threads=2, context=96, n_sequences=4, kv="f32") as model:
        yield model


@pytest.fixture(scope="module")
def client(model: treadle.Model) -> Iterator[TestClient]:
    with running(model) as service, talking(service) as client:
        yield client


def test_completions(client: TestClient, model: treadle.Model) -> None:
    """Several answers to one prompt are of one encoding, and the next request finds it."""
    text = model.generate(PROMPT, max_tokens=N, temperature=0).finish()
    n_prompt = len(model.tokenize(PROMPT))
    body = {**GREEDY, "prompt": [PROMPT, "on"], "n": 2, "logprobs": 1}
    made = client.post("/v1/completions", json=body).json()
    assert [each["text"] for each in made["choices"][:2]] == [text] * 2
    assert made["usage"]["prompt_tokens"] == n_prompt + len(model.tokenize("on"))
    assert len(made["choices"][0]["logprobs"]["tokens"]) == made["usage"]["completion_tokens"] // 4
    again = client.post("/v1/completions", json={**GREEDY, "prompt": PROMPT}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == n_prompt
    streamed = {**GREEDY, "prompt": PROMPT, "stream": True}
    found = events(client.post("/v1/completions", json=streamed).text)
    assert "".join(each["choices"][0]["text"] for each in found if each != "[DONE]") == text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_chats(path: str, client: TestClient, model: treadle.Model) -> None:
    turns = ["the cat", "no", PROMPT]
    roles = ["user", "assistant", "user"]
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
    body = {**GREEDY, "model": "t5", "messages": messages, "stream": False}
    body["options"] = {"temperature": 0, "num_predict": N}
    if path != "/api/chat":
        del body["options"]
    made = client.post(path, json=body)
    assert made.status_code == 200
    text = model.generate(PROMPT, max_tokens=N, temperature=0).finish()
    assert text.strip() in made.text.encode().decode("unicode_escape") or text.strip() in made.text


def test_what_is_refused(client: TestClient) -> None:
    long = client.post("/v1/completions", json={**GREEDY, "prompt": "cat " * 200})
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    vectors = client.post("/v1/embeddings", json={"input": PROMPT})
    assert vectors.status_code == 400
    assert "t5 generates text" in vectors.json()["error"]["message"]
