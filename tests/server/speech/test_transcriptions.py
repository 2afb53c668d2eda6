"""Transcriptions over HTTP, with a model that follows a script."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.speech.scripted import ENGLISH, Attempt, config_of, recognizer, said, voice
from treadle.server.http.api_errors import ApiError
from treadle.server.http.multipart import MOST_PARTS, MOST_TEXT, read_form
from treadle.server.requests.service import ServerSettings
from treadle.server.router.engine_app import build_speech_engine_app
from treadle.server.speech.speech_app import build_speech_app
from treadle.server.speech.speech_service import SpeechService

SCRIPT = (
    Attempt(said(0.0, " one", 1.0, 1.0, " two", 2.0, 2.0, " thr")),
    Attempt(said(0.0, " three.", 1.5)),
)
PATH = "/v1/audio/transcriptions"
MESSAGES = [{"role": "user", "content": "hi"}]


def wav(seconds: float = 4.0) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((voice(seconds) * 32767).astype("<i2").tobytes())
    return made.getvalue()


@contextmanager
def served(*script: Attempt | list[Attempt], **given: Any) -> Iterator[SpeechService]:
    own = {name: given.pop(name) for name in ("config", "language") if name in given}
    speech = recognizer(*(script or SCRIPT), repeats=True, **own)
    service = SpeechService(speech, ServerSettings(log=False, **given))
    service.engine.start()
    service.engine.warmed.result(60)
    speech.model.windows.clear()  # type: ignore[attr-defined]  # those of the warm-up
    try:
        yield service
    finally:
        service.close()


@contextmanager
def talking(service: SpeechService, build: Any = build_speech_app) -> Iterator[TestClient]:
    with TestClient(build(service), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client() -> Iterator[TestClient]:
    with served() as service, talking(service) as client:
        yield client
        assert not service.engine.outputs


def post(client: Any, path: Any = PATH, sound: Any = None, **fields: Any) -> Any:
    data = {"model": "any", "language": "en", **fields}
    files = {"file": ("a.wav", wav() if sound is None else sound)}
    return client.post(path, data=data, files=files)


def test_every_format(client: TestClient) -> None:
    answer = post(client)
    assert answer.status_code == 200, answer.text
    usage = {"type": "duration", "seconds": 4}
    assert answer.json() == {"text": "one two three.", "usage": usage}
    verbose = post(client, response_format="verbose_json").json()
    assert [row["text"] for row in verbose["segments"]] == [" one", " two", " three."]
    assert "words" not in verbose
    assert (verbose["language"], verbose["duration"]) == ("english", 4.0)
    both = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    verbose = post(client, **both).json()
    assert [row["word"] for row in verbose["words"]] == ["one", "two", "three."]
    assert len(verbose["segments"]) == 3
    both["timestamp_granularities[]"] = ["word"]
    assert "segments" not in post(client, **both).json()
    assert post(client, response_format="text").text == "one two three.\n"
    assert post(client, response_format="srt").text.startswith("1\n00:00:00,000 --> 00:00:01,000\n")
    vtt = post(client, response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00.000 --> 00:01.000\none\n")
    assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"


def test_streams(client: TestClient) -> None:
    answer = post(client, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 3 + [
        "transcript.text.done"
    ]
    assert "".join(event.get("delta", "") for event in events) == events[-1]["text"]
    verbose = post(client, stream="true", response_format="verbose_json").text
    assert verbose.count("transcript.text.segment") == 3
    assert '"start":1.0,"end":2.0' in verbose
    cut = b"RIFF\0\0\0\0WAVE" + wav()[12:20]
    assert post(client, stream="true", sound=cut).status_code == 400
    nans = io.BytesIO()
    np.save(nans, np.zeros(1))
    assert "unknown format" in post(client, sound=nans.getvalue()).json()["error"]["message"]


def test_translations() -> None:
    with served(SCRIPT[1], language="de") as service, talking(service) as client:
        answer = client.post(
            "/v1/audio/translations",
            data={"model": "any", "response_format": "verbose_json", "prompt": "Names"},
            files={"file": ("a.wav", wav(2.0))},
        ).json()
    assert (answer["task"], answer["language"], answer["text"]) == (
        "translate",
        "english",
        "three.",
    )
    with served(config=config_of(ENGLISH)) as service, talking(service) as client:
        answer = post(client, "/v1/audio/translations")
        assert answer.status_code == 400
        assert "English alone" in answer.json()["error"]["message"]


def test_other_settings(client: TestClient) -> None:
    given = {"temperature": "0.3", "seed": "3", "beam_size": "2", "best_of": "2"}
    assert post(client, **given).json()["text"] == "one two three."
    assert post(client, chunking_strategy="auto", language="").status_code == 200
    server_vad = json.dumps({"type": "server_vad", "threshold": 0.5})
    assert post(client, chunking_strategy=server_vad).status_code == 200
    assert post(client, unknown="x").status_code == 200


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": "docx"}, "response_format: 'docx': expected one of json"),
        ({"response_format": "srt", "stream": "true"}, "srt is not streamed"),
        ({"stream": "maybe"}, "stream: 'maybe': expected true or false"),
        ({"temperature": "hot"}, "temperature: 'hot': expected a number from 0 to 2"),
        ({"timestamp_granularities[]": "word"}, "needs response_format verbose_json"),
        ({"timestamp_granularities": '["syllable"]'}, "'syllable': expected one of"),
        ({"language": "xx"}, "language='xx': expected a code"),
        ({"seed": "1.5"}, "seed: '1.5': expected a whole number"),
        ({"beam_size": "99"}, "beams=99: expected 1 to 16"),
        ({"chunking_strategy": "{}"}, "chunking_strategy: '{}': expected auto"),
        ({"chunking_strategy": "{x"}, "chunking_strategy"),
        ({"include[]": "logprobs"}, "include: not supported"),
        ({"prompt": "x" * (MOST_TEXT + 1)}, "prompt: more than 64 KiB"),
    ],
)
def test_wrong_fields(client: TestClient, fields: dict[str, str], text: str) -> None:
    answer = post(client, **fields)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_wrong_sounds(client: TestClient) -> None:
    for sound, text in (
        (b"", "an empty file"),
        (b"hello", "unknown format"),
        (wav()[:-100], "cut: "),
        (b"RIFF\0\0\0\0WAVE", "no samples"),
    ):
        answer = post(client, sound=sound)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert text in error["message"]
        assert error["param"] == "file"
    assert "file: required" in client.post(PATH, files={"model": (None, "x")}).text
    twice = [("file", ("a", b"1")), ("file", ("b", b"2"))]
    assert "given twice" in client.post(PATH, files=twice).text
    assert client.post(PATH, json={}).status_code == 415


def test_other_paths(client: TestClient) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/embeddings"):
        answer = client.post(path, json={"messages": MESSAGES})
        assert answer.status_code == 400
        assert "is a speech model: it transcribes sound" in answer.text
    (listed,) = client.get("/v1/models").json()["data"]
    assert listed["id"] == "scripted"
    assert listed["architecture"] == {"input_modalities": ["audio"], "output_modalities": ["text"]}
    assert listed["meta"]["languages"] == ["en", "de"]
    assert client.get("/v1/models/").json()["object"] == "list"
    assert client.get("/models/any").json() == listed
    assert client.get("/health").json() == {"status": "ok"}
    assert "transcribes with scripted" in client.get("/").text
    assert "version" in client.get("/version").json()
    assert client.get("/metrics").status_code == 501
    assert client.get("/nowhere").status_code == 404


def test_metrics_keys_and_limits() -> None:
    with served(metrics=True, api_keys=("k",), alias="ears") as service:
        with talking(service) as client:
            assert post(client).status_code == 401
            client.headers["authorization"] = "Bearer k"
            assert post(client).status_code == 200
            assert "treadle:transcriptions_total 1\n" in client.get("/metrics").text
            assert "seconds_total 4\n" in client.get("/metrics").text
            service.draining = True
            assert post(client).status_code == 503
            service.draining = False
            service.engine.state = "loading"
            assert post(client).json()["error"]["code"] == "loading"
            service.engine.state = "error"
            assert client.get("/health").status_code == 500
            service.engine.state = "ok"
            service.settings = ServerSettings(max_requests=0, log=False, api_keys=("k",))
            assert "its limit" in post(client).text
        with talking(service, build_speech_engine_app) as client:
            assert client.get("/treadle/charges").status_code in (401, 404)


def test_the_end_of_the_server_and_of_time() -> None:
    endless = Attempt(said(0.0, " a", 1.0, 1.0, " b", 2.0, 2.0, " c"))
    with served(endless) as service, talking(service) as client:
        headers = {"x-request-timeout": "0.000001"}
        files = {"file": ("a.wav", wav())}
        answer = client.post(PATH, data={"language": "en"}, files=files, headers=headers)
        assert answer.status_code == 504
        answer = client.post(PATH, files=files, headers={"x-request-timeout": "x"})
        assert answer.status_code == 400
        assert not service.engine.outputs


def test_an_error_of_the_model() -> None:
    damaged = Attempt(said(0.0, " hi", 1.0), sure=float("nan"))
    with served(damaged) as service, talking(service) as client:
        answer = post(client)
        assert answer.status_code == 500
        assert "not finite" in answer.json()["error"]["message"]
        assert "not finite" in post(client, stream="true").text


def test_openais_client(client: TestClient) -> None:
    import openai

    people = openai.OpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=client, max_retries=0
    )
    sound = ("a.wav", wav())
    made = people.audio.transcriptions.create(model="any", file=sound, language="en")
    assert made.text == "one two three."
    assert made.usage is not None
    assert made.usage.type == "duration"
    verbose = people.audio.transcriptions.create(
        model="any",
        file=sound,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert verbose.words is not None
    assert verbose.words[0].word == "one"
    assert verbose.segments is not None
    assert verbose.segments[2].text == " three."
    srt = people.audio.transcriptions.create(model="any", file=sound, response_format="srt")
    assert srt.startswith("1\n00:00:00,000")
    stream = people.audio.transcriptions.create(model="any", file=sound, stream=True)
    events = [*stream]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "one two three."
    assert "".join(e.delta for e in events if e.type == "transcript.text.delta") == events[-1].text
    with pytest.deprecated_call():  # as OpenAI's client has it, not its API
        translated = people.audio.translations.create(model="any", file=sound)
    assert translated.text == "one two three."
    with pytest.raises(openai.BadRequestError, match="it transcribes sound"):
        people.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="unknown format"):
        people.audio.transcriptions.create(model="any", file=("a.wav", b"no sound"))


# -- forms -----------------------------------------------------------------------------------------


def form(*parts: bytes, boundary: bytes = b"b", end: bytes = b"--\r\n") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + (
        b"--" + boundary + end
    )


def part(head: str, data: bytes) -> bytes:
    return f"Content-Disposition: form-data; {head}".encode() + b"\r\n\r\n" + data


def test_forms() -> None:
    body = form(
        part('name="file"; filename="a \\"b\\".wav"', b"1\r\n--x\r\n2"),
        b"Content-Type: text/plain\r\n" + part("name=model", b"whisper"),
        part('name="empty"', b""),
    )
    found = read_form('multipart/form-data; boundary="b"', b"preamble\r\n" + body)
    assert [(each.name, bytes(each.data), each.filename) for each in found] == [
        ("file", b"1\r\n--x\r\n2", 'a "b".wav'),
        ("model", b"whisper", None),
        ("empty", b"", None),
    ]
    assert found[1].text() == "whisper"
    assert read_form("multipart/form-data; boundary=b", b"--b--\r\n") == []


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "boundary is not in it"),
        (b"x--b\r\n", "boundary is not in it"),
        (b"--b\r\nno end", "headers of part 1 have no end"),
        (form(part('name="a"', b"1"), end=b""), "headers of part 2"),
        (b"--b\r\n" + part('name="a"', b"1"), "part 1 has no end"),
        (form(b"Content-Type: x\r\n\r\n1"), "part 1 has no name"),
        (form(part("filename=x", b"1")), "part 1 has no name"),
        (form(*[part("name=a", b"1")] * (MOST_PARTS + 1)), "more than 64 parts"),
    ],
)
def test_damaged_forms(body: bytes, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        read_form("multipart/form-data; boundary=b", body)
    assert caught.value.status == 400


def test_fields_that_are_no_text() -> None:
    (found,) = read_form("multipart/form-data; boundary=b", form(part("name=a", b"\xff")))
    with pytest.raises(ApiError, match="a: is not UTF-8"):
        found.text()
    with pytest.raises(ApiError, match="expected multipart/form-data"):
        read_form("application/json", b"{}")
