"""Texts of models whose layers keep a state: cut, forked, taken back, found again, saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.kernels import rows
from tests.spec_decode.test_draft_model import Always
from tests.tiny import write_model
from treadle.engine.batch import BatchItem
from treadle.files.gguf import open_gguf
from treadle.isa import ROWS
from treadle.kernels.run_state import PAGE
from treadle.kvcache.prefix_tree import reuse_stop_reason
from treadle.quantize.plan import find_mix, make_recipe
from treadle.quantize.write import write
from treadle.spec_decode.ngram import Lookup

NAMES = ("lfm2", "mamba2", "falconh1", "qwen35", "nemotronh")
LONG = 9 * PAGE + 12


def text(n: int, seed: int = 7) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 300, n).tolist()
    return ids


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, data: Path) -> Iterator[treadle.Model]:
    """Deterministic: then bits depend on nothing but the text."""
    path = data / "arch" / f"{request.param}.gguf"
    with treadle.load(path, threads=2, context=512, deterministic=True, n_sequences=3) as made:
        yield made


@pytest.fixture(scope="module")
def truth(model: treadle.Model) -> np.ndarray:
    """Logits of each token of the long text, read in one go."""
    logits = model.logits(text(LONG))
    model.engine.cache.forget()
    return logits


def check(model: treadle.Model, ids: list[int], logits: np.ndarray) -> None:
    """``logits`` are those of the last token of ``ids``, bit for bit."""
    model.engine.cache.forget()
    assert np.array_equal(logits, model.logits(ids)[-1])


@pytest.mark.slow
def test_bits_do_not_depend_on_the_cut(model: treadle.Model, truth: np.ndarray) -> None:
    ids = text(LONG)
    for chunk in (1, 3, 64):
        model.engine.cache.forget()
        session = model.session()
        n = 40 if chunk == 1 else LONG
        rows = [session.logits(ids[at : at + chunk]) for at in range(0, n, chunk)]
        assert np.array_equal(np.concatenate(rows)[:n], truth[:n]), chunk
        session.close()


def test_a_prompt_is_found_up_to_its_last_page(model: treadle.Model, truth: np.ndarray) -> None:
    """The end of a prompt is read in a run of its own, so that its last page has a checkpoint."""
    engine = model.engine
    ids = text(LONG)
    engine.cache.forget()
    with closing(model.session()) as first, closing(model.session()) as second:
        assert np.array_equal(first.prefill(ids), truth[-1])
        assert second.match(ids) == LONG // PAGE * PAGE
        assert np.array_equal(second.prefill(ids), truth[-1])
        # Where a text goes another way, the last checkpoint before is where it begins.
        other = [*ids[: 5 * PAGE], *text(LONG, 8)]
        assert second.match(other) == 0
        assert reuse_stop_reason(engine.cache, second.seq, other) == "state"
        logits = second.prefill(other)
        first.close()
    check(model, other, logits)


def test_a_text_is_taken_back(model: treadle.Model, truth: np.ndarray) -> None:
    """To a checkpoint, and what is behind it is read again; or from the beginning."""
    ids = text(LONG)
    model.engine.cache.forget()
    with closing(model.session()) as session:
        session.prefill(ids)
        for n in (LONG - 1, 9 * PAGE, 9 * PAGE - 1, 20, 3):
            session.truncate(n)
            assert session.ids == ids[:n]
            assert np.array_equal(session.feed(ids[n : n + 1]), truth[n]), n


def test_forks_go_their_own_ways(model: treadle.Model, truth: np.ndarray) -> None:
    engine = model.engine
    ids = text(LONG)
    engine.cache.forget()
    seq = engine.cache.sequence()
    engine.run([BatchItem(seq, ids[:50], 0)])
    fork = engine.cache.fork(seq)
    own = engine.run([BatchItem(seq, ids[50:60], 1)])
    others = [
        engine.run([BatchItem(fork, ids[50:51], 1)]),
        engine.run([BatchItem(fork, text(5, 9), 1)]),
    ]
    assert np.array_equal(own[0], truth[59])
    assert np.array_equal(others[0][0], truth[50])
    seq.close()
    fork.close()
    check(model, [*ids[:51], *text(5, 9)], others[1][0])


def test_a_run_that_fails_has_changed_nothing(
    model: treadle.Model, truth: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine
    ids = text(LONG)
    engine.cache.forget()
    with closing(model.session()) as session:
        session.feed(ids[:40])

        def fail() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, "check_files", fail)
            with pytest.raises(KeyboardInterrupt):
                session.feed(ids[40:70])
        assert session.ids == ids[:40]
        assert np.array_equal(session.feed(ids[40:41]), truth[40])


def test_a_session_is_saved_with_its_state(
    model: treadle.Model, truth: np.ndarray, tmp_path: Path
) -> None:
    ids = text(LONG)
    with closing(model.session()) as session:
        session.prefill(ids[:50])
        session.save(tmp_path / "saved")
    model.engine.cache.forget()
    with closing(model.load_session(tmp_path / "saved")) as again:
        assert again.ids == ids[:50]
        assert np.array_equal(again.feed(ids[50:51]), truth[50])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["falcon-h1", "qwen35"])
def test_written_texts_are_the_same_beside_others(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three at a time, with drafts that are right, wrong from somewhere on, or wrong."""

    def guess(self: Lookup, ids: list[int], most: int) -> list[int]:
        whole = next(known for known in alone if known[: len(ids)] == ids)
        draft = whole[len(ids) : len(ids) + most]
        wrong = len(ids) % 5
        return [*draft[:wrong], *(3 for _ in draft[wrong:])] if wrong < 4 else draft

    monkeypatch.setattr(Lookup, "guess", guess)
    write_model(tmp_path / "tiny.gguf", arch)
    prompts = [text(n, n) for n in (300, 40, 5)]
    with treadle.load(
        tmp_path / "tiny.gguf", threads=2, deterministic=True, n_sequences=3, speculate=True
    ) as model:
        model.stepper.scheduler.drafting.controller = Always()
        asked: dict[str, Any] = {"max_tokens": 80, "temperature": 0.0, "ignore_eos": True}
        model.speculate, alone = False, list[list[int]]()
        for ids in prompts:
            model.engine.cache.forget()
            (answer,) = model.generate_many([ids], **asked)
            alone.append([*ids, *answer.ids])
        model.speculate = True
        model.engine.cache.forget()
        together = list(model.generate_many(prompts, **asked))
        assert [[*ids, *a.ids] for ids, a in zip(prompts, together, strict=True)] == alone
        for answer in together:
            assert 10 < answer.timings.n_accepted < answer.timings.n_drafted - 10
        (again,) = model.generate_many(prompts[:1], **asked)
        assert ([*prompts[0], *again.ids], again.timings.n_cached) == (alone[0], 288)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "granitehybrid", "nemotronh", "qwen35"])
