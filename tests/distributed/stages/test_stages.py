"""A model in stages gives the bits of the whole, and survives a lost stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import WriteTiny
from tests.distributed.stages.conftest import SETTINGS, Staged
from tests.engine.test_engine import text
from tests.kvcache.test_cache import check_pages
from treadle.api.session import Session
from treadle.devices.cpu.device import Cpu
from treadle.distributed.stages.pipeline import StageLostError
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.errors import TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.isa import choose
from treadle.jit.host import host_features
from treadle.kernels.run_state import N_TOP, LogitsQuery
from treadle.kvcache.disk.session_file import save_session
from treadle.models.load import load_config
from treadle.models.stages import split, split_evenly
from treadle.models.stages import staged as staged_config


def whole(path: Path, **settings: Any) -> Engine:
    gguf = open_gguf(path)
    device = Cpu(choose(host_features(), None), 2)
    return Engine(gguf, load_config(gguf), device, **(SETTINGS | settings))


def talk(engine: Engine) -> Iterator[np.ndarray]:
    """Chunks of prompts, decoding beside a prompt, a fork, a beginning that is known."""
    ids = text(200)
    cache = engine.cache
    a = cache.sequence()
    b = cache.sequence()
    yield engine.run([BatchItem(a, ids[:70]), BatchItem(b, ids[5:12], 2)])
    yield engine.run([BatchItem(a, [ids[70]]), BatchItem(b, ids[20:120])])
    fork = cache.fork(a)  # a page that is not full: who writes first copies it
    yield engine.run(
        [BatchItem(fork, ids[71:75]), BatchItem(a, ids[71:73]), BatchItem(b, ids[13:14], 0)]
    )
    for token in ids[75:80]:
        yield engine.run([BatchItem(fork, [token])])
    shared = cache.sequence(ids)
    yield engine.run([BatchItem(shared, ids[len(shared) : 90], 3)])
    check_pages(cache, [a, b, fork, shared])
    for seq in (a, b, fork, shared):
        seq.close()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("arch", "fmt", "sizes"),
    [
        ("llama", "Q8_0", {}),
        ("qwen3", "Q4_0", {}),
        ("gemma3", "F16", {"window": 16}),
        ("gpt2", "F32", {}),
        ("gptneox", "Q8_0", {}),
        ("olmo2", "Q8_0", {}),
    ],
)
def test_the_same_bits_as_the_whole(
    tiny: WriteTiny, staged: Staged, arch: str, fmt: str, sizes: dict[str, int], deterministic: bool
) -> None:
    path = tiny(arch, fmt, n_layer=6, **sizes)
    one = whole(path, deterministic=deterministic)
    expected = list(talk(one))
    one.close()
    for n in (1, 2, 4, 6):
        engine, _ = staged(path, n, deterministic=deterministic)
        for i, (found, right) in enumerate(zip(talk(engine), expected, strict=True)):
            assert np.array_equal(found, right), f"{n} stages, run {i}"


def test_vectors_and_states_too(tiny: WriteTiny, staged: Staged) -> None:
    path = tiny("llama", n_layer=5)
    one = whole(path)
    (engine, _) = staged(path, 3)
    texts = [text(9), text(30), text(4)]
    assert np.array_equal(engine.embed(texts), one.embed(texts))
    assert np.array_equal(engine.states(texts[1]), one.states(texts[1]))
    one.close()


def test_a_stage_reads_and_writes_for_its_own_layers_alone(tiny: WriteTiny, staged: Staged) -> None:
    engine, chain = staged(tiny("llama", n_layer=6, tied=0), 3)
    Session(engine).feed(text(20))
    used: list[str] = []
    for stage in chain.stages:
        assert stage is not None
        plan = stage.plan(20, 1, "logits" if stage.is_last else "stream")
        plan.check()
        names = {name for name in plan.tensors_used if name.startswith("blk.")}
        assert {int(name.split(".")[1]) for name in names} == set(stage.layers)
        used += plan.tensors_used
        (pool,) = stage.cache.pools
        n = pool.cell_bytes // 6
        pages = np.asarray(pool.const.array).reshape(-1, 6, n)
        written = {layer for layer in range(6) if pages[:, layer].any()}
        assert written == set(stage.layers)  # what is not written takes no memory
    assert len(used) == len(set(used))
    assert set(used) == set(engine.gguf.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_stage_is_replaced_and_what_it_held_read_again(
    tiny: WriteTiny, staged: Staged, victim: int
) -> None:
    path = tiny("llama", "Q8_0", n_layer=6)
    one = whole(path, deterministic=True)
    (engine, chain) = staged(path, 3, deterministic=True)
    ids = text(150)
    rows: list[list[np.ndarray]] = []
    for each in (one, engine):
        a, b, idle = (Session(each) for _ in range(3))
        made = [a.feed(ids[:70]), b.feed(ids[30:50]), idle.feed(ids[:100])]
        if each is engine:
            chain.kill(victim)
        made += [a.feed(ids[70:72]), b.feed(ids[50:51])]
        if each is engine:
            chain.kill(victim)
            chain.dies_at = chain.n_runs + 2  # and again, while it is read again
        made += [each.run([BatchItem(s.seq, ids[72:74]) for s in (a, b)]), idle.feed(ids[100:101])]
        assert [s.n_past for s in (a, b, idle)] == [74, 23, 101]
        check_pages(each.cache, [a.seq, b.seq, idle.seq])
        rows.append(made)
        for session in (a, b, idle):
            session.close()
    for found, right in zip(*rows, strict=True):
        assert np.array_equal(found, right)
    assert engine.n_lost == 3
    one.close()


def test_a_stage_that_always_dies_is_an_error_that_says_so(
    tiny: WriteTiny, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, chain = staged(tiny("llama", n_layer=4), 2, deterministic=True)
    session = Session(engine)
    ids = text(40)
    session.feed(ids[:30])
    monkeypatch.setattr(chain, "restart", lambda: None)
    chain.kill(1)
    for _ in range(2):
        with pytest.raises(StageLostError, match="stage 2 of 2 has ended"):
            session.feed(ids[30:])
    monkeypatch.undo()
    found = session.feed(ids[30:])  # nothing was forgotten
    assert session.ids == ids
    one = whole(engine.gguf.path, deterministic=True)
    assert np.array_equal(found, Session(one).feed(ids))
    one.close()


def test_what_stages_cannot_do_is_refused(tiny: WriteTiny, staged: Staged, tmp_path: Path) -> None:
    path = tiny("llama", n_layer=4)
    engine, _ = staged(path, 2)
    session = Session(engine)
    session.feed(text(40))
    with pytest.raises(
        UnsupportedError, match="cache files are not supported with pipeline stages"
    ):
        save_session(tmp_path / "a", engine, session.seq)
    with pytest.raises(UnsupportedError, match="single steps"):
        engine.run_timed([BatchItem(session.seq, [1])])
    for n in (0, 5):
        with pytest.raises(TreadleError, match=f"{n} stages: the model has 4 layers"):
            split(engine.gguf, engine.config, n)
    encoder = tiny("bert")
    with pytest.raises(UnsupportedError, match="graph 'encoder'"):
        staged_config(load_config(open_gguf(encoder)), range(1))


def test_a_layer_that_reads_another_stages_keys_is_refused(tiny: WriteTiny) -> None:
    config = load_config(open_gguf(tiny("llama", n_layer=4)))
    layers = list(config.layers)
    layers[3] = replace(layers[3], kv_from=1)
    config = replace(config, layers=tuple(layers))
    assert staged_config(config, range(1, 4)).stage_layers == range(1, 4)
    with pytest.raises(UnsupportedError, match="L3 reads the keys and values of L1"):
        staged_config(config, range(2, 4))


def test_layers_are_cut_into_equal_shares_of_bytes() -> None:
    assert split_evenly([1] * 8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert split_evenly([1, 1, 1, 9], 2) == [range(0, 3), range(3, 4)]
    assert split_evenly([9, 1, 1, 1], 2) == [range(0, 1), range(1, 4)]
    assert split_evenly([9, 1, 1], 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert split_evenly([5, 5], 1) == [range(0, 2)]


class Late:
    """A mask that nobody has computed yet when the run begins."""

    def __init__(self, mask: bytes) -> None:
        self._mask = mask
        self.asked = False

    def wait(self) -> bytes:
        """See ``kernels.run_state.AsyncMask``."""
        self.asked = True
        return self._mask


def test_a_mask_that_comes_late_holds(tiny: WriteTiny, staged: Staged) -> None:
    path = tiny("llama", n_layer=4)
    one = whole(path)
    (engine, chain) = staged(path, 2)
    allowed = np.arange(engine.config.n_vocab) % 7 == 3
    found = []
    for each in (one, engine):
        late = Late(np.packbits(allowed, bitorder="little").tobytes())
        seq = each.cache.sequence()
        (row,) = each.sample([BatchItem(seq, text(20), 1, (LogitsQuery(mask=late),))])
        assert late.asked
        assert row.top is not None
        found.append(row.top.ids[: min(allowed.sum(), N_TOP)].tolist())
        seq.close()
    one.close()
    assert found[0] == found[1]
    assert {token % 7 for token in found[1]} == {3}
    assert chain.n_runs == 1


def test_adapters_are_refused(tiny: WriteTiny, staged: Staged) -> None:
    engine, _ = staged(tiny(), 2)
    with pytest.raises(UnsupportedError, match="adapters are not supported"):
        engine.adapt([])
