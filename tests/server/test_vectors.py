"""Vectors and scores: texts that are too long, numbers that are none, runs that take turns."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests import tiny
from tests.api.test_rerank import DOCUMENTS, QUERY, save
from tests.cli.conftest import Run, run
from tests.server.conftest import events, running, talking, until
from tests.server.test_openai import post
from treadle.api.embedding import Embedder
from treadle.api.rerank import Reranker
from treadle.errors import NotFiniteError
from treadle.server.protocols.embeddings import embed
from treadle.server.requests.service import Service

__all__ = ["run"]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A small decoder whose output norm has a weight of ``norm``, with further ``keys``."""

    def write(norm: float | None = None, **keys: int) -> Path:
        draw = tiny.draw
        in_full = tiny.in_full
        path = tmp_path / "tiny.gguf"

        def drawn(rng: Any, name: str, shape: tuple[int, ...]) -> Any:
            made = draw(rng, name, shape)
            if norm is not None and name == "output_norm.weight":
                made[..., 3] = norm
            return made

        with monkeypatch.context() as patch:
            patch.setattr(tiny, "draw", drawn)
            named = {f"llama.{key}": value for key, value in keys.items()}
            patch.setattr(tiny, "in_full", lambda *given: {**in_full(*given), **named})
            tiny.write_model(path)
        return path

    return write


@contextmanager
def served(path: Path, **load: Any) -> Iterator[tuple[treadle.Model, Service, TestClient]]:
    with (
        treadle.load(path, threads=2, **load) as model,
        running(model) as service,
        talking(service, raise_server_exceptions=False) as client,
    ):
        yield model, service, client


# -- numbers that are none ------------------------------------------------------------------------

VECTORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "abc"}),
    ("/v1/embeddings", {"input": "abc", "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "abc", "normalize": False}),
    ("/v1/embeddings", {"input": "abc", "dimensions": 8}),
    ("/v1/embeddings", {"content": "abc"}),
    ("/embedding", {"content": ["abc", "d"], "embd_normalize": -1}),
    ("/embedding", {"content": "abc", "pooling": "none"}),
    ("/api/embed", {"input": "abc"}),
    ("/api/embeddings", {"prompt": "abc"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [np.nan, np.inf, 3e38])
def test_vectors_that_are_not_finite_are_an_error(write: Write, norm: float, run: Run) -> None:
    path = write(norm)
    with served(path) as (model, _, client):
        with pytest.raises(NotFiniteError, match="vectors are not finite"):
            model.embed("abc", normalize=False)
        for asked, body in VECTORS:
            answer = client.post(asked, json=body)
            if norm == 3e38 and answer.status_code == 200:  # large, and a number all the same
                assert "Infinity" not in answer.text
                assert "NaN" not in answer.text
                continue
            assert answer.status_code == 500, asked
            error = answer.json()["error"]
            if not asked.startswith("/api"):
                assert error["type"] == "server_error"
                error = error["message"]
            assert "not finite" in error
    for options in ([], ["--json"]):
        ran = run("embed", str(path), "abc", "--no-normalize", *options, "-t", "2")
        assert (ran.code, ran.out) == (1, "")
        assert "not finite" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"logprobs": 1}, {"echo": True, "logprobs": 1}]
)
def test_logits_that_are_not_finite_are_the_servers_fault(
    write: Write, stream: bool, options: dict[str, Any]
) -> None:
    with served(write(np.nan)) as (_, _, client):
        body = {"prompt": "abc", "max_tokens": 3, "stream": stream, **options}
        answer = client.post("/v1/completions", json=body)
        if stream and answer.status_code == 200:
            error = events(answer.text)[-1]["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["type"] == "server_error"
        assert "the model's logits" in error["message"]


def test_scores_that_are_not_finite_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    folder = tmp_path / "hf"
    save("bert", folder)
    head = Reranker.head
    monkeypatch.setattr(Reranker, "head", lambda self, x: head(self, x) * np.float32(np.inf))
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/rerank", {"documents": DOCUMENTS}),
        ("/v1/rerank", {"texts": DOCUMENTS}),
        ("/v2/rerank", {"documents": DOCUMENTS}),
    ]
    with served(folder) as (model, _, client):
        with pytest.raises(NotFiniteError, match="scores are not finite"):
            model.rerank(QUERY, DOCUMENTS)
        for path, body in bodies:
            error = post(client, path, 500, query=QUERY, **body)["error"]
            assert error["type"] == "server_error"
            assert "not finite" in error["message"]
    ran = run("rerank", str(folder), QUERY, *DOCUMENTS, "--json", "-t", "2")
    assert (ran.code, ran.out) == (1, "")
    assert "not finite" in ran.err


# -- texts that are too long ----------------------------------------------------------------------

