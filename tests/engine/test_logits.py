"""What a run gives to samplers: the largest logits, and whole rows as long as they are held."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.engine.logits import LogitsBatch, LogitsRow, TopLogits
from treadle.kernels.run_state import N_TOP, TOTAL_ERROR, LogitsQuery
from treadle.sampling import Sampler, Sampling

N_VOCAB = 320
IDS = [5, 9, 7, 200, 31, 8]
EVEN = np.packbits(np.arange(N_VOCAB) % 2 == 0, bitorder="little").tobytes()
WHOLE = LogitsQuery(total=True)


@pytest.fixture(scope="module")
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    path = tiny("gemma3", window=16, n_layer=3, tied=0, softcap=3)
    with treadle.load(path, threads=2, context=128, n_sequences=4) as model:
        yield model


def test_the_largest_of_each_row(model: treadle.Model) -> None:
    """As a sort of the same rows has them, whatever each row's look is."""
    engine = model.engine
    looks: list[tuple[LogitsQuery, ...]] = [
        (WHOLE, LogitsQuery(EVEN)),
        (),
        (LogitsQuery(first=True),),
        (LogitsQuery(EVEN, total=True),),
    ]
    seqs = [engine.cache.sequence() for _ in looks]
    parts = [
        BatchItem(s, IDS[: i + 2], 1, look)
        for i, (s, look) in enumerate(zip(seqs, looks, strict=True))
    ]
    rows = list(engine.sample(parts))
    again = [engine.cache.sequence() for _ in looks]
    plain = engine.run(
        [part._replace(seq=s, queries=()) for part, s in zip(parts, again, strict=True)]
    )
    for i, (row, x) in enumerate(zip(rows, plain, strict=True)):
        assert np.array_equal(row.logits(), x)
        assert np.array_equal(row.take([3, 1]), x[[3, 1]])
        assert (row.top is None) == (i == 1)
        assert (row.raw is not None) == (i == 0)
    assert np.abs(plain).max() <= 3  # the softcap
    first, _, third, fourth = (row.top for row in rows)
    assert third is not None
    assert third.first == (plain[2].max(), plain[2].argmax())
    assert rows[0].raw is not None
    check_top(rows[0].raw, plain[0], total=True)
    even = np.where(np.arange(N_VOCAB) % 2 == 0, plain, -np.inf)
    check_top(first, even[0], total=False)
    check_top(fourth, even[3], total=True)
    for seq in (*seqs, *again):
        seq.close()


def check_top(top: TopLogits | None, x: np.ndarray, *, total: bool) -> None:
    assert top is not None
    order = np.argsort(-x, kind="stable")[:N_TOP]
    assert top.ids.tolist() == order.tolist()
    assert top.values.tolist() == x[order].tolist()
    assert top.first == (x[order[0]], order[0])
    if total:
        exact = np.exp(x.astype(np.float64) - x.max()).sum()
        assert top.total == pytest.approx(exact, rel=TOTAL_ERROR)


def one_row(engine: Engine, seq: Any, token: int) -> LogitsRow:
    (row,) = engine.sample([BatchItem(seq, [token], 1, (WHOLE,))])
    return row


class Late:
    """A mask that comes when the plan is far enough."""

    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def wait(self) -> bytes:
        self.order.append("wait")
        return EVEN


