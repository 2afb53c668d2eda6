"""Whole models on a GPU that is emulated: exact logits, and all else that an engine does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests import reference
from tests.conftest import WriteTiny
from tests.devices.cuda.cards import cards
from tests.devices.cuda.emulated import EmulatedDriver
from tests.devices.cuda.fake_cuda import FakeCuda
from tests.devices.cuda.machine import EVERYTHING, some
from tests.devices.cuda.served import write_demo
from tests.engine.test_engine import decode, expected_of_mixed, mixed, prefill, text
from tests.hooked import check_alike, hooked_rows
from tests.kvcache.test_cache import check_pages
from treadle.devices.cuda import libcuda
from treadle.devices.cuda.launch_args import PerBlock, scratch_bytes
from treadle.devices.cuda.libcuda import CudaDriver
from treadle.devices.cuda.library import Library
from treadle.engine.batch import BatchItem
from treadle.errors import NoMemoryError, TreadleError, UnsupportedError
from treadle.models.archs import ARCHS, STANDALONE
from treadle.models.graphs import GRAPHS

pytestmark = pytest.mark.slow  # whole models on an emulated card


@pytest.fixture
def drivers() -> Iterator[list[EmulatedDriver]]:
    """Cards that are emulated, as they were opened."""
    with cards() as made:
        yield made


@contextmanager
def model_on(device: str, path: Path | None = None, **settings: Any) -> Iterator[Any]:
    usual: dict[str, Any] = {"threads": 1, "kv": "f32", "context": 256, "n_sequences": 3}
    with treadle.load(path, device=device, **usual | settings) as model:
        yield model


# -- exact logits ----------------------------------------------------------------------------------

CASES: list[tuple[str, str, dict[str, int]]] = [
    ("llama", "Q4_0", {}),
    ("qwen3moe", "F32", {"n_expert": 4, "n_ff_exp": 64}),
    ("gemma4", "F32", {"window": 16}),
    ("gemma3n", "F32", {"window": 16}),
    ("nemotron_h", "F32", {}),
    ("nanochat", "F32", {}),
    ("qwen4exp", "F32", {"n_layer": 2}),
    ("deepseek4", "F32", {"n_layer": 2}),
    ("nanbeige", "F32", {"n_layer": 2}),
    ("hy_v4", "F32", {"n_layer": 2}),
    ("kimi-k3", "F32", {"n_layer": 2}),
    ("hrm_text", "F32", {}),
    ("talkie", "F32", {}),
    ("smallthinker", "F32", {"n_layer": 2, "n_expert": 4, "n_ff_exp": 64}),
    (
        "llama4",
        "F32",
        {"window": 9, "n_layer": 5, "n_expert": 4, "n_expert_used": 1, "n_ff_exp": 64},
    ),
]
MORE: list[tuple[str, str, dict[str, int]]] = [  # ``python -m tests.devices.cuda`` has these too
    ("gemma3", "BF16", {"window": 16}),
    ("deepseek2", "F16", {}),
    ("glm-dsa", "F32", {}),
    ("minimax-m3", "F32", {"n_layer": 2}),
    ("lfm2", "BF16", {}),
    ("kimi-linear", "F32", {}),
    ("apertus", "F32", {}),
    ("rwkv7", "F32", {}),
    ("olmo_hybrid", "F32", {}),
    ("grok", "F32", {"n_expert": 4, "n_ff_exp": 64}),
    ("inkling", "F32", {"n_layer": 2}),
]


def check_logits(arch: str, fmt: str, path: Path) -> None:
    """Of a prompt in chunks and of single tokens: those of the reference, which the CPU's are
    compared with elsewhere, and which compiles nothing.
    """
    ids = text(20)
    with model_on("cuda", path) as model:
        truth = reference.forward(model.gguf, model.config, ids)
        made = prefill(model.engine, ids, 14), decode(model.engine, ids[:4])
    for ours in made:
        # Activations and what codes mean become bf16 as they meet, both to 2**-9: 13 products, one
        # after the other. Twice that. F32 weights are three parts of bf16: nothing is lost.
        share = 1e-4 if fmt == "F32" else 2 * 2**-9 * np.sqrt(2 * 13)
        expected = truth[: len(ours)]
        error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
        assert error < share, (arch, error, share)


@pytest.mark.parametrize(
    ("arch", "fmt", "sizes"), some([*CASES, *MORE], len(CASES)), ids=lambda x: x if x else ""
)
def test_the_logits_of_the_reference(
    arch: str, fmt: str, sizes: dict[str, int], drivers: list[EmulatedDriver], tiny: WriteTiny
) -> None:
    check_logits(arch, fmt, tiny(arch, fmt, **sizes))
    assert drivers[0].calls.count("start") == 6  # a run is one start


def test_vectors_of_an_encoder(drivers: list[EmulatedDriver], tiny: WriteTiny) -> None:
    path = tiny("bert", "F32")
    made = []
    for device in ("cuda", "cpu"):
        with model_on(device, path) as model:
            made.append(model.engine.embed([text(9), text(3)]))
    assert np.abs(made[0] - made[1]).max() < 1e-4


def test_every_graph_is_met() -> None:
    """Some differ in how files are read alone. Encoder-decoders are refused."""
    met = {GRAPHS[ARCHS[arch].graph].build for arch in (*(arch for arch, *_ in CASES), "bert")}
    graphs = {ARCHS[arch].graph for arch in STANDALONE} - {"encoder_decoder"}
    assert met == {GRAPHS[graph].build for graph in graphs}


# -- an engine ------------------------------------------------------------------------------------


@pytest.fixture
def model(drivers: list[EmulatedDriver], tiny: WriteTiny) -> Iterator[Any]:
    """On a card, of windows and none."""
    with model_on("cuda", tiny("gemma3", "F32", window=16), deterministic=True) as model:
        yield model


def test_the_same_bits(model: Any) -> None:
    """Twice, with other orders of threads; and, as it is deterministic, in other batches."""
    engine, ids = model.engine, text(40)
    whole = prefill(engine, ids)
    assert np.array_equal(prefill(engine, ids), whole)
    assert np.array_equal(prefill(engine, ids, 13), whole)
    assert np.array_equal(decode(engine, ids), whole)
    each = expected_of_mixed(lambda x: prefill(engine, x), ids)
    for a, b in zip(mixed(engine, ids), each, strict=True):
        assert np.array_equal(a, b)


def test_sequences(model: Any, tmp_path: Path) -> None:
    """A fork whose page is not full, a beginning that is shared, a session from a file."""
    engine = model.engine
    ids = text(90)
    cache = engine.cache
    whole = prefill(engine, ids)
    a = cache.sequence()
    engine.run([BatchItem(a, ids[:70], 0)])
    fork = cache.fork(a)
    engine.run([BatchItem(a, text(5, 2), 0)])
    assert np.array_equal(engine.run([BatchItem(fork, ids[70:75])])[0], whole[74])
    shared = cache.sequence(ids)
    assert len(shared) == 64
    assert np.array_equal(engine.run([BatchItem(shared, ids[64:], 3)]), whole[-3:])
    check_pages(cache, [a, fork, shared])
    for seq in (a, fork, shared):
        seq.close()
    session = model.session()
    session.feed(ids[:50])
    session.save(tmp_path / "state")
    session.close()
    again = model.load_session(tmp_path / "state")
    assert np.array_equal(again.logits(ids[50:])[-1], whole[-1])
    again.close()


def test_memory_is_given_back(model: Any, drivers: list[EmulatedDriver]) -> None:
    """Of arenas that have grown; and runs take none."""
    (driver,), engine = drivers, model.engine
    for _ in range(2):  # the larger plan's arena takes the place of the other's
        decode(engine, text(2))
        prefill(engine, text(40))
    n = len(driver.held), len(driver.pins), len(driver.graphs)
    driver.calls.clear()
    decode(engine, text(2))
    prefill(engine, text(40))
    assert set(driver.calls) == {"start", "read"}  # a run is one start, its logits one read
    assert (len(driver.held), len(driver.pins), len(driver.graphs)) == n
    model.close()
    assert driver.closed


def test_blocks_need_no_memory_of_their_threads(model: Any) -> None:
    """Else fewer of them run at once: of a long prompt's attention five on a whole card."""
    blocks = [step.spec for step in model.plan(40) if isinstance(step.spec, PerBlock)]
    assert {"simt_gemm", "simt_attention", "simt_rope"} <= {spec.op for spec in blocks}
    assert not any(scratch_bytes(spec, model.isa) for spec in blocks)


