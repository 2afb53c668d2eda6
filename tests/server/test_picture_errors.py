"""Pictures that cannot be read, addresses, and what happens while a picture is encoded."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import treadle
from tests.server.conftest import PATIENCE_S, Served, at_socket, events, running, until
from tests.server.pictures import ROWS, SlowTower, base64_of, data_url, load
from treadle.errors import FileError
from treadle.media.limits import MediaLimits
from treadle.media.projector import Projector
from treadle.server.batch_file.lines import InputLine
from treadle.server.batch_file.local import LocalAnswers
from treadle.server.requests import service as services
from treadle.server.requests.service import Service

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def model(data: Path, one_kernel_cache: Path) -> Iterator[treadle.Model]:
    with load(data) as model:
        yield model


@pytest.fixture(scope="module")
def service(model: treadle.Model) -> Iterator[Service]:
    with running(model, media_urls=True, media_hosts=("pictures.test",)) as service:
        yield service


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    with at_socket(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def files(data: Path) -> Path:
    return data / "media" / "media"


@pytest.fixture
def no_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a tower ran")

    monkeypatch.setattr(Projector, "encode_runs", never)


@pytest.fixture
def tower(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTower]:
    assert model.media is not None
    model.engine.cache.forget()
    projector = model.media.projector
    made = SlowTower(projector)
    monkeypatch.setattr(projector, "encode_runs", made)
    yield made
    made.go.set()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asking(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **GREEDY, **more}


def fresh(n: int) -> str:
    """A picture that no other test sends."""
    head = b"BM" + (54 + 16 * 48).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    sizes = (40).to_bytes(4, "little") + (16).to_bytes(4, "little") * 2
    rest = (1).to_bytes(2, "little") + (24).to_bytes(2, "little") + bytes(24)
    pixels = bytes((n + i) % 256 for i in range(16 * 48))
    return "data:image/bmp;base64," + base64.b64encode(head + sizes + rest + pixels).decode()


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut.png", "truncated"),
        ("not.png", "SVG is not read"),
        ("empty.png", "an empty file"),
        ("bomb.png", "60000 x 60000 pixels are 3600.0 million: the limit is 64 million"),
        ("flat.png", "12000 x 12000 pixels are 144.0 million"),
        ("tall.png", "the longer side may be at most 200 times"),
        ("text.png", "damaged"),
        ("s16.wav", "WAV is not read"),
    ],
)
@pytest.mark.usefixtures("no_tower")
def test_a_file_that_is_refused(http: httpx.Client, files: Path, name: str, said: str) -> None:
    """With its place, whatever the protocol; the server goes on."""
    data = base64_of(files / name)
    sized = data_url(files / "plain.png")
    answer = http.post(CHAT, json=asking(image(sized), image(f"data:image/png;base64,{data}")))
    error = answer.json()["error"]
    place = "messages[0].content[1].image_url.url"
    assert (answer.status_code, error["param"]) == (400, place)
    assert error["message"].startswith(f"{place}: ")
    assert said in error["message"]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    answer = http.post("/v1/messages", json={**body, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[0].content[0].source.data: ")
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": f"data:;base64,{data}"}]}
    ]
    answer = http.post("/v1/responses", json={"input": items, "instructions": "Be kind."})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[0].image_url"
    if not name.endswith(".wav"):  # Ollama's images may be sounds
        answer = http.post("/api/chat", json={"messages": [{"role": "user", "images": [data]}]})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("messages[0].images[0]: ")
        for more in ({}, {"raw": True}):
            answer = http.post("/api/generate", json={"prompt": "x", "images": [data], **more})
            assert answer.status_code == 400
            assert answer.json()["error"].startswith("images[0]: ")
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [data]}
    answer = http.post("/completion", json={"prompt": prompt})
    assert answer.status_code == 400
    assert http.post(CHAT, json=asking({"type": "text", "text": "hi"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, asking(image("data:image/png;base64,?")), "not base64"),
        (CHAT, asking(image("data:image/png,x")), "is not a data: URL of base64"),
        (CHAT, asking(image("file:///etc/passwd")), "files of this machine are not read"),
        (CHAT, asking(image("/etc/passwd")), "files of this machine are not read"),
        (CHAT, asking({"type": "image_url"}), "expected image_url"),
        (CHAT, asking({"type": "image", "path": "/etc/passwd"}), "files of this machine"),
        (CHAT, asking(image("https://other.test/a.png")), "is not among the allowed ones"),
        (
            CHAT,
            asking(*[image(fresh(0))] * 33),
            "33 pictures and sounds: the limit is 32 a request",
        ),
        ("/completion", {"prompt": "x", "image_data": [{"data": "x", "id": 1}]}, "multimodal_data"),
        (
            "/completion",
            {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}},
            "prompt_string has <__media__> 0 times: expected 1, one for each picture or sound",
        ),
        (
            "/completion",
            {"prompt": {"prompt_string": "<__media__>", "multimodal_data": "aGk="}},
            "expected an array",
        ),
        (
            "/embedding",
            {"content": {"prompt_string": "<__media__>", "multimodal_data": ["aGk="]}},
            "pictures and sounds get no vectors",
        ),
        ("/v1/embeddings", {"input": [{"multimodal_data": ["aGk="]}]}, "get no vectors"),
        (
            "/v1/completions",
            {
                "prompt": {"prompt_string": "<__media__>", "multimodal_data": [fresh(0)[22:]]},
                "echo": True,
                "logprobs": 1,
            },
            "logprobs: with echo",
        ),
        ("/api/generate", {"prompt": "x", "suffix": "y", "images": ["aGk="]}, "images"),
    ],
)
@pytest.mark.usefixtures("no_tower")
def test_what_is_wrong_is_said(http: httpx.Client, path: str, body: Any, said: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert said in answer.text.replace("\\\\", "")


@pytest.mark.usefixtures("no_tower")
def test_more_pictures_than_the_context(http: httpx.Client, files: Path) -> None:
    answer = http.post(CHAT, json=asking(*[image(data_url(files / "plain.png"))] * 20))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("prompt is too long: at least 1025 tokens > 1024 maximum")
    assert error["n_ctx"] == 1024


@pytest.mark.usefixtures("no_tower")
def test_more_pixels_than_a_request_may_have(
    http: httpx.Client, model: treadle.Model, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.media is not None
    monkeypatch.setattr(model.media, "limits", MediaLimits(request_pixels=10_000))
    part = image(data_url(files / "plain.png"))
    answer = http.post(CHAT, json=asking(part, part))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"


def test_ids_of_rows_are_no_tokens_of_a_client(http: httpx.Client, service: Service) -> None:
    """They might name another client's picture."""
    assert http.post(CHAT, json=asking(image(fresh(1)))).status_code == 200
    (entry, *_) = service.model.engine.media._by_number.values()
    ids = list(entry.ids)
    for path, body in (
        ("/completion", {"prompt": ids}),
        ("/v1/completions", {"prompt": [65, *ids]}),
        ("/embedding", {"content": ids}),
        ("/tokenize", {"content": ids}),
        ("/detokenize", {"tokens": ids}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, path


def test_a_projector_of_another_model(process: Served, data: Path) -> None:
    """One clear error at the start."""
    folder = data / "media"
    model = str(folder / "qwen3vl" / "text.gguf")
    server = process("--mmproj", str(folder / "gemma3" / "mmproj.gguf"), "--no-log", model)
    code, err = server.end()
    assert server.url == ""
    assert code != 0
    (line,) = [line for line in err.splitlines() if "mmproj.gguf" in line]
    assert "this model is qwen3vl" in line
    assert "Traceback" not in err


def test_a_damaged_projector_does_not_end_the_server(
    http: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = service.model.media
    assert media is not None
    path = media.projector.gguf.path

    def broken(*_: Any) -> Any:
        raise FileError("the file shrank", path=path)
        yield

    with monkeypatch.context() as patch:
        patch.setattr(media.projector, "encode_runs", broken)
        answer = http.post(CHAT, json=asking(image(fresh(2))))
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "mmproj.gguf: the file shrank"
    assert service.engine.state == "ok"
    assert http.post(CHAT, json=asking(image(fresh(2)))).status_code == 200


# -- addresses ------------------------------------------------------------------------------------


def test_addresses_are_off_by_default(model: treadle.Model) -> None:
    with (
        running(model) as service,
        at_socket(service) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        answer = client.post(CHAT, json=asking(image("https://pictures.test/a.png")))
        assert answer.status_code == 400
        assert "start treadle with --media-urls" in answer.json()["error"]["message"]


def test_a_picture_at_an_address(
    http: httpx.Client, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched once, by the server's rules, and is the same as if it had been sent."""
    asked = []

    def fetch(url: str, policy: Any, place: str) -> bytes:
        asked.append((url, policy.hosts, place))
        return (files / "grey.png").read_bytes()

    monkeypatch.setattr(services, "fetch_media", fetch)
    address = "https://pictures.test/grey.png"
    sent = http.post(CHAT, json=asking(image(data_url(files / "grey.png")))).json()
    made = http.post(CHAT, json=asking(image(address))).json()
    assert made["usage"]["images"] == sent["usage"]["images"]
    assert made["choices"] == sent["choices"]
    assert asked == [(address, ("pictures.test",), "messages[0].content[0].image_url.url")]
    block = {"type": "image", "source": {"type": "url", "url": address}}
    body = {"messages": [{"role": "user", "content": [block, block]}], "max_tokens": 1}
    assert len(http.post("/v1/messages", json=body).json()["usage"]["images"]) == 2
    assert len(asked) == 2
    # Nothing is fetched for a prompt that only people read.
    assert http.post("/apply-template", json=asking(image(address))).status_code == 200
    assert len(asked) == 2
    monkeypatch.setattr(services, "MAX_FETCHED", 100)
    assert http.post(CHAT, json=asking(image(address))).status_code == 400


def test_an_address_that_cannot_be_read(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(url: str, policy: Any, place: str) -> bytes:
        raise FileError("pictures.test answered HTTP status 404", path=place)

    monkeypatch.setattr(services, "fetch_media", fetch)
    answer = http.post(CHAT, json=asking(image("http://pictures.test/x")))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_media")
    assert error["message"].endswith(".url: pictures.test answered HTTP status 404")


def test_slow_hosts_delay_no_other_requests(
    http: httpx.Client, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    begun = []

    def fetch(url: str, policy: Any, place: str) -> bytes:
        begun.append(url)
        go.wait(PATIENCE_S)
        return (files / "grey.png").read_bytes()

    monkeypatch.setattr(services, "fetch_media", fetch)
    codes = []

    def ask(n: int) -> None:
        body = asking(image(f"http://pictures.test/{n}"), max_tokens=1)
        codes.append(http.post(CHAT, json=body).status_code)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(begun) >= 4)
        assert http.post(CHAT, json=asking({"type": "text", "text": "hi"})).status_code == 200
        assert not codes
    finally:
        go.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert codes == [200] * 6


# -- while a picture is encoded -------------------------------------------------------------------


def test_others_write_while_a_picture_is_encoded(http: httpx.Client, tower: SlowTower) -> None:
    """And its own stream reports progress."""
    seen = []
    body = asking(image(fresh(3)), stream=True, return_progress=True)
    with http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if '"prompt_progress"' in line:
                seen.append(json.loads(line.removeprefix("data: "))["prompt_progress"])
                if seen[-1]["media"]["encoding_ms"] >= 200:
                    break
        slices = tower.n_slices
        told = http.post(CHAT, json=asking({"type": "text", "text": "hi"}, max_tokens=20)).json()
        assert told["usage"]["completion_tokens"] == 20
        assert tower.n_slices > slices
        tower.go.set()
        rest = events("\n\n".join(lines))
    assert [each["media"]["total"] for each in seen] == [1] * len(seen)
    assert {each["media"]["encoded"] for each in seen} == {0}
    assert len({each["media"]["encoding_ms"] for each in seen}) > 1
    assert rest[-1] == "[DONE]"
    assert tower.n_begun == tower.n_closed == 1


def test_a_client_that_leaves_stops_the_encoding(
    http: httpx.Client, service: Service, tower: SlowTower
) -> None:
    body = asking(image(fresh(4)), stream=True)
    with http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: tower.n_slices)
    until(lambda: not service.engine.outputs)
    until(lambda: tower.n_closed == 1)
    held = [entry for entry in service.model.engine.media._by_number.values() if entry.holders]
    assert not held


def test_a_time_limit_holds_while_a_picture_is_encoded(
    http: httpx.Client, service: Service, tower: SlowTower
) -> None:
    answer = http.post(CHAT, json=asking(image(fresh(5)), timeout=0.5))
    assert answer.status_code == 504
    until(lambda: tower.n_closed == 1)
    tower.go.set()
    assert http.post(CHAT, json=asking(image(fresh(5)))).status_code == 200


def test_many_pictures_wait_in_bounded_memory(
    http: httpx.Client, tower: SlowTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_PREPARED", 1000)
    with http.stream("POST", CHAT, json=asking(image(fresh(6)), stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: tower.n_slices)
        refused = http.post(CHAT, json=asking(image(fresh(7))))
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        text = http.post(CHAT, json=asking({"type": "text", "text": "hi"}))
        assert text.status_code == 200
        tower.go.set()
        for _ in lines:
            pass
    assert http.post(CHAT, json=asking(image(fresh(7)))).status_code == 200


def test_pictures_that_wait_count_as_queued(
    service: Service, http: httpx.Client, tower: SlowTower
) -> None:
    media = service.engine.scheduler.media
    if not media.n_rows:  # nothing was encoded in this process yet
        tower.go.set()
        http.post(CHAT, json=asking(image(fresh(8))))
        tower.go.clear()
    with http.stream("POST", CHAT, json=asking(image(fresh(9)), stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: tower.n_slices)
        assert service.engine.queued_s() > media.row_s > 0
        tower.go.set()


# -- the rest -------------------------------------------------------------------------------------


def test_bodies_may_be_larger(service: Service, http: httpx.Client, files: Path) -> None:
    """Sixteen MiB are few for pictures."""
    text = {"type": "text", "text": "x"}
    large = {**text, "ignored": "x" * (20 << 20)}
    assert http.post(CHAT, json=asking(large)).status_code == 200
    assert service.bodies.most == 64 << 20


def test_a_batch_file(model: treadle.Model, files: Path) -> None:
    own = Service(model)

    async def run() -> list[Any]:
        local = LocalAnswers(own, {})
        await local.ready()
        body = asking(image(data_url(files / "plain.png")))
        given = [body, asking(image(data_url(files / "cut.png")))]
        lines = [InputLine(n, json.dumps(each).encode()) for n, each in enumerate(given)]
        return [json.loads((await local.answer(line)).data) for line in lines]

    try:
        good, bad = asyncio.run(run())
    finally:
        own.close()
    assert good["usage"]["images"][0]["tokens"] == ROWS
    assert bad["error"]["param"] == "messages[0].content[0].image_url.url"


def test_the_log_has_pictures(
    model: treadle.Model, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        running(model, log=True, log_text=True) as service,
        at_socket(service) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        client.post(CHAT, json=asking(image(data_url(files / "plain.png"))))
        time.sleep(0.1)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    (line,) = [line for line in lines if line.get("path") == CHAT]
    assert line["media"] == 1
    assert line["media_s"] >= 0
    assert line["prompts"][0].count("<__media__>") == 1


def test_a_slot_with_a_picture_is_saved(model: treadle.Model, files: Path, tmp_path: Path) -> None:
    body = asking(image(data_url(files / "plain.png")), id_slot=1)
    with (
        running(model, slot_save_path=tmp_path) as service,
        at_socket(service) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        first = client.post(CHAT, json=body).json()
        saved = client.post("/slots/1?action=save", json={"filename": "a"})
        assert saved.status_code == 200
        model.engine.cache.forget()
        restored = client.post("/slots/1?action=restore", json={"filename": "a"})
        assert restored.json()["n_restored"] == saved.json()["n_saved"]
        again = client.post(CHAT, json=body).json()
        assert again["choices"] == first["choices"]
        assert again["timings"]["cache_n"] > ROWS
        assert client.post("/slots/1?action=erase").status_code == 200
        # Neither pages nor rows of the picture are left.
        model.engine.cache.forget()
        for entry in model.engine.media._by_number.values():
            entry.rows = None
        service.engine.slots[1].ids = list(range(65, 70)) + list(_rows(model))
        gone = client.post("/slots/1?action=save", json={"filename": "b"})
        assert gone.status_code == 400
        assert "its pictures are no longer in memory" in gone.json()["error"]["message"]


def _rows(model: treadle.Model) -> range:
    return next(iter(model.engine.media._by_number.values())).ids
