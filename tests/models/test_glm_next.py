"""GLM-5.3-Flash: latent attention to units that an indexer chooses, beside layers with a state."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.models.test_arch_truth import ids_of
from tests.models.test_indexed import changed
from tests.models.ways import check_float64
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.kernels.run_state import PAGE

ARCH = "glm5-next"
SIZES: dict[str, Any] = {"n_layer": 4, "n_expert": 4, "n_ff_exp": 64, "n_expert_shared": 1}
N = 2 * PAGE + 9


@pytest.mark.slow
def test_agrees_with_float64(tiny: WriteTiny) -> None:
    """In one go, by decode, and by the twins of all kernels."""
    ids = ids_of(N)
    load: dict[str, Any] = {"threads": 2, "kv": "f32", "context": 96, "n_sequences": 3}
    with treadle.load(tiny(ARCH, **SIZES), **load) as model:
        assert model.config.ignored == ()
        for n in (1, 64):
            model.plan(n).check()
        check_float64(model, ids)


@pytest.mark.parametrize("kv", ["f16", "q4_0"])
def test_texts_that_share_pages(kv: str, tiny: WriteTiny) -> None:
    """Cut, found again, taken back and forked, by one thread and two: the bits are those of one go,
    in the middle of a unit and of a page.
    """
    ids = ids_of(N)
    bits = []
    for threads in (1, 2):
        load: dict[str, Any] = {"threads": threads, "context": 96, "n_sequences": 3, "kv": kv}
        with treadle.load(tiny(ARCH, **SIZES), deterministic=True, **load) as model:
            truth = model.logits(ids)
            bits.append(truth)
            cache = model.engine.cache
            cache.forget()
            with closing(model.session()) as first, closing(model.session()) as second:
                parts = [first.logits(ids[at : at + 7]) for at in range(0, len(ids), 7)]
                assert np.array_equal(np.concatenate(parts), truth)
                second.match(ids)
                assert np.array_equal(second.prefill(ids), truth[-1])
                first.truncate(PAGE)
                assert np.array_equal(first.logits(ids[len(first.ids) :])[-1], truth[-1])
            with closing(cache.sequence()) as seq:
                model.engine.run([BatchItem(seq, ids[:50], 0)])
                with closing(cache.fork(seq)) as fork:
                    both = [BatchItem(fork, ids[50:57], 1), BatchItem(seq, ids[50:60], 1)]
                    assert np.array_equal(model.engine.run(both), truth[[56, 59]])
    assert np.array_equal(bits[0], bits[1])


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"attention.indexer.kpool": 3}, UnsupportedError, "kpool: is 3"),
        ({"attention.indexer.kpool": 1}, FileError, "kpool"),
        ({"attention.indexer.top_k": 10}, FileError, "is 10 .expected a multiple of 4"),
        ({"attention.indexer.kpool_select_tail": False}, UnsupportedError, "select_tail"),
        ({"attention.indexer.types": [True, False, True, True]}, FileError, "layer 1 has no"),
        ({"kda.gate_lower_bound": None}, FileError, "gate_lower_bound"),
        ({"hyper_connection.epsilon": -1.0}, FileError, "hyper_connection.epsilon"),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], error: type, says: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    path = changed(tiny(ARCH, **SIZES), tmp_path / "bad.gguf", "", **changes)
    with pytest.raises(error, match=says):
        treadle.load(path)
