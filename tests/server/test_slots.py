"""llama.cpp's slots: texts saved to files, restored and erased."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import N_CTX, running, talking
from treadle.server.requests import client_slots
from treadle.server.requests.client_slots import NONE, ClientSlots, alike
from treadle.server.requests.service import Service

PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def service(model: treadle.Model, folder: Path) -> Iterator[Service]:
    with model.engine.lock:
        model.engine.cache.forget()  # what other tests have said
    with running(model, slot_save_path=folder) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with talking(service) as client:
        yield client


def write(client: TestClient, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, **more}
    made: dict[str, Any] = client.post("/completion", json=body).json()
    return made


def act(client: TestClient, slot: object, action: str, name: str | None = None) -> Any:
    body = {} if name is None else {"filename": name}
    return client.post(f"/slots/{slot}?action={action}", json=body)


def test_a_text_is_saved_erased_and_restored(
    client: TestClient, model: treadle.Model, folder: Path
) -> None:
    first = write(client, id_slot=2)
    assert (first["id_slot"], first["tokens_cached"]) == (2, 0)
    n = first["tokens_evaluated"] + first["tokens_predicted"]
    assert [slot["n_tokens"] for slot in client.get("/slots").json()] == [0, 0, n, 0]

    saved = act(client, 2, "save", "mine.bin").json()
    size = (folder / "mine.bin").stat().st_size
    assert (saved["id_slot"], saved["n_saved"], saved["n_written"]) == (2, n, size)
    assert saved["filename"] == "mine.bin"
    if os.name == "posix":  # what users said is not for others on the machine
        assert (folder / "mine.bin").stat().st_mode & 0o777 == 0o600

    assert act(client, 2, "erase").json() == {"id_slot": 2, "n_erased": n}
    assert act(client, 2, "save", "none.bin").status_code == 400  # it is empty
    assert model.engine.cache.n_cached_tokens(model.tokenize(PROMPT)) == 0
    assert write(client, id_slot=1)["tokens_cached"] == 0
    act(client, 1, "erase")

    restored = act(client, 3, "restore", "mine.bin").json()
    assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (3, n, size)
    again = write(client)
    assert again["id_slot"] == 3  # where a text that begins so was
    assert again["tokens_cached"] == first["tokens_evaluated"] - 1
    assert again["content"] == first["content"]


ASKED: Any = {
    "/completion": {"prompt": PROMPT},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


@pytest.mark.parametrize("path", list(ASKED))
def test_the_slot_that_a_call_names(client: TestClient, path: str) -> None:
    body = {**ASKED[path], "max_tokens": 3}
    for slot in (3, 1, 2):
        assert client.post(path, json={**body, "id_slot": slot}).status_code == 200
        assert client.get("/slots").json()[slot]["n_tokens"] > 0
    assert client.get("/slots").json()[0]["n_tokens"] == 0
    assert client.post(path, json={**body, "id_slot": -1}).status_code == 200


@pytest.mark.parametrize("slot", [4, 99, -2, "1", 1.5])
@pytest.mark.parametrize("path", list(ASKED))
def test_a_slot_that_no_call_can_name(client: TestClient, path: str, slot: object) -> None:
    told = client.post(path, json={**ASKED[path], "max_tokens": 3, "id_slot": slot})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "id_slot")


def test_what_other_texts_go_on_from_is_not_erased(
    client: TestClient, model: treadle.Model
) -> None:
    write(client, id_slot=0)
    write(client, id_slot=1, prompt=PROMPT + PROMPT)
    act(client, 0, "erase")
    assert model.engine.cache.n_cached_tokens(model.tokenize(PROMPT + PROMPT)) > 0
    act(client, 1, "erase")
    assert model.engine.cache.n_cached_tokens(model.tokenize(PROMPT + PROMPT)) == 0


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "a\\b", "..", ".hidden", "", "x\0y", "x" * 241, "é" * 200, "x."],
)
def test_names_lead_nowhere_else(client: TestClient, folder: Path, name: str) -> None:
    write(client, id_slot=0)
    for action in ("save", "restore"):
        told = act(client, 0, action, name)
        assert (told.status_code, told.json()["error"]["param"]) == (400, "filename")
    assert list(folder.iterdir()) == []


def test_files_that_are_none_of_ours(client: TestClient, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside"
    outside.write_text("secret")
    (folder / "link").symlink_to(outside)
    (folder / "folder").mkdir()
    (folder / "text").write_text("no session")
    write(client, id_slot=0)
    for name, words in (
        ("link", "not a regular file"),
        ("folder", "not a regular file"),
        ("text", ""),
    ):
        told = act(client, 0, "restore", name)
        assert told.status_code == 400
        assert words in told.json()["error"]["message"]
        assert str(folder) not in told.text
    assert act(client, 0, "restore", "missing").status_code == 400
    assert act(client, 0, "save", "link").status_code == 400
    assert outside.read_text() == "secret"


@pytest.mark.parametrize("slot", ["4", "-1", "x", "99999999999", "0000000009", "٣"])
def test_slots_that_are_not_there(client: TestClient, slot: str) -> None:
    assert act(client, slot, "erase").status_code == 400
    assert act(client, 0, "look").status_code == 400


def test_a_slot_that_the_context_has_filled(client: TestClient, folder: Path) -> None:
    """Its last token was never read. The longest name that there may be is one."""
    made = write(client, id_slot=3, prompt=[5] * (N_CTX - 3), n_predict=20, ignore_eos=True)
    assert made["tokens_predicted"] == 3
    name = "x" * 240
    assert act(client, 3, "save", name).json()["n_saved"] == N_CTX
    assert act(client, 1, "restore", name).json()["n_restored"] == N_CTX
    assert act(client, 1, "save", "again").json()["n_saved"] == N_CTX


def test_a_slot_has_two_paths(client: TestClient) -> None:
    write(client, id_slot=1)
    assert client.post("/v1/slots/1?action=erase").json()["n_erased"] > 0


def test_a_slot_at_work(service: Service, client: TestClient) -> None:
    write(client, id_slot=0)
    at_work: Any = object()
    service.engine.slots[0].output = at_work
    for action in ("save", "restore", "erase"):
        told = act(client, 0, action, "x")
        assert (told.status_code, told.json()["error"]["message"]) == (503, "slot 0 is in use")
    service.engine.slots[0].output = None
    assert act(client, 0, "erase").json()["n_erased"] > 0


def test_without_a_folder_nothing_is_saved(model: treadle.Model) -> None:
    with running(model) as service, talking(service) as client:
        for action in ("save", "restore"):
            told = act(client, 0, action, "x")
            assert told.status_code == 501
            assert "--slot-save-path" in told.json()["error"]["message"]
        assert act(client, 0, "erase").json()["n_erased"] == 0


class Request:
    lora = ()

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class Text:
    slot = NONE

    def __init__(self, *ids: int) -> None:
        self.request = Request(list(ids))


def test_which_place_a_text_takes() -> None:
    places: Any = ClientSlots(2)
    a, b, c = (Text(i, 2, 3, 4) for i in (1, 5, 9))
    for text in (a, b, c):
        places.take(text)
    assert [text.slot for text in (a, b, c)] == [0, 1, NONE]
    places.leave(c)
    places.leave(b)
    places.leave(a)
    assert [slot.ids for slot in places] == [[1, 2, 3, 4], [5, 2, 3, 4]]
    like_b = Text(5, 2, 3, 7)
    other = Text(8)
    wanted = Text(1, 2, 3)
    places.take(like_b)
    assert like_b.slot == 1
    places.leave(like_b)
    places.take(other)
    assert other.slot == 0  # where none was for longest
    places.leave(other)
    places.take(wanted, 1)
    assert wanted.slot == 1
    assert alike([1, 2, 3], [1, 9]) == 0
    assert alike([1, 2, 3], [1, 2, 9]) == 2


def test_the_place_is_that_of_the_longest_equal_beginning() -> None:
    """Whatever the order in which slots are looked at."""
    draw = random.Random(5)
    for _ in range(300):
        places: Any = ClientSlots(5)
        for slot in places:
            slot.used = draw.randrange(3)
            slot.ids = [draw.randrange(2) for _ in range(draw.randrange(7))]
        text = Text(*(draw.randrange(2) for _ in range(6)))
        best = max(places, key=lambda s: (plainly_alike(s.ids, text.request.ids), -s.used))
        places.take(text)
        assert text.slot == best.id
    a = [*range(1000)]
    for n in (0, 1, 255, 256, 257, 999, 1000):
        assert alike(a, [*a[:n], -1]) == plainly_alike(a, [*a[:n], -1])


def plainly_alike(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n if 2 * n >= len(a) else 0


def test_many_texts_that_are_alike_are_compared_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 texts of a long prompt held up the event loop for seconds."""
    places: Any = ClientSlots(100)
    for slot in places:
        slot.ids = [*range(50), 51, 52]
    n_compared = 0

    def counted(a: list[int], b: list[int]) -> int:
        nonlocal n_compared
        n_compared += 1
        return alike(a, b)

    monkeypatch.setattr(client_slots, "alike", counted)
    for _ in places:
        places.take(Text(*range(50)))
    assert n_compared <= 2 * len(places)
