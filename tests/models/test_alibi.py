"""ALiBi in decoders: in long texts, cut anyhow, beside others, in every kind of pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.models.hf_tiny import N_VOCAB
from tests.reference import forward
from tests.tiny import rounding
from treadle.engine.batch import BatchItem
from treadle.models.archs import ARCHS

N = 700  # tokens: a history of two items, and what is exact takes their number squared


def text(n: int, seed: int = 7) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, N_VOCAB, n)]


@pytest.fixture(scope="module", params=[("bloom", 4), ("bloom", 6), ("refact", 6)], ids=str)
def model(request: pytest.FixtureRequest, tiny: WriteTiny) -> Iterator[treadle.Model]:
    """Heads that are a power of two and that are not; of one head of keys each."""
    arch, n_head = request.param
    path = tiny(arch, n_head=n_head, n_head_kv=1 if arch == "refact" else n_head, n_layer=2)
    with treadle.load(path, threads=2, kv="f32", n_sequences=3, deterministic=True) as model:
        yield model


@pytest.fixture(scope="module")
def exact(model: treadle.Model) -> np.ndarray:
    return forward(model.gguf, model.config, text(N))


def close(model: treadle.Model, found: np.ndarray, exact: np.ndarray) -> None:
    """A score is less by up to the largest slope times the distance, and is off by its rounding."""
    allowed = rounding(model.config) + 4 * 2.0**-24 * N
    assert np.abs(found - exact).max() <= allowed * np.abs(exact).max()


def test_the_prompt_feels_it(model: treadle.Model) -> None:
    """A decoder that ignored distance, or took other slopes, is caught."""
    ids = text(60)
    exact = forward(model.gguf, model.config, ids)
    for alibi in (0.0, 4.0):
        other = forward(model.gguf, replace(model.config, alibi=alibi), ids)
        assert np.abs(other - exact).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [300, 7, 1])
def test_a_long_text(chunk: int, model: treadle.Model, exact: np.ndarray) -> None:
    """Read at once, and its end in chunks or token by token behind a long history."""
    ids = text(N)
    start = 0 if chunk == 300 else 670
    with closing(model.session()) as session:
        for at in range(0, start, 400):
            session.feed(ids[at : min(at + 400, start)])
        rows = [session.logits(ids[at : at + chunk]) for at in range(start, N, chunk)]
    close(model, np.concatenate(rows), exact[start:])


@pytest.mark.slow
def test_beside_others_and_taken_back(model: treadle.Model, exact: np.ndarray) -> None:
    """Forks share pages, and a text that is taken back reads what it had kept."""
    ids = text(N)
    engine = model.engine
    with closing(engine.cache.sequence()) as seq, closing(engine.cache.sequence()) as other:
        for at in range(0, 600, 300):
            engine.run([BatchItem(seq, ids[at : at + 300], 0), BatchItem(other, text(20, at), 0)])
        with closing(engine.cache.fork(seq)) as fork:
            rows = engine.run([BatchItem(fork, ids[600:603], 1), BatchItem(seq, [5, 6], 1)])
            close(model, rows[0], exact[602])
            assert np.abs(rows[1] - exact[601]).max() > 0.1
    with closing(model.session()) as session:
        session.feed(ids[:680])
        session.truncate(550)
        close(model, session.logits(ids[550:560]), exact[550:560])


PAGES = {("bloom", 4): ("f16", "q4_0"), ("bloom", 6): ("bf16",), ("refact", 6): ("q8_0",)}


@pytest.mark.slow
def test_kinds_of_pages(model: treadle.Model, exact: np.ndarray) -> None:
    """What rounds keys and values moves logits no more than in an architecture with a rope. Slopes
    know nothing of pages: each kind meets one of the models.
    """
    ids = text(400)
    allowed = {"f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2, "q4_0": 0.3}
    arch = model.config.arch.name
    n_head = model.gguf.metadata[f"{arch}.attention.head_count"]
    assert isinstance(n_head, int)
    for kv in PAGES[arch, n_head]:
        with treadle.load(model.gguf.path, threads=2, kv=kv) as rounded:
            error = np.sqrt(np.mean((rounded.logits(ids) - exact[:400]) ** 2)) / exact.std()
        assert error <= allowed[kv], kv


def test_no_key_says_it(model: treadle.Model) -> None:
    assert "attention.max_alibi_bias" in dict(ARCHS[model.config.arch.name].keys)
    assert not any("alibi" in key for key in model.gguf.metadata)
