"""Each step of plans of tiny models, against its numpy twin on the same memory.

The arena begins as NaN. A step may change nothing but what it declares to write, and there all
that the twin writes must be as the twin has it, to a bound that is derived from how it is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conftest import WriteTiny
from tests.engine.test_engine import text
from treadle.devices.wgpu.device import Wgpu
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.files.gguf import open_gguf
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.elementwise.elementwise import Norm, Pack
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.elementwise.top_logits import PARTIAL, JoinTop, TopLogitsKernel
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.run_state import RESULT, TOTAL_ERROR, LogitsQuery
from treadle.models.control_vector import ControlVector
from treadle.models.load import load_config
from treadle.plan.plan import Const, Plan, Step

U = 2.0**-24
SIZES = {"n_layer": 1}
LARGE = {"n_layer": 1, "n_embd": 256, "n_ff": 256, "n_head": 8, "n_head_kv": 4, "head_dim": 32}
CASES = {
    "llama": ("llama", "Q4_0", "f16", {"n_ff": 160}),
    "ragged": ("llama", "F32", "f32", {"n_embd": 52, "n_ff": 76, "n_layer": 1}),
    "gemma3": ("gemma3", "F16", "q8_0", {"window": 16}),
    "gemma2": ("gemma2", "Q8_0", "f16", {"window": 16, "softcap": 30, "n_layer": 2}),
    "qwen2": ("qwen2", "BF16", "bf16", {}),
    "head-norms": ("command-r", "F32", "f32", {"head_norms": 1, "n_layer": 1}),
    "gpt2": ("gpt2", "F32", "f32", {"n_head_kv": 4, "n_layer": 1}),
    "Q4_K": ("llama", "Q4_K", "f32", LARGE),
    "Q6_K": ("llama", "Q6_K", "f32", LARGE),
}


def engine_on(device: Wgpu, path: Any, kv: str, **settings: Any) -> Engine:
    gguf = open_gguf(path)
    settings = {"n_ctx": 200, "n_sequences": 3, **settings}
    return Engine(gguf, load_config(gguf), device, kv=kv, **settings)


def bound(step: Step, args: Any, run: Any) -> float:
    """How far a value that the step makes may be from the exact one, as a share of the largest of
    what is written.
    """
    spec = step.spec
    if isinstance(spec, Matmul):
        # A sum of K products in any order: K U of the sum of their sizes, which is at most
        # |w| |x|; weights as d * code - m are differences of terms up to four times as large.
        x = np.linalg.norm(spec.layout().read_ref(args.x, int(run[spec.count])), axis=-1).max()
        sizes = [
            np.linalg.norm(spec.weights_ref(w, n), axis=-1).max()
            for w, n in zip(args.w, args.rows, strict=True)
        ]
        share = 4 * (spec.k + 8) * U * x * max(sizes)
        return float(share * (2 * share / (spec.k * U) if isinstance(spec, Gated) else 1))
    if isinstance(spec, Attention):
        # Scores of D terms, times log2 e, are what a weight's exponent is off by; up to 30 here.
        return 4 * (spec.head_dim + 64) * 30 * U
    if isinstance(spec, RopeStore):
        return (spec.head_dim + 32) * U
    return {Norm: 2.0 * getattr(spec, "k", 0) + 16, Pack: 64, Merge: 256, Softcap: 64}.get(
        type(spec), 4.0
    ) * U


def check(device: Wgpu, engine: Engine, parts: list[BatchItem]) -> set[str]:
    """All steps of a batch, one by one; which kernels they were."""
    with engine.lock:
        plan, run = engine.steps(parts)
        arena = device.memory(plan.arena_bytes)
        arena.write(0, np.full(plan.arena_bytes, 0xFF, np.uint8))
        program = device.ready(plan, arena, run.memory)
        for i, step in enumerate(plan.steps):
            before = arena.read(0, plan.arena_bytes)
            pools = {c: read(c) for c in step.args.values() if is_pool(c)}
            assert device.run(program, range(i, i + 1))
            after = arena.read(0, plan.arena_bytes)
            twin = before.copy()

            def array_of(const: Const, pools: dict[Const, np.ndarray] = pools) -> np.ndarray:
                found: np.ndarray = pools.get(const, const.array)
                return found

            args = plan.arrays(step, twin, array_of)
            share = bound(step, args, run)
            with np.errstate(invalid="ignore"):
                step.spec.run_ref(args, run)
            check_arena(plan, step, before, after, twin, share, step.grid.items(run) > 0)
            for const, expected in pools.items():
                check_pool(step, read(const), expected)
        for part in parts:
            engine.cache.commit(part.seq)
        return {step.spec.op for step in plan.steps}


def is_pool(arg: Any) -> bool:
    return isinstance(arg, Const) and arg.array is None


def read(const: Const) -> np.ndarray:
    memory: Any = const.memory
    found: np.ndarray = memory.read(0, memory.n_bytes).copy()
    return found


def check_arena(
    plan: Plan,
    step: Step,
    before: np.ndarray,
    after: np.ndarray,
    twin: np.ndarray,
    share: float,
    busy: bool,
) -> None:
    others = np.ones(len(after), bool)
    n_written = 0
    for buffer in step.writes:
        at = plan.offsets[buffer]
        here = slice(at, at + buffer.n_bytes)
        others[here] = False
        if isinstance(step.spec, (TopLogitsKernel, JoinTop)):
            check_top(
                PARTIAL if isinstance(step.spec, TopLogitsKernel) else RESULT,
                after[here],
                twin[here],
            )
            n_written += int(busy)
            continue
        found = after[here].view(np.float32)
        expected = twin[here].view(np.float32)
        written = twin[here].view(np.uint32) != before[here].view(np.uint32)
        changed = after[here].view(np.uint32) != before[here].view(np.uint32)
        # In place some values stay by chance; else what is not the twin's is not to be touched.
        assert not (changed & ~written & np.isnan(expected)).any(), step.label
        off = np.abs(found[written].astype(np.float64) - expected[written])
        size = np.abs(expected[written]).max(initial=0.0)
        most = share if isinstance(step.spec, Matmul) else share * size
        n_written += int(written.sum())
        assert (off <= most).all(), (step.label, float(np.nanmax(off)), most, np.isnan(off).sum())
    assert np.array_equal(before[others], after[others]), f"{step.label} wrote elsewhere"
    assert (n_written > 0) == busy, step.label


def check_top(dtype: Any, found: np.ndarray, expected: np.ndarray) -> None:
    n = len(found) // dtype.itemsize
    a, b = (raw[: n * dtype.itemsize].view(dtype) for raw in (found, expected))
    for name in dtype.names:
        if name == "total":
            made = np.isfinite(b[name])
            assert np.allclose(a[name][made], b[name][made], rtol=TOTAL_ERROR, atol=0)
        else:
            # As bits; a row with a NaN has no maximum.
            sound = ~np.isnan(b[name]) if name == "max" else np.ones(b[name].shape, bool)
            assert np.array_equal(a[name][sound].view("u4"), b[name][sound].view("u4")), name


def check_pool(step: Step, found: np.ndarray, expected: np.ndarray) -> None:
    """Rounding may fall to the other side: a unit of the format, of what is in the page."""
    kv = step.spec.page.keys.fmt if isinstance(step.spec, RopeStore) else None
    if kv is None:
        assert np.array_equal(found, expected), f"{step.label} wrote to pages"
        return
    a = kv.to_numpy(found)
    b = kv.to_numpy(expected)
    if kv.scaled:  # codes, and between them scales, whose bytes are no numbers by themselves
        assert (a != b).mean() < 0.02, step.label
        return
    share = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 256 * U}[kv.name]
    held = found.view(f"u{kv.n_bytes}") != expected.view(f"u{kv.n_bytes}")
    assert (np.abs(a - b)[held] <= share * np.nanmax(np.abs(b))).all(), step.label


@pytest.mark.parametrize("case", CASES)
def test_steps_are_as_their_twins(case: str, device: Wgpu, tiny: WriteTiny) -> None:
    arch, fmt, kv, sizes = CASES[case]
    engine = engine_on(device, tiny(arch, fmt, **{**SIZES, **sizes}), kv)
    for pool in engine.cache.pools:  # pages are used again, and hold others' values then
        pool.const.memory.write(0, np.full(pool.n_bytes, 0xFF, np.uint8))
    ids = text(90)
    cache = engine.cache
    a = cache.sequence()
    b = cache.sequence()
    mask = np.random.default_rng(3).integers(0, 256, 40, np.uint8).tobytes()
    looks = LogitsQuery(None, first=True, total=True), LogitsQuery(mask, total=True)
    met = check(device, engine, [BatchItem(a, ids[:70]), BatchItem(b, ids[5:12], 2, looks)])
    met |= check(device, engine, [BatchItem(a, ids[70:72]), BatchItem(b, ids[12:13], 0)])
    met |= check(device, engine, [BatchItem(a, ids[72:73], 1, (LogitsQuery(None, total=True),))])
    assert {"embed", "norm", "gemv", "gemm", "rope", "attention", "top", "top_join"} <= met
    engine.close()


def test_control_vectors(device: Wgpu, tiny: WriteTiny) -> None:
    """Two vectors for one sequence of a batch, more rows than a record has; none for the other."""
    engine = engine_on(device, tiny("llama", "F32", n_layer=2), "f32")
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((2, engine.config.n_embd)).astype(np.float32)
    engine.steer([ControlVector(f"v{i}", {1: row}) for i, row in enumerate(rows)])
    a = engine.cache.sequence(lora=((0, 0.5), (1, -2.0)))
    b = engine.cache.sequence()
    for sizes in ((40, 7), (1, 1)):
        parts = [BatchItem(seq, text(n)) for seq, n in zip((a, b), sizes, strict=True)]
        assert "add_directions" in check(device, engine, parts)
    engine.close()


def test_long_histories_are_joined(device: Wgpu, tiny: WriteTiny) -> None:
    """A history of more than SPLIT keys is cut: its parts, and what joins them."""
    engine = engine_on(device, tiny("llama", "F32", n_layer=1), "f16", n_ctx=700)
    seq = engine.cache.sequence()
    ids = text(640)
    for at in range(0, 600, 200):
        engine.run([BatchItem(seq, ids[at : at + 200], 0)])
    assert "merge" in check(device, engine, [BatchItem(seq, ids[600:603])])
    assert engine.cache.pools[0].n_pages
    engine.close()
