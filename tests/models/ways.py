"""One model on several paths: in one go, by decode and by the twins of kernels; found again, taken
back and forked; on other instruction sets than the best of this machine.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

import treadle
from tests.kernels import rows
from tests.reference import forward
from tests.tiny import rounding
from tests.twins import logits_of_twins
from treadle.engine.batch import BatchItem
from treadle.kernels.run_state import PAGE

NARROW = rows.NARROW.name  # AVX2, or what this machine has in its place
PORTABLE = "portable"


def check_float64(model: treadle.Model, ids: list[int]) -> None:
    """Logits against float64: in one go, by decode, and by the twins of all kernels."""
    exact = forward(model.gguf, model.config, ids)
    allowed = 2 * rounding(model.config) * np.abs(exact).max()
    assert np.abs(model.logits(ids) - exact).max() <= allowed
    engine = model.engine
    engine.cache.forget()
    with closing(model.session()) as session:
        decoded = np.concatenate([session.logits([token]) for token in ids])
    assert np.abs(decoded - exact).max() <= allowed
    _, twins = logits_of_twins(engine, [BatchItem(engine.cache.sequence(), ids, len(ids))])
    assert np.abs(twins - exact).max() <= allowed


def check_returns(path: Path) -> None:
    """The same bits after a prefix is found in the cache, after a text is cut, and in a fork."""
    ids: list[int] = np.random.default_rng(7).integers(3, 300, 9 * PAGE + 12).tolist()
    with treadle.load(
        path, threads=2, kv="f32", context=512, deterministic=True, n_sequences=3
    ) as model:
        whole = model.logits(ids)
        engine = model.engine
        engine.cache.forget()
        with closing(model.session()) as first, closing(model.session()) as second:
            assert np.array_equal(first.prefill(ids), whole[-1])
            assert second.match(ids) == 9 * PAGE
            assert np.array_equal(second.prefill(ids), whole[-1])
            n = 9 * PAGE + 7
            first.truncate(n)
            assert np.array_equal(first.feed(ids[n : n + 2]), whole[n + 1])
        engine.cache.forget()
        with closing(engine.cache.sequence()) as seq:
            engine.run([BatchItem(seq, ids[:n], 0)])
            with closing(engine.cache.fork(seq)) as fork:
                engine.run([BatchItem(seq, ids[:3], 1)])
                found = engine.run([BatchItem(fork, ids[n:], 1)])
        assert np.array_equal(found[0], whole[-1])


def check_instruction_set(path: Path, ids: list[int], truth: np.ndarray, isa: str) -> None:
    """A prompt and decoding on another instruction set than the best of this machine. A family has
    NARROW or PORTABLE, its neighbour the other: each kernel has tests of its own on both, and what
    a lowering does by instruction set it does for all families.
    """
    with treadle.load(path, threads=2, kv="f32", context=256, isa=isa) as model:
        with closing(model.session()) as session:
            n = len(ids) - 2
            found = [session.logits(ids[:n]), *(session.logits([i]) for i in ids[n:])]
        error = np.abs(np.concatenate(found) - truth).max() / np.abs(truth).max()
        assert error <= 2 * rounding(model.config), error
