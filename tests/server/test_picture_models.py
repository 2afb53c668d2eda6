"""Pictures and sounds of other families behind the server; its settings for them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

import treadle
from tests.media.sound_cases import wav
from tests.server.conftest import PATIENCE_S, at_socket, running
from tests.server.pictures import base64_of, data_url, load
from treadle.cli import main
from treadle.server.requests.service import Service

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def files(data: Path) -> Path:
    return data / "media" / "media"


@pytest.fixture
def served(
    request: pytest.FixtureRequest, data: Path, one_kernel_cache: Path
) -> Iterator[tuple[Service, httpx.Client]]:
    """A server of the model and settings that the test names."""
    name, settings = request.param
    with (
        load(data, name, **settings) as model,
        running(model, warm=False) as service,
        at_socket(service) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield service, client


def asking(*parts: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(parts)}]
    return {"messages": messages, "temperature": 0, "max_tokens": 4, **more}


def image(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(path), **more}}


@pytest.mark.parametrize("served", [("gemma4u", {"image_max_tokens": 40})], indirect=True)
def test_a_picture_and_a_sound(served: tuple[Service, httpx.Client], files: Path) -> None:
    service, http = served
    model = service.model
    sound = {"data": base64_of(files / "s16.wav"), "format": "wav"}
    parts = [image(files / "plain.png"), {"type": "input_audio", "input_audio": sound}]
    made = http.post(CHAT, json=asking(*parts)).json()
    truth = model.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=4)
    assert made["choices"][0]["message"]["content"] == truth.finish()
    usage = made["usage"]
    (shown,) = usage["images"]
    (heard,) = usage["sounds"]
    assert (shown["width"], shown["height"]) == (97, 61)
    assert heard["seconds"] == pytest.approx(1.0, abs=0.1)
    details = usage["prompt_tokens_details"]
    assert details["image_tokens"] == shown["tokens"] > 0
    assert details["audio_tokens"] == heard["tokens"] > 0
    assert http.get("/props").json()["modalities"] == {"vision": True, "audio": True}
    assert http.post("/api/show", json={}).json()["capabilities"][-2:] == ["vision", "audio"]
    listed = http.get("/v1/models").json()
    assert listed["models"][0]["capabilities"][-3:] == ["vision", "audio", "multimodal"]
    (card,) = listed["data"]
    assert card["architecture"]["input_modalities"] == ["text", "audio", "image"]
    # Their bytes tell llama.cpp's data apart.
    data = [base64_of(files / "s16.wav"), base64_of(files / "plain.png")]
    prompt = {"prompt_string": "a<__media__>b<__media__>", "multimodal_data": data}
    told = http.post("/completion", json={"prompt": prompt, "n_predict": 1}).json()
    assert (told["sounds"], told["images"]) == ([heard], [shown])
    # A damaged sound is the client's error, too.
    wrong = {"type": "input_audio", "input_audio": {"data": base64_of(files / "cut.png")}}
    answer = http.post(CHAT, json=asking(wrong))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].input_audio.data"


@pytest.mark.parametrize("served", [("qwen3asr", {})], indirect=True)
def test_a_sound_in_each_protocol(served: tuple[Service, httpx.Client], files: Path) -> None:
    """The same prompt, counted without encoding it."""
    service, http = served
    model = service.model
    assert model.modalities == {"audio"}
    assert service.bodies.most > 16 << 20
    data = base64_of(files / "s16.wav")
    words = {"type": "text", "text": "What is said?"}
    heard = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    asked = [{"role": "user", "content": [heard, words]}]
    counted = http.post("/v1/responses/input_tokens", json={"input": asked}).json()
    assert service.engine.scheduler.media.n_encoded == 0
    truth = model.chat(asked, temperature=0, max_tokens=4)
    text = truth.finish()
    (usage,) = truth.media
    assert (usage.kind, usage.n_tokens, usage.size) == ("audio", 13, (1, 16000))
    sounds = [{"tokens": 13, "seconds": 1.0}]
    n_prompt = len(truth.prompt_ids)
    assert counted["input_tokens"] == n_prompt
    for part in (heard, {"type": "audio", "audio": f"data:audio/wav;base64,{data}"}):
        made = http.post(CHAT, json=asking(part, words)).json()
        assert made["choices"][0]["message"]["content"] == text
        assert made["usage"]["sounds"] == sounds
        assert made["usage"]["prompt_tokens_details"]["audio_tokens"] == 13
    given = {"input": asked, "temperature": 0, "max_output_tokens": 4}
    made = http.post("/v1/responses", json=given).json()
    assert made["output"][0]["content"][0]["text"] == text
    assert made["usage"]["input_tokens"] == n_prompt
    assert made["usage"]["sounds"] == sounds
    # Anthropic's API has no sounds of its own; MCP's audio of tools, and this one, are read.
    source = {"type": "base64", "media_type": "audio/wav", "data": data}
    block = {"type": "audio", "source": source}
    talk = {"messages": [{"role": "user", "content": [block, words]}], "max_tokens": 4}
    made = http.post("/v1/messages", json={**talk, "temperature": 0}).json()
    assert made["content"][0]["text"] == text
    assert made["usage"]["sounds"] == sounds
    count = http.post("/v1/messages/count_tokens", json=talk).json()
    assert count["input_tokens"] == n_prompt
    options = {"temperature": 0, "num_predict": 4}
    message = {"role": "user", "content": "What is said?", "images": [data]}
    made = http.post("/api/chat", json={"messages": [message], "stream": False, "options": options})
    assert made.json()["message"]["content"] == text
    assert made.json()["prompt_eval_count"] == n_prompt
    body = {"prompt": "What is said?", "images": [data], "stream": False, "options": options}
    assert http.post("/api/generate", json=body).json()["response"] == text
    assert http.post("/api/show", json={}).json()["capabilities"][-1] == "audio"
    assert service.engine.scheduler.media.n_encoded == 1


@pytest.mark.parametrize("served", [("qwen2audio", {})], indirect=True)
def test_sounds_that_are_refused(served: tuple[Service, httpx.Client], files: Path) -> None:
    """The client's error, with its place, before a tower runs."""
    service, http = served
    where = "messages[0].content[0].input_audio.data"

    def refused(part: dict[str, Any], said: str, place: str = where) -> None:
        answer = http.post(CHAT, json=asking(part))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == place
        assert said in error["message"]

    def heard(raw: bytes) -> dict[str, Any]:
        data = base64.b64encode(raw).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

    refused(heard(wav(np.zeros(0, np.float32))), "no samples")
    refused(heard(wav(np.full(8000, np.nan, np.float32))), "NaN or infinite samples")
    refused(heard((files / "s16.wav").read_bytes()[:1000]), "cut: ")
    refused(heard(b"not a sound"), "a file of unknown format")
    refused(heard(wav(np.zeros(50_000, np.float32))), "3.1 s: this model hears at most 3 s")
    answer = http.post(CHAT, json=asking(image(files / "plain.png"))).json()
    assert "was dropped, because the model reads only text and sounds" in answer["warnings"][0]
    assert service.engine.scheduler.media.n_encoded == 0