def test_times_of_steps(model: Any) -> None:
    times = model.profile(3)
    assert [label for label, _ in times] == [step.label for step in model.plan(3)]
    assert {seconds for _, seconds in times} == {1.0}


# -- text -----------------------------------------------------------------------------------------


def test_text_of_several_models(drivers: list[EmulatedDriver], tmp_path: Path) -> None:
    """Of the packaged model on two cards at once, or of one with its words whose kernels other
    tests have: by a grammar, whose masks come late; drawn; and of several texts together.
    """
    made: list[list[str]] = [[], []]
    path = None if EVERYTHING else write_demo(tmp_path)
    with model_on("cuda", path) as one, model_on("cuda:1", path) as two:
        for model, texts in zip((one, two), made, strict=True):
            ruled = model.generate("A number:", max_tokens=8, temperature=0, regex="[0-9]{3}")
            drawn = model.generate("The", max_tokens=4, seed=3)
            many = model.generate_many(["One", "Two days", "Three"], max_tokens=2, temperature=0)
            texts += ["".join(ruled), "".join(drawn), *(each.finish() for each in many)]
    assert made[0] == made[1]
    assert all(made[0])
    assert len(made[0][0]) == 3
    assert made[0][0].isdecimal()
    assert len(drivers) == 2


def test_a_draft_on_the_same_card(drivers: list[EmulatedDriver], tiny: WriteTiny) -> None:
    path = tiny("llama", "F32")
    made = []
    for settings in ({"draft": path}, {}):
        with model_on("cuda", path, **settings) as model:
            made.append("".join(model.generate("hello", max_tokens=8, temperature=0)))
    assert made[0] == made[1]
    assert len(drivers) == 2


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "tpu"}, "device='tpu': expected one of cpu, cuda, wgpu"),
        ({"device": "cpu:1"}, "device='cpu:1': 'cpu' takes no number"),
        ({"device": "cuda:x"}, "device='cuda:x': expected a number"),
        ({"device": "cuda", "isa": "portable"}, "isa='portable': applies to device 'cpu' only"),
    ],
)
def test_devices_that_there_are_not(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        treadle.load(**settings)


def test_a_model_with_an_encoder(drivers: list[EmulatedDriver], tiny: WriteTiny) -> None:
    with pytest.raises(UnsupportedError, match=r"^t5: "):
        treadle.load(tiny("t5", "F32"), device="cuda")


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, tiny: WriteTiny) -> None:
    path = tiny("llama", "F32")
    monkeypatch.setattr(libcuda, "CudaDriver", lambda ordinal: EmulatedDriver(300 << 10))
    with model_on("cuda", path, context=32, n_sequences=1) as model:
        why = r"out of GPU memory: its weights take .* has .* free of 300 KiB; use a smaller format"
        with pytest.raises(NoMemoryError, match=why):
            model.logits(text(3))
    with pytest.raises(TreadleError, match=r"no memory for .*KiB free.*lower context="):
        treadle.load(path, device="cuda", context=4096, n_sequences=9)


