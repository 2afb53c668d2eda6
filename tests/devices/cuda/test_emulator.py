"""What the emulator says of ``Isa.simt``: small kernels against numpy, and kernels with a fault,
each of which must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.devices.cuda.emulator import Fault, emulated, load
from tests.kernels.harness import Memory
from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.launch_args import PerBlock
from treadle.isa.portable import PORTABLE
from treadle.jit.types import bf16, f16, f32, i32, u16
from treadle.kernels.spec import Args

ISA = emulated(PORTABLE)
SEEDS = range(4)


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.check()


def run(spec: PerBlock, memory: Memory, n_items: int, seed: int = 0, **args: Any) -> None:
    packed = memory.copy(
        np.array(
            [a if isinstance(a, int) else a.ctypes.data for a in spec.args.in_order(args)], np.int64
        )
    )
    load(spec, ISA).launch(packed.ctypes.data, 0, base=n_items, n_ctas=3, seed=seed)
    memory.check()


@dataclass(frozen=True)
class BlockSum(PerBlock):
    """``y[i] = sum x[i]`` of ``threads`` values, by shared memory; barriers may be left out."""

    op: ClassVar[str] = "blocksum"
    args = Args("x:in y:out")
    n: int = 96
    barrier: bool = True

    @property
    def threads(self) -> int:
        return self.n

    @property
    def shared_bytes(self) -> int:
        return 4 * self.n

    def build(self, k: Any, isa: Any, frame: Any) -> None:
        simt = isa.simt
        item = frame.begin
        tid = simt.tid(k)
        room = simt.shared(k)
        k.store(room + tid * 4, k.load(frame.x + (item * self.n + tid) * 4, f32))
        if self.barrier:
            simt.barrier(k)
        with k.if_(tid.eq(0)):
            total = k.var(k.const(0.0, f32))
            with k.loop(self.n) as i:
                total.v = total.v + k.load(room + i * 4, f32)
            k.store(frame.y + item * 4, total.v)


def test_threads_of_a_block_share_memory(memory: Memory) -> None:
    spec = BlockSum()
    x = memory.copy(np.random.default_rng(0).standard_normal((7, spec.n), np.float32))
    for seed in SEEDS:
        y = memory.array(7, np.float32)
        run(spec, memory, 7, seed, x=x, y=y)
        expected = np.cumsum(x, 1, dtype=np.float32)[:, -1]
        assert np.array_equal(y, expected)


def test_a_missing_barrier_is_found(memory: Memory) -> None:
    """Shared memory is NaN at first, and some thread is late with every seed."""
    spec = BlockSum(barrier=False)
    x = memory.copy(np.ones((7, spec.n), np.float32))
    for seed in SEEDS:
        y = memory.array(7, np.float32)
        run(spec, memory, 7, seed, x=x, y=y)
        assert np.isnan(y).any()


@dataclass(frozen=True)
class Bare(PerBlock):
    """A block that does what ``BODIES[body]`` emits."""

    op: ClassVar[str] = "bare"
    args = Args("x:in y:out")
    body: str = ""
    n: int = 64

    @property
    def threads(self) -> int:
        return self.n

    @property
    def shared_bytes(self) -> int:
        return 4096

    def build(self, k: Any, isa: Any, frame: Any) -> None:
        BODIES[self.body](k, isa.simt, frame)


def _shuffle(k: Any, simt: Any, frame: Any) -> None:
    tid = simt.tid(k)
    total = k.load(frame.x + tid * 4, f32)
    for lanes in (16, 8, 4, 2, 1):
        total = total + simt.shuffle(k, total, lanes)
    k.store(frame.y + tid * 4, total)


def _split_block(k: Any, simt: Any, frame: Any) -> None:
    with k.if_(simt.tid(k) < 32):
        simt.barrier(k)


def _two_barriers(k: Any, simt: Any, frame: Any) -> None:
    with k.if_else(simt.tid(k) < 32) as (first, second):
        with first:
            simt.barrier(k)
        with second:
            simt.barrier(k)


def _split_warp(k: Any, simt: Any, frame: Any) -> None:
    with k.if_(simt.tid(k) % 2 > 0):
        simt.shuffle(k, k.const(1, i32), 1)


def _no_wait(k: Any, simt: Any, frame: Any) -> None:
    simt.copy_async(k, simt.shared(k) + simt.tid(k) * 16, frame.x)
    simt.commit(k)


def _odd_copy(k: Any, simt: Any, frame: Any) -> None:
    simt.copy_async(k, simt.shared(k) + simt.tid(k) * 8, frame.x)
    simt.commit(k)
    simt.wait(k, 0)


def _many_copies(k: Any, simt: Any, frame: Any) -> None:
    with k.loop(600):
        simt.copy_async(k, simt.shared(k), frame.x)
    simt.commit(k)
    simt.wait(k, 0)


def _outside(k: Any, simt: Any, frame: Any) -> None:
    k.store(simt.shared(k) + 4096 + simt.tid(k), k.const(1, i32))


def _copies(k: Any, simt: Any, frame: Any) -> None:
    """Three groups, of which the last may be late: the first two are there after ``wait(1)``."""
    tid = simt.tid(k)
    room = simt.shared(k)
    for group in range(3):
        simt.copy_async(k, room + (group * 64 + tid) * 16, frame.x + (group * 64 + tid) * 16)
        simt.commit(k)
    simt.wait(k, 1)
    simt.barrier(k)
    for group in range(2):  # another thread's copy
        k.store(
            frame.y + (group * 64 + tid) * 16,
            k.load(room + (group * 64 + (tid ^ 5)) * 16, f32 * 4),
        )
    k.store(frame.y + (2 * 64 + tid) * 16, k.load(room + (2 * 64 + tid) * 16, f32 * 4))
    simt.wait(k, 0)


def _mma(ty: Any, transposed: bool) -> Callable[[Any, Any, Any], None]:
    """``y = A B`` of one warp: A 16 by 16 and B 16 by 8, as they lie in shared memory."""

    def body(k: Any, simt: Any, frame: Any) -> None:
        tid = simt.tid(k)
        room = simt.shared(k)
        for i in range(12):  # 32 lanes times 12 values of A (row by row) and then B
            at = (tid * 12 + i) * 2
            k.store(room + at, k.load(frame.x + at, u16))
        simt.barrier(k)
        a = simt.load_matrix(k, room + tid % 16 * 32 + tid // 16 * 16)
        b_at = room + 512
        if transposed:  # B row by row: its 8 by 8 halves are read as columns
            b = simt.load_matrix_t(k, b_at + tid % 16 * 16)[:2]
        else:  # its columns lie as rows
            b = simt.load_matrix(k, b_at + tid % 8 * 32 + tid // 8 % 2 * 16)[:2]
        zero = [k.const(1.0, f32)] * 4
        c = (simt.mma_f16 if ty == f16 else simt.mma_bf16)(k, zero, a, b)
        for r in range(4):
            row = tid // 4 + 8 * (r // 2)
            column = tid % 4 * 2 + r % 2
            k.store(frame.y + (row * 8 + column) * 4, c[r])

    return body


BODIES: dict[str, Callable[[Any, Any, Any], None]] = {
    "shuffle": _shuffle,
    "splitblock": _split_block,
    "twobarriers": _two_barriers,
    "splitwarp": _split_warp,
    "nowait": _no_wait,
    "oddcopy": _odd_copy,
    "manycopies": _many_copies,
    "outside": _outside,
    "copies": _copies,
    "mmaf16": _mma(f16, False),
    "mmaf16t": _mma(f16, True),
    "mmabf16": _mma(bf16, False),
}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "splitblock",
            "different barriers, or have ended .*at .*cuda/test_emulator.py:",
        ),
        ("twobarriers", "different barriers"),
        ("splitwarp", "threads of a warp wait at different places, or have ended"),
        ("nowait", "ends before it has waited"),
        ("oddcopy", "not aligned"),
        ("manycopies", "more than 512 copies"),
        ("outside", "memory outside what the block shares was written"),
    ],
)
def test_a_fault_is_told_by_name(memory: Memory, body: str, message: str) -> None:
    x = memory.copy(np.zeros((64, 4), np.float32))
    with pytest.raises(Fault, match=message):
        run(Bare(body), memory, 1, x=x, y=memory.array(4, np.float32))


def test_a_warp_exchanges_values(memory: Memory) -> None:
    x = memory.copy(np.random.default_rng(1).standard_normal(64).astype(np.float32))
    y = memory.array(64, np.float32)
    run(Bare("shuffle"), memory, 1, x=x, y=y)
    assert np.allclose(y.reshape(2, 32), x.reshape(2, 32).sum(1, keepdims=True), atol=1e-5)
    assert (np.ptp(y.reshape(2, 32), 1) == 0).all()  # the same bits in every lane


def test_copies_come_by_their_groups(memory: Memory) -> None:
    """What is not waited for is there by chance alone: with some seed it is not."""
    x = memory.copy(np.arange(3 * 64 * 4, dtype=np.float32).reshape(3, 64, 4))
    late = []
    for seed in SEEDS:
        y = memory.array((3, 64, 4), np.float32)
        run(Bare("copies"), memory, 1, seed, x=x, y=y)
        assert np.array_equal(y[:2], x[:2, np.arange(64) ^ 5])
        late.append(np.isnan(y[2]).any())
        assert not np.isnan(y[2]).all()
    assert any(late)


@pytest.mark.parametrize("body", ["mmaf16", "mmaf16t", "mmabf16"])
def test_a_warp_multiplies_matrices(memory: Memory, body: str) -> None:
    rng = np.random.default_rng(2)
    # exact in every type
    a = rng.integers(-8, 8, (16, 16))
    b = rng.integers(-8, 8, (16, 8))

    def as_bits(m: np.ndarray) -> np.ndarray:
        if "bf16" in body:
            return (m.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).ravel()
        return m.astype(np.float16).view(np.uint16).ravel()

    x = memory.copy(np.concatenate([as_bits(a), as_bits(b if body[-1] == "t" else b.T)]))
    y = memory.array((16, 8), np.float32)
    run(Bare(body, n=32), memory, 1, x=x, y=y)
    assert np.array_equal(y, a @ b + 1)
