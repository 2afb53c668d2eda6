"""The claim "a device is six verbs": one whose memory the host cannot see, which runs plans by the
kernels' numpy twins and notes what it is asked for.

What lies in its memory has no address that means anything here; inputs reach it by one copy a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import reference
from tests.conftest import WriteTiny
from tests.engine.test_engine import close, text
from tests.kvcache.test_cache import check_pages
from tests.tiny import rounding
from tests.twins import logits_of_twins
from treadle.api.session import Session
from treadle.devices.cpu.device import Cpu
from treadle.devices.protocol import Device, PlanRequest
from treadle.engine.batch import BatchItem, Inputs
from treadle.engine.engine import Engine
from treadle.files.gguf import open_gguf
from treadle.isa.portable import PORTABLE
from treadle.jit.kernel import CompileStats
from treadle.kvcache.disk.session_file import load_session, save_session
from treadle.models.load import load_config
from treadle.plan.plan import Const, DeviceMemory, Plan

SOURCES = Path(__file__).resolve().parent.parent.parent / "src" / "treadle"


class FarMemory(DeviceMemory):
    """Bytes of the device; ``bytes``, if the host writes them, are the host's copy."""

    def __init__(self, calls: list[str], data: np.ndarray, *, host: bool = False) -> None:
        self._calls = calls
        self.far = data
        self.n_bytes = data.nbytes
        self.bytes = np.zeros_like(data) if host else None

    def _read(self, at: int, n_bytes: int) -> np.ndarray:
        self._calls.append("read")
        return self.far[at : at + n_bytes].copy()

    def _write(self, at: int, data: np.ndarray) -> None:
        self._calls.append("write")
        self.far[at : at + len(data)] = data


class FarProgram(NamedTuple):
    plan: Plan
    arena: FarMemory
    inputs: FarMemory
    n_steps: int


class Recording(Device):
    isa = PORTABLE
    n_threads = 3
    variant = "recording"

    def __init__(self) -> None:
        self.kernels, self.calls = CompileStats(), list[str]()
        self.uploaded: list[str] = []

    def memory(self, n_bytes: int, *, host: bool = False) -> FarMemory:
        self.calls.append("memory")
        return FarMemory(self.calls, np.zeros(n_bytes, np.uint8), host=host)

    def weights(self, name: str, array: np.ndarray) -> Const:
        self.uploaded.append(name)
        return Const(name, FarMemory(self.calls, array.copy()), None)

    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None:
        self.calls.append("copy")
        memory.far[to : to + n_bytes] = memory.far[start : start + n_bytes]

    def _plan(self, request: PlanRequest) -> Plan:
        """The CPU's lowering, for vectors of its own and plain tiles."""
        self.calls.append("plan")
        return request.build(self.isa, self.n_threads)

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> FarProgram:
        self.calls.append("ready")
        arena.far[:] = 0xFF  # NaN: nothing may be read unwritten
        return FarProgram(plan, arena, inputs, len(plan))

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        plan, arena, inputs, _ = program
        self.calls.append("run")
        inputs.far[:] = inputs.bytes
        for i in steps:
            step = plan.steps[i]
            args = plan.arrays(step, arena.far, lambda const: const.memory.far)
            with np.errstate(invalid="ignore"):  # what it makes of padding is not looked at
                step.spec.run_ref(args, Inputs(inputs.far))
            if times is not None:
                times.append(1.0)
        return True

    def close(self) -> None:
        self.calls.append("close")


def engine_on(device: Device, path: Path) -> Engine:
    gguf = open_gguf(path)
    return Engine(gguf, load_config(gguf), device, n_ctx=200, kv="f32", n_sequences=3)


@pytest.fixture(params=["llama", "gemma3"])
def engines(request: pytest.FixtureRequest, tiny: WriteTiny) -> Iterator[tuple[Engine, Engine]]:
    """On the toy, and on this machine's processor, of a model with one pool and one with two."""
    path = tiny(request.param, window=16, n_layer=6)
    both = engine_on(Recording(), path), engine_on(Cpu(PORTABLE, 3), path)
    yield both
    for engine in both:
        engine.close()


def twins(engine: Engine, parts: list[BatchItem]) -> np.ndarray:
    """The logits of a batch by the twins, in the host's memory."""
    _, rows = logits_of_twins(engine, parts)
    for part in parts:
        engine.cache.commit(part.seq)
    return rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_model_runs_on_it(engines: tuple[Engine, Engine]) -> None:
    """Chunks of prompts, a shared beginning, a fork, decoding: to the bits of the twins."""
    ids = text(90)
    made: list[list[np.ndarray]] = []
    far, near = engines
    ways: list[Callable[[list[BatchItem]], np.ndarray]] = [far.run, partial(twins, near)]
    for engine, run in zip(engines, ways, strict=True):
        cache = engine.cache
        rows = []
        a = cache.sequence()
        b = cache.sequence()
        rows.append(run([BatchItem(a, ids[:70]), BatchItem(b, ids[5:12], 2)]))
        rows.append(run([BatchItem(a, [ids[70]]), BatchItem(b, [ids[12]])]))
        fork = cache.fork(a)  # a page that is not full: who writes first copies it
        rows.append(
            run(
                [BatchItem(fork, ids[71:75]), BatchItem(a, ids[71:73]), BatchItem(b, ids[13:14], 0)]
            )
        )
        shared = cache.sequence(ids)
        assert len(shared) == 64
        rows.append(run([BatchItem(shared, ids[64:90], 3)]))
        check_pages(cache, [a, b, fork, shared])
        for seq in (a, b, fork, shared):
            seq.close()
        made.append(rows)
    for found, expected in zip(*made, strict=True):
        assert np.array_equal(found, expected)
    config = far.config
    gguf = far.gguf
    assert close(made[0][-1], reference.forward(gguf, config, ids)[-3:], rounding(config))


@pytest.mark.slow
def test_what_it_was_asked_for(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    engine = engines[0]
    device: Any = engine.device
    session = Session(engine)
    ids = text(40)
    session.feed(ids)
    assert sorted({name.removesuffix(":f32") for name in device.uploaded}) == sorted(
        engine.gguf.tensors
    )
    assert len(set(device.uploaded)) == len(device.uploaded)
    assert device.calls.count("run") == device.calls.count("read") == 1  # one run, its logits
    device.calls.clear()
    for token in text(5):
        session.feed([token])
    assert set(device.calls) == {"plan", "memory", "ready", "run", "read"}
    assert device.calls[-4:] == ["run", "read"] * 2
    save_session(tmp_path / "state", engine, session.seq)
    other = Session(engine)
    load_session(tmp_path / "state", engine, other.seq, lambda n: None)
    assert np.array_equal(other.feed([7]), session.feed([7]))
    plan = engine.plan()
    times = engine.run_timed([BatchItem(other.seq, [8])])
    assert times == [(step.label, 1.0) for step in plan]


def test_who_knows_addresses() -> None:
    """The device's own parts, and mapped files."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        source = path.read_text("utf-8")
        if "ctypes" in source or re.search(r"\.address\b", source):
            found.add(path.relative_to(SOURCES).parts[0])
    assert found == {"base", "devices", "profiling", "system", "files", "convert"}