def test_chunks_see_what_single_tokens_do(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On matrix registers recurrences go by chunks, of states and rows in bf16: logits are off by
    some of its roundings, those of all layers. Two texts in one run, cut within chunks.
    """
    isa = rows.MATRICES[-1]
    monkeypatch.setitem(ROWS, isa.name, isa)
    path = tmp_path / "bf16.gguf"
    with open_gguf(data / "arch" / f"{name}.gguf") as source:
        write(source, make_recipe(source, find_mix("BF16")), path, n_threads=2)
    found = []
    for deterministic in (True, False):
        with treadle.load(
            path, threads=2, context=256, deterministic=deterministic, isa=isa.name, n_sequences=2
        ) as model:
            found.append(logits_of_two(model))
            kernels = {step.spec.op for step in model.plan(99)}
        assert any(op.endswith("_chunks") for op in kernels) is not deterministic
    exact, near = found
    error = np.abs(near - exact).max() / exact.std()
    assert 0 < error < 2**-4


def logits_of_two(model: treadle.Model) -> np.ndarray:
    """Of each text's last token; the first one's is read in two runs."""
    engine = model.engine
    with closing(engine.cache.sequence()) as a, closing(engine.cache.sequence()) as b:
        engine.run([BatchItem(a, text(45), 0), BatchItem(b, text(40, 1), 0)])
        return engine.run([BatchItem(a, text(50, 2), 1), BatchItem(b, text(3, 3), 1)])