@pytest.mark.parametrize("stopped", [None, 0, 1])
def test_a_late_mask_is_waited_for_before_the_steps_that_read_it(
    stopped: int | None, model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those of a mask that was there; also where a signal stops the first try."""
    engine, run, order = model.engine, model.engine.device.run, list[Any]()
    seq = engine.cache.sequence()
    other = engine.cache.sequence()
    (expected,) = engine.sample([BatchItem(seq, IDS, 1, (LogitsQuery(EVEN, total=True),))])
    n_runs = iter(range(9))

    def watch(ready: Any, steps: range | None = None, **options: Any) -> bool:
        order.append(steps)
        return next(n_runs) != stopped and run(ready, steps, **options)

    monkeypatch.setattr(engine.device, "run", watch)
    (row,) = engine.sample([BatchItem(other, IDS, 1, (LogitsQuery(Late(order), total=True),))])
    assert row.top is not None
    assert expected.top is not None
    assert np.array_equal(row.top.values, expected.top.values)
    assert np.array_equal(row.top.ids, expected.top.ids)
    assert row.top.total == expected.top.total
    plan = engine.plan(len(IDS), 1)
    first = next(i for i, step in enumerate(plan.steps) if step.label == "output.top")
    whole = [range(first), "wait", range(first, len(plan.steps))]
    assert order == {None: whole, 0: whole[:1] + whole, 1: whole + whole}[stopped]
    for each in (seq, other):
        each.close()


def test_rows_that_are_held_outlive_the_next_runs(model: treadle.Model) -> None:
    """Also one that needs a larger arena."""
    engine = model.engine
    with closing(engine.cache.sequence()) as seq, closing(engine.cache.sequence()) as other:
        first = one_row(engine, seq, 5)
        x = first.logits()
        second = one_row(engine, seq, 9)
        y = second.logits()
        assert not np.array_equal(x, y)
        engine.run([BatchItem(other, IDS * 10, 60)])
        assert np.array_equal(first.logits(), x)
        assert np.array_equal(second.logits(), y)
        assert np.array_equal(first.take([7]), x[[7]])


@pytest.mark.slow
def test_rows_that_nobody_holds_are_not_copied(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    keep = LogitsBatch.snapshot

    def counted(rows: LogitsBatch) -> None:
        copied.append(1)
        keep(rows)

    monkeypatch.setattr(LogitsBatch, "snapshot", counted)
    engine = model.engine
    with closing(engine.cache.sequence()) as seq:
        held = one_row(engine, seq, 5)
        one_row(engine, seq, 6)
        assert copied == [1]
        del held
        gc.collect()
        one_row(engine, seq, 7)
        assert copied == [1]
    copied.clear()
    model.generate(IDS, max_tokens=8, seed=1).finish()
    assert copied == []


def test_a_row_is_read_between_runs_of_others(model: treadle.Model) -> None:
    """Whoever asks for one waits for the run that is going on."""
    engine = model.engine
    with closing(engine.cache.sequence()) as seq:
        row = one_row(engine, seq, 5)
        x = row.logits()
        found = []
        with engine.lock:
            asking = threading.Thread(target=lambda: found.append(row.logits()))
            asking.start()
            asking.join(0.05)
            assert asking.is_alive()
            engine.run([BatchItem(seq, [6])])
        asking.join(60)
        assert np.array_equal(found[0], x)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads: int, model: treadle.Model) -> None:
    with treadle.load(model.path, threads=threads, context=128) as other:
        found = []
        for engine in (model.engine, other.engine):
            with closing(engine.cache.sequence()) as seq:
                row = one_row(engine, seq, 5)
                assert row.raw is not None
                found.append((row.raw.values.tolist(), row.raw.ids.tolist(), row.raw.total))
        assert found[0] == found[1]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 3, "repeat_penalty": 1.3, "presence_penalty": 0.5, "temperature": 1.5},
    {"seed": 4, "samplers": "top_p;temperature", "top_p": 0.3},
    {"seed": 4, "samplers": "temperature", "temperature": 2.0},
    {"seed": 5, "logit_bias": {7: 2.5}, "ignore_eos": True, "min_p": 0.3, "top_k": 0},
    {"seed": 6, "mirostat": 2},
    {"seed": 7, "custom": lambda x, ids: x * 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ", ".join(s))
@pytest.mark.parametrize("grammar", [None, "root ::= [a-z]+"])
def test_texts_are_those_of_whole_rows(
    settings: dict[str, Any], grammar: str | None, model: treadle.Model
) -> None:
    made = model.generate(IDS, max_tokens=20, grammar=grammar, **settings)
    made.finish()
    rule = None if grammar is None else model.grammars.gbnf(grammar).matcher()
    eog = model.tokenizer.eog
    sampler = Sampler(Sampling(**settings), N_VOCAB, eog=eog, constraint=rule)
    ids = list(IDS)
    with closing(model.session()) as session:
        row = session.feed(ids)
        while len(ids) < len(IDS) + len(made.ids):
            ids.append(sampler.sample(row, ids))
            row = session.feed(ids[-1:])
    assert made.ids == ids[len(IDS) :]
    assert len(made.ids) > 3
