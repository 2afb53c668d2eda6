"""Vectors in LlamaIndex are treadle's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding

import treadle
from llama_index.embeddings.treadle import TreadleEmbedding
from shared_tests import real

TEXTS = ["The Rhine is a river.", "Bread is baked in an oven.", "A violin has four strings."]


@pytest.fixture(scope="module")
def model() -> Iterator[treadle.Model]:
    with treadle.load(real("minilm"), threads=2, deterministic=True) as model:
        yield model


def test_vectors(model: treadle.Model) -> None:
    made = TreadleEmbedding(model, query_instruction="query: ", text_instruction="text: ")
    want = model.embed([f"text: {text}" for text in TEXTS])
    np.testing.assert_array_equal(made.get_text_embedding_batch(TEXTS), want)
    np.testing.assert_array_equal(made.get_text_embedding(TEXTS[0]), want[0])
    query = model.embed(["query: music"])[0]
    np.testing.assert_array_equal(made.get_query_embedding("music"), query)
    short = TreadleEmbedding(model, dimensions=8, normalize=False)
    np.testing.assert_array_equal(
        short.get_text_embedding("a"), model.embed(["a"], dimensions=8, normalize=False)[0]
    )


async def test_async(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    embed = model.embed

    def noted(*args: Any, **settings: Any) -> Any:
        threads.add(threading.get_ident())
        return embed(*args, **settings)

    monkeypatch.setattr(model, "embed", noted, raising=False)
    made = TreadleEmbedding(model)
    want = embed(TEXTS)
    np.testing.assert_array_equal(await made.aget_text_embedding_batch(TEXTS), want)
    np.testing.assert_array_equal(await made.aget_text_embedding(TEXTS[0]), want[0])
    np.testing.assert_array_equal(await made.aget_query_embedding(TEXTS[1]), want[1])
    assert threading.get_ident() not in threads


def test_texts_that_are_too_long(model: treadle.Model) -> None:
    long = "word " * 600
    with pytest.raises(treadle.ContextFullError):
        TreadleEmbedding(model).get_text_embedding(long)
    assert len(TreadleEmbedding(model, truncate=True).get_text_embedding(long)) == 384


def test_an_index_finds_the_nearest_text(model: treadle.Model) -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=TreadleEmbedding(model)
    )
    found = index.as_retriever(similarity_top_k=1).retrieve("an instrument that is bowed")
    assert [each.text for each in found] == [TEXTS[2]]


def test_it_is_serialised_without_its_model() -> None:
    made = TreadleEmbedding(str(real("minilm")), load_options={"threads": 1}, dimensions=8)
    assert isinstance(made, BaseEmbedding)
    assert not isinstance(made, MockEmbedding)
    data = made.to_dict()
    again = TreadleEmbedding.from_dict(data)
    assert again.get_text_embedding("a") == made.get_text_embedding("a")
    assert again.loaded is made.loaded
