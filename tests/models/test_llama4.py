"""Llama 4: chunks of tokens that begin anywhere in pages and tiles, what a cache keeps of them, and
files that are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import treadle
from tests import reference
from tests.conftest import WriteTiny
from tests.engine.test_engine import (
    agrees,
    close,
    engine_of,
    expected_of_mixed,
    mixed,
    prefill,
    text,
)
from tests.kvcache.test_cache import check_pages
from tests.tiny import rounding
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

SIZES = {"n_layer": 5, "n_expert": 4, "n_expert_used": 1, "n_ff_exp": 64, "n_expert_shared": 1}
CHUNK = 50  # begins within pages


@pytest.fixture
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    path = tiny("llama4", window=CHUNK, **SIZES)
    with treadle.load(path, threads=2, kv="f32", context=300, n_sequences=2) as made:
        yield made


def test_layers(model: treadle.Model) -> None:
    """The fourth turns nothing and sees everything; its queries grow."""
    layers = model.config.layers
    assert [at.window for at in layers] == [CHUNK, CHUNK, CHUNK, 0, CHUNK]
    assert [at.chunked for at in layers] == [at.rope is not None for at in layers]
    assert [at.qk_norm for at in layers] == [at.chunked for at in layers]
    assert [at.q_rope for at in layers] == [None, None, None, 1, None]
    (all_of_it, chunks) = model.engine.cache.pools
    assert (all_of_it.window, chunks.window, chunks.chunk) == (0, CHUNK, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 7, 100, 300])
def test_a_text_of_many_chunks(model: treadle.Model, cut: int) -> None:
    session = model.session()
    ids = text(220)
    for at in range(0, 220, cut):
        logits = session.feed(ids[at : at + cut])
    assert agrees(model, logits, ids)
    held = [page for page in session.seq.pages[1] if page >= 0]
    assert len(held) <= 3  # of 50 tokens, of 220
    check_pages(model.engine.cache, [session.seq])


@pytest.mark.slow
def test_all_logits_of_a_text(model: treadle.Model) -> None:
    """Where no chunk ended they would be others."""
    ids = text(130)
    truth = reference.forward(model.gguf, model.config, ids)
    assert close(model.logits(ids), truth, rounding(model.config))
    alone = reference.forward(model.gguf, model.config, ids[2 * CHUNK :])
    assert not close(alone, truth[2 * CHUNK :], 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 49, 50, 51, 130, 199, 200])
def test_rewinding_and_beginnings_that_are_kept(model: treadle.Model, n: int) -> None:
    session = model.session()
    ids = text(200)
    other = text(9, seed=2)
    session.feed(ids)
    session.truncate(n)
    check_pages(model.engine.cache, [session.seq])
    assert agrees(model, session.feed(other), ids[:n] + other)
    new = ids[:n] + text(12, seed=3)
    assert agrees(model, session.prefill(new), new)
    fork = model.engine.cache.fork(session.seq)
    logits = model.engine.run([BatchItem(fork, other, 1)])[0]
    assert agrees(model, logits, new + other)
    check_pages(model.engine.cache, [session.seq, fork])
    fork.close()


def test_a_mixed_batch(tiny: WriteTiny) -> None:
    with engine_of(tiny("llama4", window=17, **SIZES), n_sequences=3, threads=2) as engine:
        ids = text(40)
        share = rounding(engine.config)

        def truth(part: Any) -> np.ndarray:
            return reference.forward(engine._weights.gguf, engine.config, part)

        for rows, alone in zip(mixed(engine, ids), expected_of_mixed(truth, ids), strict=True):
            assert close(rows, alone, share)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_deterministic_bits_do_not_depend_on_how_a_text_is_cut(kv: str, tiny: WriteTiny) -> None:
    path = tiny("llama4", "Q8_0", window=CHUNK, head_dim=64, n_embd=256, **SIZES)
    with engine_of(path, deterministic=True, n_sequences=2, kv=kv, threads=2) as engine:
        ids = text(180)
        whole = prefill(engine, ids, OUTPUTS)
        for cut in (1, 7, 33, 100):
            engine.cache.forget()
            assert np.array_equal(prefill(engine, ids, cut), whole), cut
        engine.cache.forget()
        seq = engine.cache.sequence()
        other = engine.cache.sequence()
        found = []
        for at, end in pairwise((0, 5, 6, 71, 72, 150, 180)):
            parts = [BatchItem(other, ids[at // 2 : end // 2 + 1], 0)]
            found.append(engine.run([*parts, BatchItem(seq, ids[at:end], end - at)]))
        assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.slow
def test_wide_tiles(tiny: WriteTiny) -> None:
    """Of narrow pages, whose tiles have more queries than a chunk has tokens."""
    path = tiny("llama4", window=CHUNK, head_dim=64, **SIZES)
    with engine_of(path, kv="f16", threads=2, context=1200) as engine:
        ids = text(700)
        seq = engine.cache.sequence()
        truth = reference.forward(engine._weights.gguf, engine.config, ids)
        for at, end in ((0, 120), (120, 620), (620, 700)):
            logits = engine.run([BatchItem(seq, ids[at:end], 80)])
            assert close(logits, truth[end - 80 : end], 0.02)
        seq.close()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("expert_used_count", 2, "2: treadle supports one expert per token"),
        ("attention.sliding_window", 0, "is 0: a Llama 4 without chunked attention"),  # MobileLLM's
    ],
)
def test_what_is_refused(key: str, value: int, why: str, tiny: WriteTiny) -> None:
    with open_gguf(tiny("llama4", **SIZES)) as gguf:
        gguf.metadata = {**gguf.metadata, f"llama4.{key}": value}
        with pytest.raises(UnsupportedError, match=rf"llama4\.{key}: {why}"):
            load_config(gguf)