# -- hooks ---------------------------------------------------------------------------------------


def test_hooks_are_those_of_the_cpu(drivers: list[EmulatedDriver], tiny: WriteTiny) -> None:
    path = tiny("llama", "F32", n_layer=2)
    with model_on("cuda", path) as gpu, model_on("cpu", path) as cpu:
        check_alike(hooked_rows(gpu, text(12)), hooked_rows(cpu, text(12)))


# -- the driver by ctypes -------------------------------------------------------------------------


def test_a_model_over_a_fake_libcuda(monkeypatch: pytest.MonkeyPatch, tiny: WriteTiny) -> None:
    """Real PTX, launches with real addresses; nothing computes, and all is given back."""
    fake = FakeCuda()
    monkeypatch.setattr(libcuda, "CudaDriver", lambda ordinal: CudaDriver(ordinal, Library(fake)))
    with model_on("cuda", tiny("llama", "Q4_0")) as model:
        model.engine.run([BatchItem(seq := model.engine.cache.sequence(), [5])])
        n_steps = len(model.plan(1))
        assert len(fake.launched) == n_steps
        assert fake.calls.count("cuGraphLaunch") == 1
        model.engine.run([BatchItem(seq, [6])])
        assert fake.calls.count("cuStreamBeginCapture_v2") == 1
        times = model.profile(1)
        assert len(fake.launched) == 3 * n_steps == 3 * len(times)
        uploaded = sum(tensor.n_bytes for tensor in model.gguf.tensors.values())
        assert sum(map(len, fake.memory.values())) > uploaded
        seq.close()
    gc.collect()
    assert not fake.kept
    assert not fake.broken