@pytest.mark.parametrize("served", [("gemma3", {"deterministic": False})], indirect=True)
def test_a_picture_whose_rows_see_each_other(
    served: tuple[Service, httpx.Client], files: Path
) -> None:
    """Beside other requests, and after a text that is cached."""
    _, http = served
    parts = [{"type": "text", "text": "Before it, " * 20}, image(files / "plain.png")]
    several = http.post(CHAT, json=asking(*parts, n=3, logprobs=True)).json()
    assert several["usage"]["images"][0]["tokens"] == 16
    found = [choice["logprobs"]["content"][0]["logprob"] for choice in several["choices"]]
    assert found == pytest.approx([found[0]] * 3, rel=1e-3)
    http.post(CHAT, json=asking(parts[0]))
    again = http.post(CHAT, json=asking(*parts, logprobs=True)).json()
    assert again["choices"][0]["logprobs"]["content"][0]["logprob"] == pytest.approx(
        found[0], rel=1e-3
    )


@pytest.mark.parametrize("served", [("qwen3vl", {"image_max_tokens": 20})], indirect=True)
def test_the_most_tokens_of_a_picture(served: tuple[Service, httpx.Client], files: Path) -> None:
    _, http = served
    for detail in ("auto", "low", "high", "original"):
        made = http.post(CHAT, json=asking(image(files / "plain.png", detail=detail))).json()
        assert 10 < made["usage"]["images"][0]["tokens"] <= 20
    answer = http.post(CHAT, json=asking(image(files / "plain.png", detail="best")))
    assert answer.status_code == 400
    assert "detail" in answer.json()["error"]["message"]


@pytest.mark.parametrize("served", [("qwen3vl", {"mmproj": False, "strict": True})], indirect=True)
def test_without_its_projector(served: tuple[Service, httpx.Client], files: Path) -> None:
    service, http = served
    assert service.bodies.most == 16 << 20
    assert http.get("/props").json()["modalities"] == {"vision": False, "audio": False}
    answer = http.post(CHAT, json=asking(image(files / "plain.png")))
    assert answer.status_code == 400
    assert "the model reads text alone" in answer.json()["error"]["message"]
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [base64_of(files / "plain.png")]}
    answer = http.post("/completion", json={"prompt": prompt})
    assert answer.status_code == 400
    assert "this model reads text only" in answer.json()["error"]["message"]
    body = {"prompt": "x", "images": [base64_of(files / "plain.png")], "raw": True}
    assert http.post("/api/generate", json=body).status_code == 400
    # A text that has the mark is a text.
    answer = http.post("/completion", json={"prompt": {"prompt_string": "a<__media__>"}})
    assert answer.status_code == 200


def test_no_first_picture_waits_for_kernels(
    data: Path, files: Path, one_kernel_cache: Path
) -> None:
    with load(data) as model, running(model) as service:
        before = model.engine.kernels.seconds
        question = {"role": "user", "content": [image(files / "plain.png")]}
        model.chat([question], temperature=0, max_tokens=2).finish()
        assert model.engine.kernels.seconds == before
        assert service.engine.scheduler.media.n_encoded == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--media-host a.test", "--media-host needs --media-urls"),
        ("--media-urls --media-host https://a.test", "without a scheme or port"),
        ("--media-urls --media-host a.test:80", "without a scheme or port"),
    ],
)
@pytest.mark.parametrize("command", ["serve a", "batch a b"])
def test_wrong_options(
    command: str, options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_servers_own_addresses_come_from_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def stop(model: treadle.Model, settings: Any, *_: Any) -> None:
        given.append(settings)

    monkeypatch.setattr("treadle.server.serve.serve", stop)
    for options in ([], ["--media-urls"], ["--media-urls", "--media-host", ".Pictures.test"]):
        assert main(["serve", *options]) == 0
    found = [(settings.media_urls, settings.media_hosts) for settings in given]
    assert found == [(False, ()), (True, ()), (True, (".pictures.test",))]