LONG = "abcdefghij" * 12


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for(write: Write, run: Run) -> None:
    path = write()
    with served(path, context=64) as (model, _, client):
        ids = model.tokenize(LONG)
        expected = model.embed([ids[:64], "ab"])
        assert np.array_equal(model.embed([LONG, "ab"], truncate=True), expected)
        assert np.array_equal(model.embed([ids, "ab"], truncate=True), expected)
        with pytest.raises(treadle.ContextFullError, match=r"texts\[0\]: .* tokens do not fit"):
            model.embed([LONG, "ab"])
        cuts: list[dict[str, Any]] = [
            {"truncate": True, "truncation_side": "right"},
            {"truncate": "END"},
            {"truncate_prompt_tokens": -1},
        ]
        for cut in cuts:
            for given in (LONG, ids):
                found = post(client, "/v1/embeddings", input=[given, "ab"], **cut)
                rows = [row["embedding"] for row in found["data"]]
                assert np.array_equal(np.array(rows, np.float32), expected)
                assert found["usage"]["prompt_tokens"] == 64 + len(model.tokenize("ab"))
                native = post(client, "/embedding", content=[given, "ab"], **cut)
                assert [row["embedding"][0] for row in native] == rows
        (few,) = post(client, "/v1/embeddings", input=LONG, truncate_prompt_tokens=9)["data"]
        assert np.array_equal(np.array(few["embedding"], np.float32), model.embed([ids[:9]])[0])
        found = post(client, "/api/embed", input=[LONG, "ab"])["embeddings"]
        assert np.array_equal(np.array(found, np.float32), expected)
        older = post(client, "/api/embeddings", prompt=LONG, truncate=True)["embedding"]
        assert np.array_equal(np.array(older, np.float32), expected[0])
        for refused in ({}, {"truncate": False}, {"truncate": "none"}):
            error = post(client, "/v1/embeddings", 400, input=["ab", LONG], **refused)["error"]
            assert error["message"].startswith("input[1]: prompt is too long: ")
        for wrong in (
            {"truncate": "START"},
            {"truncation_side": "left"},
            {"truncate": 1},
            {"truncate_prompt_tokens": 0},
            {"truncate_prompt_tokens": -2},
        ):
            assert (
                post(client, "/v1/embeddings", 400, input="ab", **wrong)["error"]["param"] in wrong
            )
    ran = run("embed", str(path), LONG, "ab", "-c", "64", "--truncate", "--json", "-t", "2")
    assert ran.code == 0, ran.err
    rows = [row["embedding"] for row in json.loads(ran.out)]
    assert np.allclose(rows, expected, atol=1e-6)
    assert run("embed", str(path), LONG, "ab", "-c", "64", "-t", "2").code == 1


def test_an_encoders_text_keeps_the_token_that_ends_it(tmp_path: Path, run: Run) -> None:
    save("bert", tmp_path / "hf")
    long = "a test of lines " * 12
    with served(tmp_path / "hf", context=16) as (model, _, client):
        ids = model.tokenize(long)
        expected = model.embed([[*ids[:15], ids[-1]]])
        assert np.array_equal(model.embed(long, truncate=True), expected)
        (row,) = post(client, "/v1/embeddings", input=long, truncate=True)["data"]
        assert np.array_equal(np.array(row["embedding"], np.float32), expected[0])
        # A pair: what is longer gives way, as in transformers' longest_first.
        reranker = Reranker(model)
        for query, document in ((QUERY, long), (long, QUERY), (long, long)):
            whole, begins = reranker.pair(query, document)
            found, second = reranker.pair(query, document, 16)
            assert len(found) == 16 < len(whole)
            # [CLS] first [SEP] second [SEP]
            n = begins - 2
            kept = second - 2
            assert found[:1] + found[second - 1 : second] == whole[:1] + whole[begins - 1 : begins]
            assert found[1 : second - 1] == whole[1 : 1 + kept]
            assert found[second:-1] == whole[begins : begins + 13 - kept]
            assert kept == (min(n, 7) if document == long else 13 - (len(whole) - begins - 1))
        score = model.rerank(QUERY, [long], truncate=True)
        body: dict[str, Any] = {"query": QUERY, "documents": ["a", long]}
        for cut in (
            {"truncate": True},
            {"truncate_prompt_tokens": -1},
            {"max_tokens_per_doc": 200},
        ):
            results = post(client, "/v1/rerank", **body, **cut)["results"]
            (found,) = [row["relevance_score"] for row in results if row["index"] == 1]
            assert found == pytest.approx(score[0])
        error = post(client, "/v1/rerank", 400, **body)["error"]["message"]
        assert error.startswith("documents[1]: prompt is too long: ")
        (one,) = post(client, "/v2/rerank", query=QUERY, documents=[long], max_tokens_per_doc=2)[
            "results"
        ]
        few = model.rerank(QUERY, [model.tokenizer.decode(model.tokenize(long, bos=False)[:2])])
        assert one["relevance_score"] == pytest.approx(few[0], abs=1e-5)
    hf = str(tmp_path / "hf")
    ran = run("rerank", hf, QUERY, long, "-c", "16", "--truncate", "--json", "-t", "2")
    assert json.loads(ran.out)[0]["score"] == pytest.approx(score[0], abs=1e-6)


# -- no pooling -----------------------------------------------------------------------------------


