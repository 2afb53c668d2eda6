"""Batches of texts with one token each, whose experts are met in every way."""

from __future__ import annotations

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.matrix_rounding import sharp_isa
from treadle.engine.batch import BatchItem
from treadle.formats import by_name
from treadle.kernels.moe.route import Sort
from treadle.plan.lowering import steps

N_EXPERT = 32
# Slots of their own; few rows of every expert; few of some and many of others, twice.
TOGETHER = 3, 5, 16, 40
HELD = 3  # tokens that each text has before


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["F32", "Q4_0"])
def test_each_is_what_it_is_alone(
    tiny: WriteTiny, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever experts the others have: some texts are alike, of the rest most are another. All
    products round their inputs alike here, whatever the number of texts: those of codes are in
    vectors.
    """
    monkeypatch.setattr(steps, "FINE", frozenset())
    path = tiny("qwen3moe", fmt, n_expert=N_EXPERT, n_ff_exp=64, n_layer=2)
    rng = np.random.default_rng(7)
    isa = sharp_isa() if by_name(fmt).codes else None
    n = max(TOGETHER)
    with treadle.load(path, context=64, threads=2, n_sequences=n, kv="f32", isa=isa) as model:
        engine = model.engine
        texts = rng.integers(5, 200, (max(TOGETHER), HELD + 1))
        texts[np.arange(len(texts)) % 5 < 3] = texts[0]
        alone = [model.logits(text.tolist())[-1] for text in texts]
        for n in TOGETHER:
            # Not neighbours: they would all be alike or none.
            some = rng.permutation(len(texts))[:n]
            seqs = [engine.cache.sequence() for _ in some]
            for seq, i in zip(seqs, some, strict=True):
                engine.run([BatchItem(seq, texts[i, :HELD].tolist())])
            parts = [
                BatchItem(seq, texts[i, HELD:].tolist()) for seq, i in zip(seqs, some, strict=True)
            ]
            plan = engine.plan_for(n, n, "logits").plan
            sorts = [step for step in plan.match("L0.*") if isinstance(step.spec, Sort)]
            rows = engine.run(parts)
            arena = engine.plan_for(n, n, "logits").arena.bytes
            assert arena is not None
            met = [plan.arrays(sort, arena).tiles[0] > 0 for sort in sorts]
            assert met == {3: [], 5: [True, False]}.get(n, [True, True])
            for row, i in zip(rows, some, strict=True):
                assert np.abs(row - alone[i]).max() <= 1e-4 * np.abs(alone[i]).max()
            for seq in seqs:
                seq.close()
