"""``Engine.run_reference`` walks a whole plan by the kernels' twins, from zeros: its logits are the
compiled plan's, for two sequences in one batch.
"""

from __future__ import annotations

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.models.hf_tiny import N_VOCAB
from tests.tiny import rounding
from tests.twins import logits_of_twins
from treadle.engine.batch import BatchItem

IDS: list[int] = np.random.default_rng(5).integers(3, N_VOCAB, 20).tolist()
# Norms and shifts whose input an earlier step wrote as f32 activations, which are bytes.
ARCHS = "bloom", "bitnet", "rwkv7", "arwkv7"


@pytest.mark.parametrize("arch", ARCHS)
def test_two_sequences_are_those_of_compiled_code(arch: str, tiny: WriteTiny) -> None:
    with treadle.load(tiny(arch, "F32"), threads=2, kv="f32", n_sequences=4) as model:
        engine = model.engine

        def parts() -> list[BatchItem]:
            texts = IDS[:9], IDS[5:9]
            return [BatchItem(engine.cache.sequence(), ids, len(ids)) for ids in texts]

        # States of layers are in sequences' slots: each way has sequences of its own.
        _, rows = logits_of_twins(engine, parts())
        found = engine.run(parts())
        error = np.abs(found - rows).max()  # of both: twins keep their results in f32, too
        assert error <= 2 * rounding(model.config) * np.abs(found).max()
