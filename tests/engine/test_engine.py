"""The engine: batches, threads, windows, rewinding, interrupts. Ids in, logits out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import treadle
from tests import reference
from tests.conftest import WriteTiny
from tests.kernels import rows
from tests.kvcache.test_cache import check_pages
from tests.tiny import rounding
from treadle.base.interrupts import interrupts_held
from treadle.devices.cpu.device import Cpu
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.errors import ContextFullError, TreadleError, UnsupportedError
from treadle.kernels.run_state import PAGE

Array = np.ndarray


def text(n: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 320, n)]


@contextmanager
def engine_of(path: Path, **settings: Any) -> Iterator[Engine]:
    usual: dict[str, Any] = {"threads": 1, "kv": "f32", "context": 256}
    with treadle.load(path, **usual | settings) as model:
        yield model.engine


def decode(engine: Engine, ids: Sequence[int]) -> Array:
    """One by one."""
    seq = engine.cache.sequence()
    rows = [engine.run([BatchItem(seq, [token])])[0] for token in ids]
    seq.close()
    return np.stack(rows)


def prefill(engine: Engine, ids: Sequence[int], chunk: int = 512) -> Array:
    """In chunks, with the logits of every token."""
    seq = engine.cache.sequence()
    rows = []
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        rows.append(engine.run([BatchItem(seq, part, len(part))]))
    seq.close()
    return np.concatenate(rows)


def mixed(engine: Engine, ids: Sequence[int]) -> list[Array]:
    """Three sequences in one run: a chunk of a prompt, a decoding token, and a short text."""
    a, b, c = (engine.cache.sequence() for _ in range(3))
    engine.run([BatchItem(a, ids[:20], 0), BatchItem(b, ids[5:35], 0)])
    logits = engine.run(
        [BatchItem(a, ids[20:40], 20), BatchItem(b, [ids[35]]), BatchItem(c, ids[2:5], 2)]
    )
    for seq in (a, b, c):
        seq.close()
    return [logits[:20], logits[20:21], logits[21:]]


def expected_of_mixed(whole: Any, ids: Sequence[int]) -> list[Array]:
    """The same from a function that gives the logits of every token of one text."""
    return [whole(ids[:40])[20:], whole(ids[5:36])[30:], whole(ids[2:5])[1:]]


def close(a: Array, b: Array, share: float) -> bool:
    return bool(np.abs(a - b).max() <= share * np.abs(b).max())


# -- the same bits ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("arch", "fmt"), [("gemma3", "F32"), ("llama", "Q4_0"), ("qwen2", "BF16")])
def test_any_number_of_threads_gives_the_same_bits(
    arch: str, fmt: str, deterministic: bool, tiny: WriteTiny
) -> None:
    results = []
    for n_threads in (1, 2, 3, 5):
        path = tiny(arch, fmt, window=16, n_layer=6)
        settings = {"threads": n_threads, "n_sequences": 3, "deterministic": deterministic}
        with engine_of(path, **settings, kv="f16", context=640) as engine:
            long = engine.cache.sequence()
            for at in (0, 280):  # so far that decoding cuts the history and merges the parts
                engine.run([BatchItem(long, text(280, at), 0)])
            far = engine.run([BatchItem(long, [7])])
            long.close()
            rows = [prefill(engine, text(70)), decode(engine, text(10)), far]
            results.append(rows + mixed(engine, text(40)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "fmt"), [("gemma3", "F32"), ("llama", "Q4_0"), ("qwen2", "BF16")])
def test_deterministic_bits_do_not_depend_on_the_batch(
    arch: str, fmt: str, tiny: WriteTiny
) -> None:
    path = tiny(arch, fmt, window=16, n_layer=6)
    with engine_of(path, deterministic=True, n_sequences=3, kv="f16", threads=2) as engine:
        ids = text(40)
        whole = prefill(engine, ids)
        assert np.array_equal(decode(engine, ids), whole)
        for chunk in (5, 13):
            assert np.array_equal(prefill(engine, ids, chunk), whole)
        together = mixed(engine, ids)
        for a, b in zip(
            together, expected_of_mixed(lambda x: prefill(engine, x), ids), strict=True
        ):
            assert np.array_equal(a, b)


FORMATS = ("F32", "Q8_0", "Q4_K", "BF16")
KVS = ("f16", "q8_0", "f32", "bf16")
CUT = [("gemma3", isa) for isa in rows.VECTORS]
CUT += [(arch, isa) for arch in ("llama", "qwen3") for isa in rows.DISTINCT if isa in rows.VECTORS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "isa", "fmt", "kv"),
    [  # each row another format and kind of pages
        (arch, isa.name, FORMATS[i % len(FORMATS)], KVS[(i + i // len(KVS)) % len(KVS)])
        for i, (arch, isa) in enumerate(CUT)
    ],
)
def test_deterministic_bits_do_not_depend_on_how_a_text_is_cut(
    arch: str, isa: str, fmt: str, kv: str, tiny: WriteTiny
) -> None:
    """A window that is no multiple of anything, so that tiles of queries begin to see in all places
    of a page and of a span of pages.
    """
    path = tiny(arch, fmt, window=100, n_layer=6, n_embd=256, n_ff=256, head_dim=64)
    settings = {"n_sequences": 2, "kv": kv, "threads": 2, "isa": isa, "context": 256}
    with engine_of(path, deterministic=True, **settings) as engine:
        ids = text(180)
        beside = text(180, seed=2)
        whole = prefill(engine, ids, OUTPUTS)
        for chunk in (1, 7, 33, 100):
            engine.cache.forget()
            assert np.array_equal(prefill(engine, ids, chunk), whole), chunk
        engine.cache.forget()
        seq = engine.cache.sequence()
        other = engine.cache.sequence()
        found = []
        for at, end in pairwise((0, 5, 6, 71, 72, 150, 180)):
            parts = [BatchItem(other, beside[at // 2 : end // 2 + 1], 0)]
            found.append(engine.run([*parts, BatchItem(seq, ids[at:end], end - at)]))
        assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "fmt"), [("gemma3", "Q8_0"), ("llama", "F32")])
def test_deterministic_bits_of_a_text_of_several_runs(arch: str, fmt: str, tiny: WriteTiny) -> None:
    path = tiny(arch, fmt, window=100, n_layer=6)
    ids = text(1100)
    with engine_of(path, deterministic=True, kv="f16", threads=2, context=1200) as engine:
        last = []
        for chunk in (512, 333, 100):
            seq = engine.cache.sequence()
            for at in range(0, len(ids), chunk):
                logits = engine.run([BatchItem(seq, ids[at : at + chunk])])
            last.append(logits[0])
            seq.close()
            engine.cache.forget()
    for other in last[1:]:
        assert np.array_equal(other, last[0])


def test_without_it_they_are_only_close(tiny: WriteTiny) -> None:
    """So that the test above can fail: decoding and reading a prompt do sum in another order."""
    with engine_of(tiny("llama", "F32")) as engine:
        assert not np.array_equal(decode(engine, text(40)), prefill(engine, text(40)))


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_mixed_batch_gives_what_each_part_gives_alone(arch: str, tiny: WriteTiny) -> None:
    with engine_of(tiny(arch, window=16, n_layer=6), n_sequences=3, threads=2) as engine:
        ids = text(40)
        share = rounding(engine.config)

        def truth(part: Sequence[int]) -> Array:
            return reference.forward(engine._weights.gguf, engine.config, part)

        together = mixed(engine, ids)
        for rows, alone in zip(together, expected_of_mixed(truth, ids), strict=True):
            assert close(rows, alone, share)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_many_sequences_decode_together(n: int, tiny: WriteTiny) -> None:
    with engine_of(tiny("llama"), n_sequences=n) as engine:
        texts = [text(6, seed) for seed in range(n)]
        seqs = [engine.cache.sequence() for _ in texts]
        for at in range(6):
            rows = engine.run([BatchItem(s, [t[at]]) for s, t in zip(seqs, texts, strict=True)])
        for row, ids in zip(rows, texts, strict=True):
            alone = reference.forward(engine._weights.gguf, engine.config, ids)[-1]
            assert close(row, alone, rounding(engine.config))


def test_outputs_that_nobody_wants_are_not_computed(tiny: WriteTiny) -> None:
    with engine_of(tiny("llama")) as engine:
        seq = engine.cache.sequence()
        assert engine.run([BatchItem(seq, text(5), 0)]).shape == (0, 320)
        assert engine.run([BatchItem(seq, text(5), 3)]).shape == (3, 320)
        assert len(seq) == 10


def test_batches_that_make_no_sense_are_refused_untouched(tiny: WriteTiny) -> None:
    with engine_of(tiny("llama"), n_sequences=2) as engine:
        a = engine.cache.sequence()
        b = engine.cache.sequence()
        engine.run([BatchItem(a, [5, 6], 0)])
        cases: list[tuple[list[BatchItem], str]] = [
            ([], "0 tokens"),
            ([BatchItem(a, [], 0)], "batch item: no tokens"),
            ([BatchItem(a, [1] * 300)], "300 tokens"),
            ([BatchItem(a, [1] * 200, OUTPUTS + 1)], f"{OUTPUTS + 1} outputs"),
            ([BatchItem(a, [1], 2)], "n_outputs=2, more than its 1 tokens"),
            ([BatchItem(b, [1]), BatchItem(a, [], 0)], "batch item: no tokens"),
            ([BatchItem(a, [1]), BatchItem(a, [2])], "two items use the same sequence"),
            ([BatchItem(b, [1]), BatchItem(a, [320])], r"outside 0\.\.319"),
            ([BatchItem(b, [1]), BatchItem(a, [-1])], r"outside 0\.\.319"),
        ]
        for batch, message in cases:
            with pytest.raises(TreadleError, match=message):
                engine.run(batch)
            assert (a.ids, b.ids) == ([5, 6], [])
        with pytest.raises(ContextFullError):  # the first part fits, the second does not
            engine.run([BatchItem(b, [1]), BatchItem(a, [1] * 255)])
        assert (a.ids, b.ids) == ([5, 6], [])
        check_pages(engine.cache, [a, b])


def test_threads_of_python_take_turns(tiny: WriteTiny) -> None:
    with engine_of(tiny("llama"), n_sequences=4, threads=2, deterministic=True) as engine:
        texts = [text(24, seed) for seed in range(4)]
        alone = [decode(engine, ids) for ids in texts]
        engine.cache.forget()
        found: dict[int, Array] = {}

        def work(which: int) -> None:
            found[which] = decode(engine, texts[which])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, rows in enumerate(alone):
            assert np.array_equal(found[i], rows)
        check_pages(engine.cache, [])


def test_a_larger_plan_moves_the_smaller_ones(tiny: WriteTiny) -> None:
    """One arena serves all plans: when it grows, those built before must go on working."""
    with engine_of(tiny("llama"), deterministic=False, threads=2) as engine:
        before = decode(engine, text(8))
        size = engine._arena_bytes
        prefill(engine, text(100))
        assert engine._arena_bytes > size
        engine.cache.forget()
        assert np.array_equal(decode(engine, text(8)), before)


# -- windows and rewinding ----------------------------------------------------------------------


@pytest.fixture
def windowed(tiny: WriteTiny) -> Iterator[treadle.Model]:
    """A window of 16 tokens in five of six layers."""
    path = tiny("gemma3", window=16, n_layer=6)
    with treadle.load(path, threads=2, kv="f32", context=300) as model:
        yield model


def agrees(model: treadle.Model, logits: Array, ids: Sequence[int]) -> bool:
    """Whether ``logits`` are those of the last of ``ids``."""
    truth = reference.forward(model.gguf, model.config, ids)[-1]
    return close(logits, truth, rounding(model.config))


@pytest.mark.parametrize("chunk", [1, 7, 100, 300])
def test_a_text_of_many_windows(windowed: treadle.Model, chunk: int) -> None:
    session = windowed.session()
    ids = text(200)
    for at in range(0, 200, chunk):
        logits = session.feed(ids[at : at + chunk])
    assert agrees(windowed, logits, ids)
    held = [page for page in session.seq.pages[1] if page >= 0]
    assert len(held) <= 2  # 16 tokens, of 200
    check_pages(windowed.engine.cache, [session.seq])


@pytest.mark.parametrize("n", [0, 1, 20, 64, 150, 190, 195, 199, 200])
def test_rewinding_reads_again_what_the_window_has_lost(windowed: treadle.Model, n: int) -> None:
    session = windowed.session()
    ids = text(200)
    session.feed(ids)
    session.truncate(n)
    assert session.ids == ids[:n]
    check_pages(windowed.engine.cache, [session.seq])
    other = text(9, seed=2)
    assert agrees(windowed, session.feed(other), ids[:n] + other)


def test_rewinding_without_the_help_of_the_cache(windowed: treadle.Model) -> None:
    session = windowed.session()
    ids = text(200)
    session.feed(ids)
    windowed.engine.cache.forget()
    session.truncate(100)
    other = text(9, seed=2)
    assert agrees(windowed, session.feed(other), ids[:100] + other)
    check_pages(windowed.engine.cache, [session.seq])


@pytest.mark.parametrize("n", [10, 31, 32, 70, 150, 199])
def test_prefill_keeps_the_common_beginning(windowed: treadle.Model, n: int) -> None:
    session = windowed.session()
    ids = text(200)
    session.feed(ids)
    new = ids[:n] + text(12, seed=3)
    assert agrees(windowed, session.prefill(new), new)
    assert session.ids == new
    check_pages(windowed.engine.cache, [session.seq])


def test_a_fork_goes_its_own_way(windowed: treadle.Model) -> None:
    engine = windowed.engine
    ids = text(50)
    first = engine.cache.sequence()
    engine.run([BatchItem(first, ids, 0)])
    second = engine.cache.fork(first)
    left = text(5, seed=2)
    right = text(5, seed=3)
    a = engine.run([BatchItem(first, left), BatchItem(second, right)])
    assert agrees(windowed, a[0], ids + left)
    assert agrees(windowed, a[1], ids + right)
    check_pages(engine.cache, [first, second])


# -- a session ----------------------------------------------------------------------------------


def test_sessions_with_a_common_beginning_share_its_pages(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=1, kv="f32", context=256, n_sequences=2) as model:
        ids = text(100)
        first = model.session()
        second = model.session()
        first.feed(ids)
        assert second.match([*ids[:80], 3]) == 64
        assert second.seq.pages[0][:2] == first.seq.pages[0][:2]
        assert agrees(model, second.feed([*ids[64:80], 3]), [*ids[:80], 3])
        first.close()
        third = model.session()
        assert third.match(ids) == 96  # from the cache


def test_a_session_that_is_too_long_is_refused_untouched(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=1, context=40) as model:
        session = model.session()
        session.feed(text(30))
        for call in (session.feed, session.logits):
            with pytest.raises(ContextFullError, match="41 tokens do not fit the context of 40"):
                call(text(11))
            assert session.ids == text(30)
        with pytest.raises(ContextFullError, match="41 tokens do not fit"):
            session.prefill(text(41, seed=2))
        assert session.ids == text(30)
        session.feed(text(10))
        for call in (session.feed, session.logits, session.prefill):
            with pytest.raises(TreadleError, match="no tokens"):
                call([])
        with pytest.raises(TreadleError, match="n=41: expected 0 to 40"):
            session.truncate(41)


def test_pages_that_run_out_are_noticed_before_anything_is_run(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=1, context=1100) as model:
        first = model.session()
        second = model.session()
        first.feed(text(600))
        runs: list[int] = []
        usual = model.engine.run

        def counted(parts: list[BatchItem]) -> Array:
            runs.append(len(parts))
            return usual(parts)

        model.engine.run = counted  # type: ignore[method-assign,assignment]
        with pytest.raises(ContextFullError, match="the KV cache is full"):
            second.feed(text(600, seed=2))  # its first chunk of 512 would have fitted
        assert runs == []
        assert second.n_past == 0


@pytest.mark.parametrize("bad", [[5, 6.5], np.array([5.0, 6.0]), [5, "6"], [5, -1], [5, 10**30]])
def test_what_are_no_ids_leaves_a_session_as_it_was(bad: Any, tiny: WriteTiny) -> None:
    """Such ids were counted in, and their keys and values never computed."""
    with treadle.load(tiny("llama"), threads=1, context=64, deterministic=True) as model:
        session = model.session()
        other = model.session()
        session.feed(text(5))
        for call in (session.feed, session.logits, session.match, session.prefill):
            with pytest.raises(TreadleError, match="token id"):
                call(bad)
            assert session.ids == text(5)
        with pytest.raises((TreadleError, TypeError)):
            model.engine.run([BatchItem(session.seq, bad)])
        assert session.ids == text(5)
        session.feed(np.array([7, 8], np.uint8))  # type: ignore[arg-type]
        assert list(map(type, session.ids)) == [int] * 7
        assert np.array_equal(session.feed([9]), other.feed([*text(5), 7, 8, 9]))


@pytest.mark.parametrize("arch", ["llama", "mamba2"])
def test_a_session_that_is_forgotten_gives_its_room_back(arch: str, tiny: WriteTiny) -> None:
    with treadle.load(tiny(arch), threads=1, context=64, n_sequences=2) as model:
        for i in range(5):
            model.session().feed([i + 3] * 60)
        gone = model.session()
        gone.feed([9] * 60)
        gone.close()
        del gone  # twice is no harm
        with model.session() as session:
            assert model.generate([7] * 50, max_tokens=4, session=session).finish() is not None
        assert session.closed
        model.engine.cache.abandoned.close()
        model.engine.cache.revive().close()
        check_pages(model.engine.cache, [])


def test_contexts_smaller_than_a_chunk(tiny: WriteTiny) -> None:
    for context in (1, 7, 9, 33, 130):
        with treadle.load(tiny("llama"), threads=1, kv="f32", context=context) as model:
            ids = text(context)
            truth = reference.forward(model.gguf, model.config, ids)
            assert close(model.logits(ids), truth, rounding(model.config))


def test_a_closed_engine_says_so(tiny: WriteTiny) -> None:
    model = treadle.load(tiny("llama"), threads=2)
    session = model.session()
    session.feed([3])
    model.close()
    model.close()
    with pytest.raises(TreadleError, match="the model is closed"):
        session.feed([3])


# -- formats of keys and values -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "unit"),
    [("f16", 2.0**-11), ("bf16", 2.0**-8), ("q8_0", 1 / 254), ("q4_0", 1 / 16)],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_formats_of_keys_and_values(kv: str, unit: float, arch: str, tiny: WriteTiny) -> None:
    """``unit`` is a value's rounding. It enters every layer twice, as key and as value, and those
    of different layers add up like a random walk; 4 is for the softmax, which stretches scores.
    """
    path = tiny(arch, window=16, n_layer=6)
    ids = text(60)
    with engine_of(path) as engine:
        exact = prefill(engine, ids)
    with engine_of(path, kv=kv) as engine:
        rows = {"prefill": prefill(engine, ids), "decode": decode(engine, ids)}
    for name, found in rows.items():
        error = np.abs(found - exact).max() / np.abs(exact).max()
        assert unit / 8 < error <= 4 * unit * np.sqrt(2 * 6), (name, error / unit)


def test_a_format_that_the_heads_do_not_fit_is_refused(tiny: WriteTiny) -> None:
    for kv, message in (("q8_0", "multiple of 32"), ("q4_7", "unknown KV format 'q4_7'")):
        with pytest.raises(UnsupportedError, match=message):
            treadle.load(tiny("llama", head_dim=16), kv=kv)


# -- embeddings ---------------------------------------------------------------------------------


def states(model: treadle.Model, ids: Sequence[int]) -> Array:
    """The reference's normed states, float64 [n_tokens, n_embd]."""
    return reference.states(model.gguf, model.config, ids)


