"""Encoders on texts longer than a chunk: one run each, for its tokens see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import worst
from tests.convert.test_hf_encoders import CASES, save
from tests.kvcache.test_cache import check_pages
from tests.models.hf_cases import Case
from tests.models.hf_tiny import N_VOCAB, compute_logits
from tests.tiny import rounding, write_model
from treadle.errors import ContextFullError
from treadle.models.config import N_BATCH, N_BATCH_EXPERTS

LONG = {"max_position_embeddings": 2048}
WINDOW = 16  # of which the half is seen to each side


def text(n: int, seed: int = 7) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, N_VOCAB, n)]


@pytest.mark.parametrize("name", ["modern-bert", "bert"])
def test_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With layers that see a window to both sides; with learned positions."""
    case = CASES[name]
    model = save(Case(case.family, case.arch, {**case.options, **LONG}, case.head), tmp_path)
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        assert loaded.n_ctx == 2048
        for n in (700, 1500):
            states = loaded.states(text(n))
            expected = compute_logits(model, text(n))
            error = worst(states, expected)
            assert error <= rounding(loaded.config), (n, error / rounding(loaded.config))
            vector = expected.mean(0) / np.linalg.norm(expected.mean(0))
            found = loaded.engine.embed([text(n)])[0]
            assert np.abs(found - vector).max() <= rounding(loaded.config)


def test_a_window_to_both_sides(tmp_path: Path) -> None:
    """gemma-embedding's: against the same states of a text that ends where the window does."""
    path = tmp_path / "tiny.gguf"
    write_model(path, "gemma-embedding", n_layer=1, window=WINDOW)
    with treadle.load(path, threads=2, kv="f32", deterministic=True) as model:
        ids = text(1000)
        whole = model.states(ids)
        cut = model.states(ids[:600])
        seen = 600 - WINDOW // 2
        assert np.array_equal(whole[:seen], cut[:seen])
        assert not np.array_equal(whole[seen:600], cut[seen:])


@pytest.mark.slow
def test_short_texts_beside_a_long_one(tmp_path: Path) -> None:
    """Many share a run, a long one has its own; what does not fit the context is refused."""
    path = tmp_path / "tiny.gguf"
    write_model(path, "modern-bert", n_ctx=1024, window=WINDOW)
    with treadle.load(path, threads=2, kv="f32") as model:
        lengths = [3] * 100 + [900] + [5] * 60
        texts = [text(n, seed) for seed, n in enumerate(lengths)]
        runs = list(model.engine.batches(texts))
        assert [len(run) for run in runs] == [100, 1, 60]
        made = np.concatenate([model.engine.embed(run) for run in runs])
        alone = np.concatenate([model.engine.embed([ids]) for ids in texts[98:103]])
        assert np.abs(made[98:103] - alone).max() <= 2 * rounding(model.config)
        run = model.engine._run
        sizes: list[int] = []

        def counted(parts, *more):  # type: ignore[no-untyped-def]
            sizes.append(len(parts))
            return run(parts, *more)

        model.engine._run = counted  # type: ignore[method-assign]
        model.engine.embed(runs[0])
        assert sizes == [100]  # there are pages for all of them
        with pytest.raises(ContextFullError, match="1025 tokens do not fit the context of 1024"):
            model.engine.embed([text(1025)])


EXPERTS: dict[str, Any] = {"n_expert": 4, "n_ff_exp": 64}


@pytest.mark.parametrize(
    ("sizes", "n_batch"), [({}, N_BATCH), (EXPERTS, N_BATCH_EXPERTS)], ids=["dense", "experts"]
)
def test_a_decoder_reads_in_chunks(sizes: dict[str, Any], n_batch: int, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", "qwen3moe", n_ctx=4096, **sizes)
    with treadle.load(tmp_path / "tiny.gguf", threads=2) as model:
        assert model.engine.max_tokens == n_batch


@pytest.mark.slow
def test_experts_meet_any_cut(tmp_path: Path) -> None:
    """Through a window that is shorter than a chunk: pages go back once a chunk is written."""
    write_model(tmp_path / "tiny.gguf", "gpt-oss", n_ctx=4096, window=64, **EXPERTS)
    with treadle.load(tmp_path / "tiny.gguf", threads=2, deterministic=True) as model:
        assert [pool.window for pool in model.engine.cache.windows] == [64]
        ids = text(2500)
        whole = model.session()
        parts = model.session()
        last = whole.feed(ids)
        for at in range(0, len(ids), 700):
            cut = parts.feed(ids[at : at + 700])
        assert np.array_equal(last, cut)
        whole.close()
        parts.close()
        check_pages(model.engine.cache, [])
