"""DeepSeek V4: rows of tokens and of units, which an indexer chooses; streams; experts by token."""

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
from tests.spec_decode.tiny_drafters import load
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kernels.run_state import PAGE

ARCH = "deepseek4"
N = 3 * PAGE + 9  # more than a unit of the second layer


@pytest.mark.slow
@pytest.mark.parametrize(("n_ctx", "kv"), [(128, "f32"), (48, "f32")])
def test_agrees_with_float64(n_ctx: int, kv: str, tiny: WriteTiny) -> None:
    """In one go, by decode, and by the twins of all kernels; in a context that has no more units
    than the indexer chooses too.
    """
    ids = ids_of(min(N, n_ctx - 3))
    given: dict[str, Any] = {"threads": 2, "kv": kv, "context": n_ctx, "n_sequences": 3}
    with treadle.load(tiny(ARCH), **given) as model:
        assert model.config.ignored == ()
        for n in (1, model.engine.max_tokens):
            model.plan(n).check()
        check_float64(model, ids)


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0"])
def test_texts_that_share_pages(kv: str, tiny: WriteTiny) -> None:
    """Cut, found again, taken back and forked, by one thread and two: the bits are those of one go,
    in the middle of a unit and of a page.
    """
    ids = ids_of(N)
    bits = []
    for threads in (1, 2):
        given: dict[str, Any] = {"threads": threads, "context": 128, "n_sequences": 3, "kv": kv}
        with treadle.load(tiny(ARCH), deterministic=True, **given) as model:
            truth = model.logits(ids)
            bits.append(truth)
            cache = model.engine.cache
            cache.forget()
            with closing(model.session()) as first, closing(model.session()) as second:
                parts = [first.logits(ids[at : at + 7]) for at in range(0, len(ids), 7)]
                assert np.array_equal(np.concatenate(parts), truth)
                second.match(ids)
                assert np.array_equal(second.prefill(ids), truth[-1])
                first.truncate(2 * PAGE)
                assert np.array_equal(first.logits(ids[len(first.ids) :])[-1], truth[-1])
            with closing(cache.sequence()) as seq:
                model.engine.run([BatchItem(seq, ids[:70], 0)])
                with closing(cache.fork(seq)) as fork:
                    both = [BatchItem(fork, ids[70:77], 1), BatchItem(seq, ids[70:80], 1)]
                    assert np.array_equal(model.engine.run(both), truth[[76, 79]])
    assert np.array_equal(bits[0], bits[1])


def test_drafts_that_are_wrong(tiny: WriteTiny) -> None:
    """A state cannot drop them: the text goes back to where the run began, whose window may have
    one page more.
    """
    texts = []
    for draft in (None, tiny("llama")):
        with load(tiny(ARCH), draft, deterministic=True) as model:
            text = model.generate(ids_of(22), max_tokens=40, temperature=0, ignore_eos=True)
            text.finish()
            assert (text.timings.n_drafted > 20) == (draft is not None)
            assert text.timings.n_accepted < 8
            texts.append(text.ids)
    assert texts[0] == texts[1]


def test_a_cache_of_units(tiny: WriteTiny) -> None:
    """Layers without units remember a window; a unit's row takes a token's room."""
    with treadle.load(tiny(ARCH), context=4096) as model:
        pools = {pool.spec.name: pool for pool in model.engine.cache.pools}
        row = 2 * 32
        rows = {name: pool.cell_bytes // row for name, pool in pools.items() if pool.layers}
        assert rows == {"kv_units": 8, "kv_index": 2 * 8, "kv_units_1": 1, "kv_rows": 3 * PAGE}
        assert pools["kv_rows"].window == 12


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"attention.compress_ratios": [4, 64]}, FileError, "compress_ratios"),
        ({"attention.compress_ratios": [4, 60, 0]}, UnsupportedError, "compress_ratios: holds 60"),
        ({"attention.compress_ratios": [2, 64, 0]}, UnsupportedError, "compress_ratios: holds 2"),
        ({"attention.output_group_count": 3}, FileError, "3 does not divide 4 heads"),
        ({"attention.output_lora_rank": 24}, UnsupportedError, "multiple of 16"),
        ({"attention.head_count_kv": 2}, FileError, "head_count_kv"),
        ({"hyper_connection.count": 1}, FileError, "hyper_connection.count"),
        ({"hyper_connection.sinkhorn_iterations": 0}, FileError, "sinkhorn_iterations"),
        ({"attention.sliding_window": 0}, FileError, "sliding_window"),
        ({"expert_gating_func": 5}, UnsupportedError, "expert_gating_func"),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], error: type, says: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    path = changed(tiny(ARCH), tmp_path / "bad.gguf", "", **changes)
    with pytest.raises(error, match=says):
        treadle.load(path)


def test_an_expert_that_there_is_not(tiny: WriteTiny, tmp_path: Path) -> None:
    """A table is checked before a kernel reads it."""
    writer = GGUFWriter(path := tmp_path / "bad.gguf")
    with open_gguf(tiny(ARCH)) as gguf:
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            data = tensor.data.copy()
            if name.endswith("tid2eid.weight"):
                data.view("<i4")[7] = 4
            writer.add_tensor(name, tensor.shape, tensor.ggml_type, data)
        writer.write()
    says = r"blk.0.ffn_gate_tid2eid.weight.*: element 7 is 4 \(expected 0 to 3\)"
    with treadle.load(path) as model, pytest.raises(FileError, match=says):
        model.plan(1)
