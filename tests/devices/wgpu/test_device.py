"""Whole models on the wgpu device: chunks, batches, forks, saved sessions, known texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests import reference
from tests.conftest import WriteTiny
from tests.devices.wgpu.test_steps import engine_on
from tests.engine.test_engine import close, text
from tests.hooked import check_alike, hooked_rows
from tests.tiny import rounding
from treadle.api.session import Session
from treadle.devices.wgpu.device import Wgpu, device_properties
from treadle.devices.wgpu.memory import GpuMemory
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.errors import DeviceError, NoMemoryError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kvcache.disk.session_file import load_session, save_session
from treadle.models.load import load_config
from treadle.tokenizer.tokenizer import load_tokenizer

# Functions of WGSL may be off by a few units more than those that ``rounding`` reckons with.
SHARE = 4.0


def run_all(engine: Engine) -> list[np.ndarray]:
    """Chunks, several sequences, a fork, a shared beginning."""
    ids = text(90)
    cache = engine.cache
    rows = []
    a = cache.sequence()
    b = cache.sequence()
    rows.append(engine.run([BatchItem(a, ids[:70]), BatchItem(b, ids[5:12], 2)]))
    rows.append(engine.run([BatchItem(a, [ids[70]]), BatchItem(b, [ids[12]])]))
    fork = cache.fork(a)  # a page that is not full: who writes first copies it
    rows.append(
        engine.run(
            [BatchItem(fork, ids[71:75]), BatchItem(a, ids[71:73]), BatchItem(b, ids[13:14], 0)]
        )
    )
    shared = cache.sequence(ids)
    assert len(shared) == 64
    rows.append(engine.run([BatchItem(shared, ids[64:90], 3)]))
    for seq in (a, b, fork, shared):
        seq.close()
    return rows


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_runs_on_it(deterministic: bool, device: Wgpu, tiny: WriteTiny) -> None:
    """The exact logits, and twice the same bits."""
    path = tiny("llama", "Q8_0", n_layer=2)
    made = []
    for _ in range(2):
        engine = engine_on(device, path, "f32", deterministic=deterministic)
        made.append(run_all(engine))
        engine.close()
    for first, second in zip(*made, strict=True):
        assert np.array_equal(first, second)
    gguf = engine.gguf
    config = engine.config
    exact = reference.forward(gguf, config, text(90))
    assert close(made[0][-1], exact[-3:], SHARE * rounding(config))
    assert close(made[0][0][:1], exact[69:70], SHARE * rounding(config))


def test_deterministic_bits_are_a_row_s_own(device: Wgpu, tiny: WriteTiny) -> None:
    """However a text is cut into runs, and whatever else is in the batch."""
    engine = engine_on(
        device, tiny("gemma3", "F16", n_layer=2, window=16), "f16", deterministic=True
    )
    ids = text(40)
    cache = engine.cache
    a = cache.sequence()
    b = cache.sequence()
    other = cache.sequence()
    whole = engine.run([BatchItem(a, ids, 1)])
    engine.run([BatchItem(b, ids[:33], 0), BatchItem(other, text(9, seed=5), 1)])
    engine.run([BatchItem(b, ids[33:39], 0)])
    cut = engine.run([BatchItem(b, ids[39:], 1)])
    assert np.array_equal(whole, cut)
    engine.close()


def test_sessions_are_saved_and_loaded(device: Wgpu, tiny: WriteTiny, tmp_path: Path) -> None:
    engine = engine_on(device, tiny("llama", "F16", n_layer=2), "q8_0")
    session = Session(engine)
    other = Session(engine)
    ids = text(40)
    session.feed(ids)
    save_session(tmp_path / "state", engine, session.seq)
    load_session(tmp_path / "state", engine, other.seq, lambda n: None)
    assert np.array_equal(other.feed([7]), session.feed([7]))
    times = engine.run_timed([BatchItem(other.seq, [8])])
    assert [label for label, _ in times] == [step.label for step in engine.plan()]
    assert all(seconds >= 0 for _, seconds in times)
    device.stamps, stamps = False, device.stamps
    try:
        assert len(engine.run_timed([BatchItem(other.seq, [9])])) == len(times)
    finally:
        device.stamps = stamps
    engine.close()


def test_large_weights_lie_in_several_buffers(
    device: Wgpu, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits: rows are what is split."""
    path = tiny("llama", "Q4_0", n_layer=1)
    ids = text(12)
    made = []
    for most in (device.most, 5000):
        engine = engine_on(device, path, "f32")
        name = "output.weight" if "output.weight" in engine.gguf.tensors else "token_embd.weight"
        const = engine._weights[name]
        memory: Any = const[0].memory
        with monkeypatch.context() as patch:
            patch.setattr(device, "most", most)
            n_parts = len(memory.parts(36))  # rows of 64 weights
        seq = engine.cache.sequence()
        made.append(
            [engine.run([BatchItem(seq, ids[:11], 2)]), engine.run([BatchItem(seq, ids[11:])])]
        )
        engine.close()
    assert n_parts > 1
    for whole, split in zip(*made, strict=True):
        assert np.array_equal(whole, split)


def test_memory_is_bytes(device: Wgpu) -> None:
    """Reads, writes and copies of any bytes, though the API moves words."""
    memory = GpuMemory(device, 21)
    data = np.arange(21, dtype=np.uint8)
    assert not memory.read(0, 21).any()
    memory.write(0, data)
    memory.write(5, np.array([90, 91, 92], np.uint8))
    data[5:8] = 90, 91, 92
    assert np.array_equal(memory.read(0, 21), data)
    assert np.array_equal(memory.read(3, 6), data[3:9])
    assert memory.read(21, 0).size == 0
    device.copy(memory, 8, 0, 8)
    data[8:16] = data[:8]
    assert np.array_equal(memory.read(0, 21), data)
    with pytest.raises(NoMemoryError, match="exceeds the adapter's binding limit"):
        device.memory(1 << 40)