def test_a_file_that_names_no_pooling(write: Write, run: Run) -> None:
    """llama.cpp's ``/embedding`` then has a vector for each token; elsewhere the mean is told."""
    path = write(pooling_type=0)
    with served(path) as (model, _, client):
        assert model.config.pooling == "none"
        ids = model.tokenize("abc")
        by_token = model.states(ids)
        (row,) = post(client, "/embedding", content="abc")
        assert np.array_equal(np.array(row["embedding"], np.float32), by_token)
        assert post(client, "/embedding", content="abc", pooling="none") == [row]
        mean = by_token.mean(0) / np.linalg.norm(by_token.mean(0))
        (pooled,) = post(client, "/embedding", content="abc", pooling="mean")
        assert np.allclose(pooled["embedding"][0], mean, atol=1e-6)
        for asked in ("/v1/embeddings", "/api/embed"):
            (told,) = post(client, asked, input="abc")["warnings"]
            assert told.startswith("the file defines no pooling")
        error = post(client, "/v1/embeddings", 400, input="abc", pooling="none")["error"]
        assert error["param"] == "pooling"
        assert "/embedding" in error["message"]
        with pytest.warns(UserWarning, match="the file defines no pooling"):
            assert np.allclose(model.embed("abc"), mean, atol=1e-6)
    ran = run("embed", str(path), "abc", "-t", "2")
    assert ran.code == 0
    assert "the file defines no pooling" in ran.err


def test_a_vector_for_each_token_of_any_model(client: TestClient, model: treadle.Model) -> None:
    (row,) = post(client, "/embedding", content="import os", pooling="none")
    states = model.states(model.tokenize("import os"))
    assert np.array_equal(np.array(row["embedding"], np.float32), states)
    assert "warnings" not in post(client, "/v1/embeddings", input="x")


# -- turns ----------------------------------------------------------------------------------------


def watch(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch, first: Callable[[], object]
) -> list[str]:
    """The outputs of the engine's runs, in order; ``first`` is called in the first that embeds."""
    ran: list[str] = []
    real = model.engine._run

    def run(parts: Any, read: Any, times: Any = None, output: str = "logits", *more: Any) -> Any:
        ran.append(output)
        if output in ("embedding", "states") and ran.count(output) == 1:
            first()
        return real(parts, read, times, output, *more)

    monkeypatch.setattr(model.engine, "_run", run)
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("pooling", [{}, {"pooling": "none"}])
def test_texts_go_on_between_the_runs_of_a_long_one(
    pooling: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(write(), context=4096) as (model, service, client):
        n = 3 * model.engine.max_tokens + 5
        alone = post(client, "/embedding", content=[5] * n, **pooling)
        model.engine.cache.forget()
        before = model.engine.cache.available_pages()
        answers: list[Any] = []

        def ask() -> None:
            answers.append(post(client, "/v1/completions", prompt="abc", max_tokens=1))

        asking = threading.Thread(target=ask)

        def first() -> None:
            asking.start()
            until(lambda: service.engine.outputs)

        ran = watch(model, monkeypatch, first)
        assert post(client, "/embedding", content=[5] * n, **pooling) == alone
        asking.join()
        assert answers[0]["usage"]["completion_tokens"] == 1
        kinds = [kind == "logits" for kind in ran]
        assert kinds == [False, True, False, False, False]
        model.engine.cache.forget()  # what the text has left
        assert model.engine.cache.available_pages() == before


def test_who_leaves_costs_one_run_at_most(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(write(), context=4096) as (model, service, _):
        before, gone = model.engine.cache.available_pages(), threading.Event()
        ran = watch(model, monkeypatch, lambda: gone.wait(60))

        async def leave() -> None:
            ids = [5] * (4 * model.engine.max_tokens)
            task = asyncio.ensure_future(embed(service, ids, Embedder(model)))
            while not ran:
                await asyncio.sleep(0.001)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            gone.set()

        asyncio.run(leave())
        until(lambda: not service.engine._jobs and model.engine.cache.available_pages() == before)
        assert ran == ["embedding"]


# -- forms of input -------------------------------------------------------------------------------


def test_texts_ids_and_parts_may_be_mixed(client: TestClient, model: treadle.Model) -> None:
    ids = model.tokenize("one two")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    same = ["one two", ids, [*ids[:-1], *ids[-1:]], {"prompt_string": "one two"}]
    inputs = [*same, {"content": parts}, ["one two"], ["one two", ids[-1]]]
    data = post(client, "/v1/embeddings", input=inputs)["data"]
    vectors = [each["embedding"] for each in data]
    assert [vector == vectors[0] for vector in vectors] == [True] * 6 + [False]
    mixed = post(client, "/v1/embeddings", input=[*ids[:1], "two"])["data"]
    assert len(mixed) == 1
    wrong: list[Any] = [{"content": "x"}, {"content": [{"type": "unknown"}]}, {"content": []}]
    for given in (*wrong, [True]):
        answer = client.post("/v1/embeddings", json={"input": given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