@pytest.mark.parametrize("n", [1, 3, 40, 530])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_embeddings_are_the_mean_of_the_last_states(arch: str, n: int, tiny: WriteTiny) -> None:
    with treadle.load(tiny(arch, window=16), threads=2, kv="f32", context=600) as model:
        mean = states(model, text(n)).mean(0)
        (found,) = model.engine.embed([text(n)])
        assert found.dtype == np.float32
        assert found.shape == (model.config.n_embd,)
        error = np.abs(found - mean / np.linalg.norm(mean)).max()
        assert error <= 4 * rounding(model.config)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)
        check_pages(model.engine.cache, [])
        with pytest.raises(ContextFullError):
            model.engine.embed([[3] * 601])
        with pytest.raises(TreadleError, match="no tokens"):
            model.engine.embed([[3], []])


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_texts_that_share_runs(pooling: str, tiny: WriteTiny) -> None:
    """Some that fill a run, one that takes two, and many short ones, for which the cache has not
    pages enough at once.
    """
    texts = [text(n)[::-1] for n in (3, 1, 200, 300, 7, 530, 1, 64, 65, 500, 12, *range(1, 30))]
    with treadle.load(tiny("gemma3", window=16), threads=2, kv="f32", context=600) as model:
        engine = model.engine
        engine.config = replace(engine.config, pooling=pooling)
        engine.plan(64, 2, "embedding").check()
        n_before = engine.cache.available_pages()
        batches = list(engine.batches(texts))
        assert [len(batch) for batch in batches] == [5, 1, 3, 2, 29]
        found = np.concatenate([engine.embed(batch) for batch in batches])
        for row, ids in zip(found, texts, strict=True):
            rows = states(model, ids)
            pooled = {"mean": rows.mean(0), "first": rows[0], "last": rows[-1]}[pooling]
            error = np.abs(row - pooled / np.linalg.norm(pooled)).max()
            assert error <= 4 * rounding(model.config), len(ids)
        assert engine.cache.available_pages() == n_before
        check_pages(engine.cache, [])


