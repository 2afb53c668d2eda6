"""The wgpu device's shaders and memory without a GPU: texts of WGSL for whole plans, and transfers
of whole words. ``tests/devices/wgpu`` runs them.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import WriteTiny
from treadle.devices.cpu.device import Cpu
from treadle.devices.wgpu.dispatch import calls_of
from treadle.devices.wgpu.isa_row import WGSL
from treadle.devices.wgpu.memory import CHUNK, GpuMemory, GpuWeights
from treadle.devices.wgpu.pages import check_pages, loading, storing
from treadle.devices.wgpu.shader import FOLD, Dispatch, Shader, fold, literal
from treadle.errors import NoMemoryError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kvcache.cache import KVCache
from treadle.models.graphs import GRAPHS
from treadle.models.load import load_config
from treadle.plan.plan import Buffer, Const, Plan
from treadle.plan.weights import Weights

MOST = 65535  # workgroups in a dimension


class FakeGpu:
    """Buffers that are arrays, and a queue that takes whole words alone."""

    name = "fake"

    def __init__(self, most: int) -> None:
        self.most = most  # bytes of a binding
        self.gpu = SimpleNamespace(queue=self)
        self.n_writes = 0

    def create(self, n_bytes: int) -> Any:
        size = -(-n_bytes // 4) * 4
        return SimpleNamespace(size=size, data=np.zeros(size, np.uint8))

    def read_buffer(self, buffer: Any, start: int, n_bytes: int) -> memoryview:
        assert start % 4 == n_bytes % 4 == 0
        return memoryview(buffer.data[start : start + n_bytes].tobytes())

    def write_buffer(self, buffer: Any, start: int, data: np.ndarray) -> None:
        assert start % 4 == data.nbytes % 4 == 0
        assert data.nbytes <= CHUNK
        self.n_writes += 1
        buffer.data[start : start + data.nbytes] = data.view(np.uint8).reshape(-1)


class PlanDevice(Cpu):
    """Makes plans for the GPU, whose weights are in its buffers, and runs none."""

    def weights(self, name: str, array: np.ndarray) -> Const:
        gpu: Any = FakeGpu(1 << 30)
        return Const(name, GpuWeights(gpu, name, array), array)


def plan_of(path: Path, n_tokens: int) -> Plan:
    gguf = open_gguf(path)
    config = load_config(gguf)
    device = PlanDevice(WGSL, 2)
    graph = GRAPHS[config.arch.graph]
    cache = KVCache(graph.pools(config), device, 4096)
    weights = Weights(gguf, device)
    output = next(iter(graph.outputs))
    return device.plan(config, weights, cache, n_tokens, 1, deterministic=False, output=output)


def check_shader(shader: Shader) -> None:
    """Declares what it uses, once each, and uses what is passed."""
    text = shader.text
    assert text.count("@compute") == 1
    assert text.count("{") == text.count("}")
    assert text.count("(") == text.count(")")
    body = text.partition("@group(0) @binding(0)")[2]
    assert set(re.findall(r"\ba\.(\w+)", body)) <= {*shader.args, "none"}
    names = re.findall(r"@binding\((\d+)\) var<[\w, ]+> (\w+)", text)
    places = {name: int(at) for at, name in names}
    assert list(places.values()) == list(range(len(names)))
    assert list(places) == ["a", "arena", "run", *shader.reads, *shader.writes]
    for name in (*shader.reads, *shader.writes):
        assert re.search(rf"\b{name}\b", shader.body), f"{shader.name} does not use {name}"
    for name, _ in shader.constants:
        assert text.count(f"const {name} =") == 1


def check_calls(plan: Plan) -> list[Dispatch]:
    """Every step has dispatches whose arguments are words or buffers of the plan."""
    made = []
    for step in plan.steps:
        calls = calls_of(step)
        assert calls, step.label
        for call in calls:
            check_shader(call.shader)
            assert set(call.shader.args) <= call.args.keys(), step.label
            for name in call.shader.args:
                value = call.args[name]
                if isinstance(value, tuple):  # a place in a buffer
                    value, at = value
                    assert 0 <= at <= value.row_bytes // 4, name
                assert isinstance(value, int | np.integer | Buffer), name
            assert {*call.shader.reads, *call.shader.writes} <= call.consts.keys()
            for count in (0, 1, 7):
                groups = call.groups(lambda name, count=count: count)  # type: ignore[misc]
                assert len(groups) == 3
                assert all(0 <= n <= MOST for n in groups), (step.label, groups)
        made += calls
    return made


@pytest.mark.parametrize(
    ("arch", "fmt", "sizes"),
    [
        ("llama", "Q8_0", {}),
        ("qwen3", "Q4_0", {}),
        ("gemma3", "F16", {"window": 16}),
        ("gpt2", "F32", {}),
    ],
)
def test_shaders_of_whole_plans(
    arch: str, fmt: str, sizes: dict[str, int], tiny: WriteTiny
) -> None:
    path = tiny(arch, fmt, n_layer=2, **sizes)
    names: set[str] = set()
    for n in (1, 24):
        names |= {call.shader.name for call in check_calls(plan_of(path, n))}
    assert any(name.startswith("attention") for name in names), names


def test_an_op_without_a_shader_is_refused_by_its_label(tiny: WriteTiny) -> None:
    plan = plan_of(tiny("mamba", n_layer=1), 1)
    with pytest.raises(UnsupportedError, match=r"the wgpu device does not support \w+: it runs"):
        check_calls(plan)


def test_literals_and_groups() -> None:
    assert literal(True) == "true"
    assert literal(7) == "7u"
    assert literal(-7) == "-7i"
    assert literal(1.0) == "1.0f"
    assert literal(1e-5) == "1e-05f"
    assert float(literal(0.1)[:-1]) == pytest.approx(0.1, rel=1e-7)
    for n in (0, 1, FOLD, FOLD + 1, 3 * FOLD):
        x, y, z = fold(n)
        assert (x <= FOLD, z) == (True, 1)
        assert x * y >= n


@pytest.mark.parametrize("kv", ["f16", "bf16", "f32", "q8_0"])
def test_code_of_pages(kv: str) -> None:
    assert "fn load_value" in loading(kv, "x")
    assert "fn narrow" in storing(kv, "x")
    with pytest.raises(UnsupportedError, match="L0: keys and values in q4_0; the wgpu device"):
        check_pages("q4_0", "L0")


# -- memory ----------------------------------------------------------------------------------------


def test_any_bytes_are_transferred_in_whole_words() -> None:
    gpu: Any = FakeGpu(64)
    memory = GpuMemory(gpu, 30)
    expected = np.zeros(30, np.uint8)
    for at, n in ((0, 30), (1, 2), (3, 9), (28, 2), (8, 4), (5, 0)):
        data = np.arange(at + 1, at + 1 + n).astype(np.uint8)
        memory.write(at, data)
        expected[at : at + n] = data
        for start, stop in ((0, 30), (2, 3), (7, 7), (29, 30)):
            assert np.array_equal(memory.read(start, stop - start), expected[start:stop])
    assert memory.bytes is None
    host = GpuMemory(gpu, 30, host=True)
    assert host.bytes is not None
    assert host.bytes.nbytes == 32


def test_weights_are_uploaded_once_and_by_whole_rows() -> None:
    """Of a tensor that is larger than a binding may be."""
    gpu: Any = FakeGpu(64)
    array = np.arange(10 * 14).astype(np.uint8).reshape(10, 14)
    weights = GpuWeights(gpu, "w", array)
    parts = weights.parts(14)
    assert [(first, n) for _, first, n in parts] == [(0, 4), (4, 4), (8, 2)]
    assert gpu.n_writes == 0  # until a plan binds them
    for _ in range(2):
        for part, first, n in parts:
            data = part.buffer.data
            assert np.array_equal(data[: n * 14], array[first : first + n].reshape(-1))
            assert len(data) >= n * 14 + 4  # a word behind it may be read
    assert gpu.n_writes == 3
    assert np.array_equal(weights.read(20, 5), array.reshape(-1)[20:25])
    small = GpuWeights(gpu, "s", array[:2])
    assert np.array_equal(small.buffer.data[:28], array[:2].reshape(-1))
    with pytest.raises(NoMemoryError, match=r"w: a row of .* exceeds the binding limit of fake"):
        weights.parts(70)
