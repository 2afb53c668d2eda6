"""Qwen 3.8 Flash Next: streams, blocks of keys that an indexer chooses, and n-grams. That only the
rows of a text are read of their table is tests/bench/test_mapped_table.py's.
"""

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
from tests.tiny import HYPERS
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.kernels.run_state import PAGE
from treadle.system import SYSTEM

ARCH = "qwen4exp"
END = HYPERS["ple.eos_token_id"]


def text(n: int) -> list[int]:
    """Ids with ends of texts among them, behind which n-grams begin anew."""
    ids = ids_of(n)
    for at in (9, 10, 33):
        if at < n:
            ids[at] = int(END)  # type: ignore[call-overload]
    return ids


@pytest.mark.slow
def test_agrees_with_float64(tiny: WriteTiny) -> None:
    """In one go, by decode, and by the twins of all kernels."""
    ids = text(PAGE + 9)
    with treadle.load(tiny(ARCH), threads=2, kv="f32", context=64, n_sequences=3) as model:
        assert model.config.ignored == ()
        for n in (1, 64):
            model.plan(n).check()
        check_float64(model, ids)


def test_texts_that_share_pages(tiny: WriteTiny) -> None:
    """Cut, found again, taken back and forked, by one thread and two: the bits are those of one go,
    in the middle of a block and of an n-gram.
    """
    ids = text(2 * PAGE + 9)
    bits = []
    for threads in (1, 2):
        load: dict[str, Any] = {"threads": threads, "context": 96, "n_sequences": 3}
        with treadle.load(tiny(ARCH), deterministic=True, **load) as model:
            truth = model.logits(ids)
            bits.append(truth)
            cache = model.engine.cache
            cache.forget()
            with closing(model.session()) as first, closing(model.session()) as second:
                parts = [first.logits(ids[at : at + 7]) for at in range(0, len(ids), 7)]
                assert np.array_equal(np.concatenate(parts), truth)
                second.match(ids)
                assert np.array_equal(second.prefill(ids), truth[-1])
            with closing(cache.sequence()) as seq:
                model.engine.run([BatchItem(seq, ids[:50], 0)])
                with closing(cache.fork(seq)) as fork:
                    both = [BatchItem(fork, ids[50:57], 1), BatchItem(seq, ids[50:60], 1)]
                    assert np.array_equal(model.engine.run(both), truth[[56, 59]])
    assert np.array_equal(bits[0], bits[1])


@pytest.mark.parametrize("arch", [ARCH, "gemma3n"])
def test_the_table_is_read_without_read_ahead(
    arch: str, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other tensor: read-ahead around each row would make the whole table resident."""
    asked: list[np.ndarray] = []
    monkeypatch.setattr(SYSTEM, "expect_random", asked.append)
    with treadle.load(tiny(arch), threads=1, context=64) as model:
        model.plan(1)
        table = model.gguf.tensors["per_layer_token_embd.weight"].data
        assert asked
        assert {a.ctypes.data for a in asked} == {table.ctypes.data}


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hyper_connection.count": 1}, FileError, "hyper_connection.count"),
        ({"attention.compress_ratios": [0, 1, 0]}, FileError, "holds 1 for a layer with attention"),
        ({"attention.indexer.top_k": 13}, FileError, r"is 13 \(expected a multiple of 4"),
        ({"ple.layers": [0, 2]}, UnsupportedError, "2 layers: treadle supports one with n-grams"),
        ({"ple.layers": [1]}, UnsupportedError, "layer 1 has attention"),
        ({"ple.layers": [3]}, FileError, "ple.layers: holds 3"),
        ({"ple.head_offsets": [0, 53]}, FileError, r"head_offsets: has 2 entries \(expected 4"),
        ({"ple.head_offsets": [0, 53, 112, 999]}, FileError, "needs row 1065"),
        ({"ple.layer_multipliers": "x"}, FileError, "ple.layer_multipliers: is 'x'"),
        ({"ple.layer_multipliers": None}, FileError, "ple.layer_multipliers"),
        ({"ple.layer_multipliers": [1, 2, 1 << 62]}, FileError, "ple.layer_multipliers: holds"),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], error: type, says: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    path = changed(tiny(ARCH), tmp_path / "bad.gguf", "", **changes)
    with pytest.raises(error, match=says):
        treadle.load(path)