def test_neighbours_in_a_run_change_nothing_where_bits_are_kept(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "Q8_0"), threads=2, deterministic=True) as model:
        texts = [text(n) for n in (5, 70, 1, 9)]
        alone = [model.engine.embed([ids]) for ids in texts]
        assert np.array_equal(model.engine.embed(texts), np.concatenate(alone))


def test_states_of_all_tokens(tiny: WriteTiny) -> None:
    plan = "states"
    with treadle.load(tiny("llama"), threads=2, kv="f32") as model:
        engine = model.engine
        ids = text(40)
        engine.plan(40, 1, plan).check()
        with closing(engine.cache.sequence()) as seq:
            found = engine._run(
                [BatchItem(seq, ids, 0)],
                lambda ready: ready.rows(ready.plan.outputs[plan], 40, model.config.n_embd).copy(),
                output=plan,
            )
        error = np.abs(found - states(model, ids)).max() / np.abs(found).max()
        assert error <= rounding(model.config)


def test_embeddings_of_a_quantised_model(tiny: WriteTiny) -> None:
    """Activations of 8 bits: 1/254 of each block's largest, in a dozen products."""
    with treadle.load(tiny("llama", "Q8_0"), threads=2, kv="f32") as model:
        mean = states(model, text(40)).mean(0)
        cosine = model.engine.embed([text(40)])[0] @ mean / np.linalg.norm(mean)
        assert 1 - cosine < (4 / 254) ** 2 * 12


