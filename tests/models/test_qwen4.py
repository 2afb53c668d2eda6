"""Qwen 3.8 Flash Next: streams, blocks of keys that an indexer chooses, and n-grams, of whose table
only the rows of the text are read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.models.test_arch_truth import ids_of
from tests.models.test_indexed import changed
from tests.reference import forward
from tests.tiny import HYPERS, rounding
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.kernels.attention.records import PAGE

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
        exact = forward(model.gguf, model.config, ids)
        allowed = 2 * rounding(model.config) * np.abs(exact).max()
        assert np.abs(model.logits(ids) - exact).max() <= allowed
        model.engine.cache.forget()
        with closing(model.session()) as session:
            rows = np.concatenate([session.logits([token]) for token in ids])
        assert np.abs(rows - exact).max() <= allowed
        engine = model.engine
        plan, arena = engine.run_reference([BatchItem(engine.cache.sequence(), ids, len(ids))])
        buffer = plan.outputs["logits"]
        at = plan.offsets[buffer]
        rows = arena[at : at + len(ids) * buffer.row_bytes].view(np.float32).reshape(len(ids), -1)
        assert np.abs(rows[:, : model.config.n_vocab] - exact).max() <= allowed


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


PROGRAM = """
import sys
import numpy as np
import treadle

def mapped():
    for line in open("/proc/self/smaps"):
        word = line.split()
        if "-" in word[0] and len(word) > 5:
            inside = word[5] == sys.argv[1]
        elif word[0] == "Rss:" and inside:
            yield int(word[1])

with treadle.load(sys.argv[1], threads=1, context=64) as model:
    at = [sum(mapped())]
    for seed in (1, 2):
        ids = np.random.default_rng(seed).integers(6, 300, 24).tolist()
        assert np.isfinite(model.logits(ids)).all()
        at.append(sum(mapped()))
print(*at)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux's list of mapped memory")
def test_rows_that_are_read(tmp_path: Path) -> None:
    """The table is mapped: a text makes resident what is around its rows, not the table. A row of
    32 values is in one page of memory, and Linux maps up to 32 around one that is in its cache.
    """
    from tests import tiny

    n = 100_003
    sizes = {"ple.head_vocab_sizes": [n] * 4, "ple.head_offsets": [0, n, 2 * n, 3 * n]}
    saved = dict(tiny.HYPERS)
    try:
        tiny.HYPERS.update(sizes)
        path = tmp_path / "large.gguf"
        tiny.write_model(path, ARCH, empty=("per_layer_token_embd.weight",))
    finally:
        tiny.HYPERS.update(saved)
    table = 4 * n * 32 * 4 >> 10
    assert path.stat().st_size >> 10 > table
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=300,
    )
    before, first, second = map(int, done.stdout.split())
    rest = (path.stat().st_size >> 10) - table
    assert before <= rest + 64
    n_rows = 24 * 4
    assert first <= rest + n_rows * 32 * 4
    assert 0 < second - first <= n_rows * 32 * 4
    assert second < table / 2