@pytest.mark.parametrize(
    ("arch", "sizes", "what"),
    [
        ("qwen3moe", {"n_expert": 4, "n_ff_exp": 64}, "ffn.*: .*does not support"),
        ("deepseek2", {}, "latent|by_head|experts|does not support"),
    ],
)
def test_what_is_not_built_is_refused(
    arch: str, sizes: dict[str, int], what: str, device: Wgpu, tiny: WriteTiny
) -> None:
    engine = engine_on(device, tiny(arch, "F16", **sizes), "f16")
    with pytest.raises(UnsupportedError, match=what):
        engine.plan()
    engine.close()


def test_formats_that_are_not_built_are_refused(device: Wgpu, tiny: WriteTiny) -> None:
    engine = engine_on(device, tiny("llama", "Q5_1", n_layer=1), "f16")
    with pytest.raises(UnsupportedError, match=r"token_embd: weights of Q5_1; .* Q4_0, Q8_0"):
        engine.plan()
    engine.close()


def test_pages_that_are_not_built_are_refused(device: Wgpu, tiny: WriteTiny) -> None:
    engine = engine_on(device, tiny("llama", "F16", n_layer=1), "q4_0")
    with pytest.raises(UnsupportedError, match=r"L0.attn.rope: keys and values in q4_0; .* q8_0"):
        engine.plan()
    engine.close()


def test_load_names_it(device: Wgpu, tiny: WriteTiny) -> None:
    """Exact logits from the library; what it cannot take is refused by name."""
    path = tiny("llama", "F16", n_layer=1)
    ids = text(30)
    with treadle.load(path, device="wgpu", kv="f32", context=64) as model:
        made = model.logits(ids)
        exact = reference.forward(model.gguf, model.config, ids)
        assert close(made, exact, SHARE * rounding(model.config))
        text_made = model.generate(ids, max_tokens=4, sampling=treadle.Sampling(temperature=0))
        text_made.finish()
        assert text_made.ids[0] == int(exact[-1].argmax())
    with pytest.raises(UnsupportedError, match="'wgpu' takes no number"):
        treadle.load(path, device="wgpu:1")
    with pytest.raises(UnsupportedError, match="remove it for a GPU"):
        treadle.load(path, device="wgpu", isa="avx2")


def test_hooks_are_those_of_the_cpu(device: Wgpu, tiny: WriteTiny) -> None:
    path = tiny("llama", "F16", n_layer=2)
    ids = text(12)
    usual: dict[str, Any] = {"kv": "f32", "context": 64}
    with treadle.load(path, device="wgpu", **usual) as gpu, treadle.load(path, **usual) as cpu:
        check_alike(hooked_rows(gpu, ids), hooked_rows(cpu, ids))


def test_doctor_tells_of_it(device: Wgpu) -> None:
    assert device_properties()["wgpu"] == device.name


def test_drivers_write_no_errors(device: Wgpu) -> None:
    names = {**os.environ}
    names.pop("XDG_RUNTIME_DIR", None)  # as where nobody has logged in
    code = (
        "from treadle.devices.wgpu.device import device_properties; "
        "print(device_properties()['wgpu'])"
    )
    child = [sys.executable, "-c", code]
    made = subprocess.run(child, env=names, capture_output=True, text=True, check=True)
    assert (made.stdout, made.stderr) == (f"{device.name}\n", "")


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wgpu", None)
    assert "treadle[wgpu]" in device_properties()["wgpu"]
    with pytest.raises(DeviceError, match=r"pip install 'treadle\[wgpu\]'"):
        Wgpu()


# -- known models ---------------------------------------------------------------------------------


def test_a_story_is_that_of_llama2c(device: Wgpu, data: Path) -> None:
    gguf = open_gguf(data / "models" / "stories260K.gguf")
    truth = json.loads((data / "truth" / "llama2c_stories260K_greedy.json").read_text())
    case = truth[1]
    tokenizer = load_tokenizer(gguf)
    engine = Engine(gguf, load_config(gguf), device, n_ctx=300, kv="f32")
    ids = tokenizer.encode_prompt(case["prompt"])
    n_left = case["n_steps"] - (len(ids) - 1)
    session = Session(engine)
    made: list[int] = []
    while len(made) < n_left:
        made.append(int(session.feed([made[-1]] if made else ids).argmax()))
        if made[-1] == tokenizer.bos:
            made.pop()
            break
    assert f"{case['prompt']}{tokenizer.decode(made)}\n".strip() == case["text"].strip()
    engine.close()


@pytest.mark.parametrize("name", ["105/babyllama105-F16", "105_pad256/Q4_K_S"])
def test_logits_are_exact_to_rounding(name: str, device: Wgpu, data: Path) -> None:
    gguf = open_gguf(data / "models" / f"babyllama{name}.gguf")
    config = load_config(gguf)
    engine = Engine(gguf, config, device, n_ctx=100, kv="f32")
    ids = [int(i) for i in np.random.default_rng(1).integers(3, config.n_vocab, 40)]
    session = Session(engine)
    session.feed(ids[:37])
    made = np.stack([session.feed([token]) for token in ids[37:]])
    assert close(made, reference.forward(gguf, config, ids)[37:], SHARE * rounding(config))
    engine.close()