# -- interrupts ---------------------------------------------------------------------------------


@contextmanager
def pressed_in_a_run(engine: Engine) -> Iterator[list[int]]:
    """Ctrl-C comes when a run has begun, before its first step. Gives the alarms of all runs."""
    assert isinstance(engine.device, Cpu)
    team: Any = engine.device._team
    alarms: list[int] = []
    usual = team.run

    def run(*args: int) -> None:
        alarms.append(args[4] if len(args) > 4 else 0)
        if len(alarms) == 1:
            signal.raise_signal(signal.SIGINT)
        usual(*args)

    team.run = run
    yield alarms
    team.run = usual


@pytest.mark.parametrize("n", [1, 10])
def test_ctrl_c_in_a_run_leaves_nothing_of_it(n: int, tiny: WriteTiny) -> None:
    path = tiny("gemma3", window=16, n_layer=6)
    with treadle.load(path, threads=2, kv="f32", context=300) as model:
        ids = text(60)
        session = model.session()
        session.feed(ids[:40])
        with (
            pressed_in_a_run(model.engine) as alarms,
            pytest.raises(KeyboardInterrupt),
        ):
            session.feed(ids[40 : 40 + n])
        assert len(alarms) == 1
        assert session.ids == ids[:40]
        check_pages(model.engine.cache, [session.seq])
        assert agrees(model, session.feed(ids[40:]), ids)


