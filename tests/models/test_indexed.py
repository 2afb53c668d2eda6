"""Attention to the keys that an indexer chooses: against float64, and the same bits however a text
is cut, found again, taken back and forked.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.conftest import WriteTiny
from tests.models.test_arch_truth import ids_of
from tests.reference import forward
from tests.tiny import INDEXERS, rounding
from tests.twins import logits_of_twins
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kernels.attention.records import PAGE

ARCHS = "deepseek32", "glm-dsa", "minimax-m3"
TOP = int(INDEXERS["attention.indexer.top_k"])


def changed(source: Path, path: Path, prefix: str = "attention.", /, **changes: Any) -> Path:
    """Write a file again with other keys of its architecture; None: without one."""
    with open_gguf(source) as gguf:
        arch = gguf.metadata["general.architecture"]
    keys = {f"{arch}.{prefix}{key}": value for key, value in changes.items()}
    return write_changed(source, path, keys)


@pytest.mark.parametrize("arch", ARCHS)
def test_agrees_with_float64(arch: str, tiny: WriteTiny) -> None:
    """More keys than are chosen; and by the twins of all kernels."""
    ids = ids_of(PAGE + 9)
    with treadle.load(tiny(arch), threads=2, kv="f32", context=64, n_sequences=3) as model:
        for n in (1, 64):
            model.plan(n).check()
        exact = forward(model.gguf, model.config, ids)
        allowed = rounding(model.config) * np.abs(exact).max()
        assert np.abs(model.logits(ids) - exact).max() <= allowed
        engine = model.engine
        _, rows = logits_of_twins(engine, [BatchItem(engine.cache.sequence(), ids, len(ids))])
        assert np.abs(rows - exact).max() <= allowed


@pytest.mark.parametrize("arch", ARCHS)
def test_texts_that_share_pages(arch: str, tiny: WriteTiny) -> None:
    """Cut, found again, taken back and forked, by one thread and two: the bits are those of one go.
    The indexer's keys are cached beside the rows of attention.
    """
    ids = ids_of(2 * PAGE + 9)
    bits = []
    for threads in (1, 2):
        load: dict[str, Any] = {"threads": threads, "context": 96, "n_sequences": 3}
        with treadle.load(tiny(arch), deterministic=True, **load) as model:
            truth = model.logits(ids)
            bits.append(truth)
            cache = model.engine.cache
            rows, keys = cache.pools
            assert (rows.spec.index, keys.spec.index) == (False, True)
            n_layer = len(keys.layers)
            assert keys.cell_bytes == PAGE * n_layer * (32 if arch == "minimax-m3" else 64) * 2
            cache.forget()
            with closing(model.session()) as first, closing(model.session()) as second:
                parts = [first.logits(ids[at : at + 7]) for at in range(0, len(ids), 7)]
                assert np.array_equal(np.concatenate(parts), truth)
                assert second.match(ids) == 2 * PAGE
                assert np.array_equal(second.prefill(ids), truth[-1])
                for n in (len(ids) - 1, PAGE + 5, TOP + 1):
                    first.truncate(n)
                    assert np.array_equal(first.feed(ids[n : n + 1]), truth[n])
            with closing(cache.sequence()) as seq:
                model.engine.run([BatchItem(seq, ids[:50], 0)])
                with closing(cache.fork(seq)) as fork:  # in the middle of a page
                    both = [BatchItem(fork, ids[50:57], 1), BatchItem(seq, ids[50:60], 1)]
                    assert np.array_equal(model.engine.run(both), truth[[56, 59]])
    assert np.array_equal(bits[0], bits[1])


@pytest.mark.slow
def test_a_context_that_is_seen_whole(tiny: WriteTiny, tmp_path: Path) -> None:
    """Where no more keys fit than are chosen, nothing is scored: the keys alone are kept. The bits
    are those of a context with room for more.
    """
    path = changed(tiny("deepseek32"), tmp_path / "wide.gguf", **{"indexer.top_k": 64})
    ids = ids_of(60)
    found = []
    for context in (64, 128):
        with treadle.load(path, threads=2, context=context) as model:
            model.plan(16).check()
            labels = {step.label for step in model.plan(16).match("L0.index.*")}
            assert ("L0.index.choose" in labels) == (context == 128)
            assert "L0.index.store" in labels
            found.append(model.logits(ids))
    assert np.array_equal(found[0], found[1])


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "q4_0"])
def test_formats_of_keys(kv: str, tiny: WriteTiny) -> None:
    """A choice among rounded keys may be another one, so the text is short enough for none."""
    with treadle.load(tiny("deepseek32"), threads=2, kv=kv, context=64) as model:
        exact = forward(model.gguf, model.config, ids_of(TOP))
        found = model.logits(ids_of(TOP))
        units = {"f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 1 / 254, "q4_0": 1 / 16}
        assert np.abs(found - exact).max() <= 12 * units[kv] * np.abs(exact).max()
        assert np.isfinite(model.logits(ids_of(60))).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"indexer.top_k": 0}, "indexer.top_k"),
        ({"indexer.top_k": None}, "indexer.top_k: the key is missing"),
        ({"indexer.head_count": 300}, "indexer.head_count"),
        ({"indexer.key_length": 8}, "indexer.key_length"),
        ({"indexer.types": [False, True, True]}, "the first layer has no indexer"),
        ({"indexer.types": [True, 2, True]}, "indexer.types"),
        ({"q_lora_rank": 0}, "q_lora_rank: is missing"),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], says: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    path = changed(tiny("glm-dsa"), tmp_path / "bad.gguf", **changes)
    with pytest.raises(FileError, match=says):
        treadle.load(path)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"head_count": 3}, UnsupportedError, "is 3: treadle supports one for each of 2"),
        ({"local_blocks": 4}, FileError, "local_blocks"),
        ({"block_size": 0}, FileError, "block_size"),
        ({"block_size": None}, FileError, "block_size: the key is missing"),
    ],
)
def test_blocks_that_are_refused(
    changes: dict[str, Any], error: type, says: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    prefix = "attention.indexer."
    path = changed(tiny("minimax-m3"), tmp_path / "bad.gguf", prefix, **changes)
    with pytest.raises(error, match=says):
        treadle.load(path)
