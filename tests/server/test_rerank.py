"""``/v1/rerank`` and ``treadle rerank``, with a cross-encoder that transformers made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.api.test_rerank import DOCUMENTS, QUERY, save
from tests.server.conftest import running, talking


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rerank") / "hf"
    save("bert", path)
    return path


@pytest.fixture(scope="module")
def scores(folder: Path) -> Iterator[list[float]]:
    with treadle.load(folder, threads=2) as model:
        yield model.rerank(QUERY, DOCUMENTS).tolist()


def test_what_writes_no_text_is_offered_for_no_conversation(folder: Path) -> None:
    """A stream is refused as well, not begun."""
    model = treadle.load(folder, threads=2)
    with model, running(model) as service, talking(service) as client:
        assert client.post("/api/show", json={}).json()["capabilities"] == ["embedding"]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True}
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert "does not generate text" in answer.text


def test_the_best_come_first(folder: Path, scores: list[float]) -> None:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    with treadle.load(folder, threads=2) as model, running(model) as service:
        talk = talking(service)
        with talk as client:
            body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
            for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"):
                found = client.post(path, json=body).json()
                assert [row["index"] for row in found["results"]] == order
                assert [row["relevance_score"] for row in found["results"]] == pytest.approx(
                    [scores[i] for i in order]
                )
            assert found["usage"]["total_tokens"] > 4 * len(QUERY.split())
            body |= {"top_n": 2, "return_documents": True}
            body["documents"] = [{"text": text} for text in DOCUMENTS]
            best = client.post("/v1/rerank", json=body).json()["results"]
            assert [row["document"]["text"] for row in best] == [DOCUMENTS[i] for i in order[:2]]
            for wrong in (
                {"documents": DOCUMENTS},
                {"query": QUERY},
                {"query": QUERY, "documents": []},
                {"query": QUERY, "documents": [3]},
                {"query": QUERY, "documents": ["a " * 200]},
            ):
                assert client.post("/v1/rerank", json=wrong).status_code == 400
            wrong = {"query": QUERY, "documents": ["a", "a " * 200]}
            error = client.post("/v1/rerank", json=wrong).json()["error"]
            assert error["message"].startswith("documents[1]: prompt is too long: ")
            # As Cohere's client asks.
            whole = client.post("/v2/rerank", json={**body, "texts": None}).json()
            assert whole.keys() == {"id", "results", "meta"}
            assert whole["results"] == best
            assert whole["meta"]["api_version"] == {"version": "2"}
            assert whole["meta"]["tokens"]["input_tokens"] == found["usage"]["total_tokens"]
            assert client.post("/v2/rerank", json={"query": QUERY}).status_code == 400
            # As Text Embeddings Inference's clients ask, and llama.cpp answers.
            asked: dict[str, Any] = {"query": QUERY, "texts": DOCUMENTS, "top_n": 2}
            rows = [{"index": row["index"], "score": row["relevance_score"]} for row in best]
            assert client.post("/rerank", json=asked).json() == rows
            asked["return_text"] = True
            for row in rows:
                row["text"] = DOCUMENTS[row["index"]]
            assert client.post("/rerank", json=asked).json() == rows
            for texts, at in (([], "texts: "), (["a", "a " * 200], "texts[1]: ")):
                answer = client.post("/rerank", json={"query": QUERY, "texts": texts})
                assert answer.json()["error"]["message"].startswith(at)
            # As vLLM's clients ask: a number between 0 and 1, unless another is asked for.
            pairs: dict[str, Any] = {"text_1": QUERY, "text_2": DOCUMENTS}
            rows = client.post("/score", json={**pairs, "use_activation": False}).json()["data"]
            assert [row["score"] for row in rows] == pytest.approx(scores)
            data = client.post("/v1/score", json=pairs).json()["data"]
            expected = [1 / (1 + math.exp(-score)) for score in scores]
            assert [row["score"] for row in data] == pytest.approx(expected)
            # An encoder generates no text, says so, and goes on.
            said = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert said.status_code == 400
            assert "does not generate text" in said.json()["error"]["message"]
            assert client.post("/v1/rerank", json=body).json()["results"] == best


def test_a_model_that_gives_no_scores(client: TestClient) -> None:
    found = client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert found.status_code == 501
    assert "cls.output" in found.json()["error"]["message"]