def test_ctrl_c_that_a_handler_swallows_costs_no_run(tiny: WriteTiny) -> None:
    """A program may only take a note of it: then the run is wanted, to the same bits."""
    pressed: list[int] = []
    with treadle.load(tiny("llama"), threads=2, kv="f32", context=300) as model:
        ids = text(60)
        session = model.session()
        expected = session.feed(ids)
        session.reset()
        model.engine.cache.forget()
        usual = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
        try:
            with pressed_in_a_run(model.engine) as alarms:
                found = session.feed(ids)
        finally:
            signal.signal(signal.SIGINT, usual)
        assert pressed == [signal.SIGINT]
        assert (alarms[0] != 0, alarms[1:]) == (True, [0])  # nothing stops it the second time
        assert (found == expected).all()
        assert session.ids == ids


def test_a_session_whose_end_is_interrupted_gives_its_room_back(
    tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it waits for the lock: another thread may be in a long run."""
    with treadle.load(tiny("llama"), threads=1, context=64) as model:
        session = model.session()
        session.feed(text(60))
        with monkeypatch.context() as patch:
            patch.setattr(
                "treadle.api.session.interrupts_held", Mock(side_effect=KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                session.close()
        assert session.closed
        del session
        assert model.session().feed(text(60, seed=2)) is not None
        model.engine.cache.abandoned.close()
        check_pages(model.engine.cache, [])


@pytest.mark.parametrize("n", [1, 3])
def test_vectors_whose_making_is_interrupted_hold_no_pages(
    n: int, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C just before signals are held, wherever that is."""
    held = interrupts_held

    def pressed(at: int) -> Callable[[], interrupts_held]:
        def hold() -> interrupts_held:
            calls.append(at)
            if len(calls) == at:
                raise KeyboardInterrupt
            return held()

        calls: list[int] = []
        return hold

    path = tiny("gemma3", window=16, n_layer=6)
    with treadle.load(path, threads=1, context=128, n_sequences=4) as model:
        uses: list[Callable[[], object]] = [
            lambda: model.engine.embed([text(40, seed) for seed in range(n)]),
            lambda: model.engine.states(text(40)),
        ]
        for use in uses:
            n_done = 0
            for at in range(1, 9):
                with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                    patch.setattr("treadle.engine.engine.interrupts_held", pressed(at))
                    use()
                    n_done += 1
                check_pages(model.engine.cache, [])
            assert 0 < n_done < 7


def test_an_exception_in_a_run_leaves_nothing_of_it(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=2, kv="f32", context=300) as model:
        ids = text(60)
        session = model.session()
        session.feed(ids[:40])
        device: Any = model.engine.device
        usual = device.run

        def alarm(*args: Any, **more: Any) -> bool:
            raise TimeoutError

        device.run = alarm
        with pytest.raises(TimeoutError):
            session.feed(ids[40:50])
        device.run = usual
        assert session.ids == ids[:40]
        check_pages(model.engine.cache, [session.seq])
        assert agrees(model, session.feed(ids[40:]), ids)


def test_times_of_steps(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=2) as model:
        for n_tokens in (1, 40):
            times = model.profile(n_tokens, depth=PAGE + 1)
            assert [label for label, _ in times] == [s.label for s in model.plan(n_tokens)]
            assert all(0 <= seconds < 60 for _, seconds in times)
        check_pages(model.engine.cache, [])
