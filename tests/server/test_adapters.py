"""Adapters over HTTP: the server's own scales, and those of a call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.loras import draw_pairs, write_gguf
from tests.server.conftest import running, talking
from tests.server.test_openai import post
from treadle.api.options import packaged_model


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[treadle.Model]:
    """The packaged model with two adapters, the second of which texts have."""
    folder = tmp_path_factory.mktemp("loras")
    path = packaged_model()
    given = [
        (write_gguf(folder / f"{name}.gguf", draw_pairs(path, 4, seed, ("ffn_down",))), scale)
        for seed, (name, scale) in enumerate((("pirate", 0.0), ("poet", 1.0)))
    ]
    settings: dict[str, Any] = {"threads": 2, "context": 256, "deterministic": True}
    with treadle.load(path, lora=given, n_sequences=4, **settings) as model:
        yield model


@pytest.fixture
def caller(adapted: treadle.Model) -> Iterator[TestClient]:
    before = adapted.engine.cache.lora
    with running(adapted) as service, talking(service) as client:
        yield client
    adapted.engine.cache.lora = before


def text(model: treadle.Model, lora: Any) -> str:
    return model.generate("def f(", temperature=0, max_tokens=8, lora=lora).finish()


BODY: dict[str, Any] = {"prompt": "def f(", "temperature": 0, "max_tokens": 8}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_call_chooses(path: str, caller: TestClient, adapted: treadle.Model) -> None:
    """An adapter that it does not name has no part in it."""
    said = []
    for own in ({}, {0: 1.0}, {0: 0.5}):
        asked = [{"id": i, "scale": scale} for i, scale in own.items()]
        found = post(caller, path, **BODY, lora=asked)
        said.append(found["content"] if path == "/completion" else found["choices"][0]["text"])
        assert said[-1] == text(adapted, own)
    found = post(caller, path, **BODY)
    said.append(found["content"] if path == "/completion" else found["choices"][0]["text"])
    assert said[-1] == text(adapted, {"poet": 1.0})
    assert len({*said}) > 2


@pytest.mark.parametrize("n", [1, 200])
def test_vectors_of_a_call(n: int, caller: TestClient, adapted: treadle.Model) -> None:
    """With the adapters of the call, or those of texts that say nothing."""
    ids = [5 + i % 50 for i in range(n)]
    found = []
    for own in ({}, {0: 1.0}, {1: 1.0}, None):
        more: dict[str, Any] = (
            {} if own is None else {"lora": [{"id": i, "scale": s} for i, s in own.items()]}
        )
        made = post(caller, "/v1/embeddings", input=ids, **more)["data"][0]["embedding"]
        native = post(caller, "/embedding", content=ids, **more)[0]["embedding"][0]
        expected = adapted.session(lora=own)
        lora = expected.seq.lora
        expected.close()
        wanted = adapted.engine.embed([ids], lora=lora)[0].tolist()
        assert made == native == wanted
        found.append(made)
    bare, pirate, poet, usual = found
    assert usual == poet
    assert bare != pirate != poet


def test_the_servers_own_scales(caller: TestClient, adapted: treadle.Model) -> None:
    listed = caller.get("/lora-adapters").json()
    assert [(one["id"], one["name"], one["scale"]) for one in listed] == [
        (0, "pirate", 0.0),
        (1, "poet", 1.0),
    ]
    assert all(Path(one["path"]).name == one["path"] for one in listed)  # no folder is told
    made = caller.post("/lora-adapters", json=[{"id": 0, "scale": 2.0}])
    assert made.json() == {"success": True}
    assert [one["scale"] for one in caller.get("/lora-adapters").json()] == [2.0, 0.0]
    assert post(caller, "/completion", **BODY)["content"] == text(adapted, {"pirate": 2.0})


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ([{"id": 2, "scale": 1.0}], "no adapter 2: loaded are pirate, poet"),
        ([{"scale": 1.0}], "objects with id and scale"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], "adapter 0 is listed twice"),
        ([{"id": 0, "scale": "much"}], "a number"),
        ({"id": 0}, "an array"),
    ],
)
def test_what_makes_no_sense(caller: TestClient, lora: Any, why: str) -> None:
    for answer in (
        caller.post("/completion", json={**BODY, "lora": lora}),
        caller.post("/lora-adapters", json=lora),
        caller.post("/v1/embeddings", json={"input": "a", "lora": lora}),
        caller.post("/embedding", json={"content": "a", "lora": lora}),
        caller.post("/v1/rerank", json={"query": "a", "documents": ["b"], "lora": lora}),
    ):
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
    assert [one["scale"] for one in caller.get("/lora-adapters").json()] == [0.0, 1.0]


def test_scales_of_any_size_and_shape(adapted: treadle.Model, caller: TestClient) -> None:
    for body, status in ((b"[" * 100_000, 400), (b"\xff", 400), (b'[{"id": NaN}]', 400)):
        assert caller.post("/lora-adapters", content=body).status_code == status
    with running(adapted) as service, talking(service) as client:
        service.bodies.most = 100
        grows = (b" " * 60 for _ in range(3))
        assert client.post("/lora-adapters", content=grows).status_code == 413


def test_a_text_with_adapters_is_saved_and_restored(adapted: treadle.Model, tmp_path: Path) -> None:
    with running(adapted, slot_save_path=tmp_path) as service, talking(service) as client:
        first = post(client, "/completion", **BODY, id_slot=1)
        told = client.post("/slots/1?action=save", json={"filename": "x"})
        assert told.status_code == 200, told.text
        adapted.engine.cache.forget()
        told = client.post("/slots/0?action=restore", json={"filename": "x"})
        assert told.status_code == 200, told.text
        again = post(client, "/completion", **BODY, id_slot=0)
        assert again["content"] == first["content"]


@pytest.mark.slow
def test_plans_with_and_without_are_there_before_it_is_healthy(adapted: treadle.Model) -> None:
    given: dict[str, Any] = {"threads": 2, "context": 64, "n_sequences": 2}
    lora = {adapter.path: 0.0 for adapter in adapted.engine.adapters}
    with treadle.load(packaged_model(), lora=lora, **given) as model, running(model) as service:
        ready = set(map(id, model.engine._ready.values()))
        with talking(service) as client:
            for scale in (0.0, 1.0):
                post(client, "/completion", **BODY, lora=[{"id": 1, "scale": scale}])
        assert set(map(id, model.engine._ready.values())) == ready
