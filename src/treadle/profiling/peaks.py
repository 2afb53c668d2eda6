"""Peak rates of this machine, measured with the same compiler and threads as a model.

Other programs and other guests of the host take their share, and all use one memory bus. So compare
a peak only with a speed measured in the same minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.devices.cpu.memory_layouts import STEP
from treadle.devices.cpu.thread_team import HostMemory, Team
from treadle.jit.kernel import load_kernels
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, bf16, f32, i8, i16, i32, u8
from treadle.kernels.activation_layout import WORD_TOP, from_bf16_bits
from treadle.kernels.matmul.matrix import REGISTER
from treadle.kernels.run_state import LINE, RUN_STATE
from treadle.kernels.spec import Args, Frame, Spec
from treadle.machine import topology
from treadle.machine.memory import usable_memory

Progress = Callable[[str, int, int], None]

DOTS_PER_VALUE = {
    "q8": 4,
    "q16": 2,
    "bf16": 2,
    "f32": 1,
}  # products added to one 32-bit sum at once
WEIGHT_MAX = 127  # of a q8 weight: the largest that every instruction set's byte dot accepts
ROUNDS = 2000  # of a dots item: 10 to 50 microseconds, far above the cost of claiming it
PIECE = 1 << 19  # bytes of an item of the short streams
PAGE = 1 << 12  # bytes; a long stream is a multiple of it
STREAMS = ((1, 2048), (4, 2048), (4, 0), (8, 1024))  # (streams, prefetch bytes); the best counts
LONG = ((1, 0), (1, 4096))  # the same for a thread that reads its share from front to back
BUFFER_BYTES = 256 << 20, 1 << 30  # bounds of four times the last-level cache
BEYOND = 2  # times the largest cache: half or more of a smaller buffer is read from that cache
SHARE = 3  # a buffer takes at most a third of the usable memory


@dataclass(frozen=True)
class Peaks:
    """The best measured rate of each kind, all threads together."""

    q8: float  # operations a second in byte dots; a multiplication and an addition are two
    # On matrix registers if there are any. None without a dot of bf16, where BF16 weights are
    # widened to f32.
    bf16: float | None
    f32: float
    bytes_s: float  # bytes a second read from memory, or from caches if not ``from_memory``
    cpu_share: float  # of the requested processor time, got while arithmetic was measured
    buffer_bytes: int = BUFFER_BYTES[0]  # on which ``bytes_s`` was measured
    from_memory: bool = True  # False: no memory for a buffer beyond the caches
    # Bytes a second with one long stream a thread: the limit of reading a model in order.
    stream_bytes_s: float | None = None
    q16: float | None = None  # operations a second in dots of i16, where prefill uses them

    def as_dict(self) -> dict[str, float]:
        """Return the rates by name, without those that are None: operations or bytes a second. A
        rate of reading from caches is named ``cache_bytes_s``.
        """
        read = "bytes_s" if self.from_memory else "cache_bytes_s"
        stream = self.stream_bytes_s if self.from_memory else None
        rates = {
            read: self.bytes_s,
            "stream_bytes_s": stream,
            "q8": self.q8,
            "q16": self.q16,
            "bf16": self.bf16,
            "f32": self.f32,
        }
        return {name: rate for name, rate in rates.items() if rate is not None}


@dataclass(frozen=True)
class DotPeakKernel(Spec):
    """Dots in registers only: ``out[item, m, n] = rounds * sum over lanes of w[m] . x[n]``.

    There are ``mr * nr`` independent sums, so that no product waits for the one before: ``w [mr,
    values], x [nr, values], out [items, mr * nr]``. A row of w or x is one vector. Items:
    repetitions.
    """

    op: ClassVar[str] = "dots"
    args = Args("w:in x:in out:out rounds")
    act: str  # of DOTS_PER_VALUE, as in the products' names
    mr: int
    nr: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel's code for the items of ``frame``."""
        lanes = isa.lanes
        n_bytes = isa.vector_bits // 8
        w_at = frame.w
        x_at = frame.x
        out = frame.out
        rounds = frame.rounds
        w_ty, x_ty, sum_ty = self.types(lanes)
        with k.loop(frame.end, start=frame.begin) as item:
            sums = [k.var(k.zero(sum_ty)) for _ in range(self.mr * self.nr)]
            with k.loop(rounds):
                # The fences make LLVM reload the operands, else it would hoist the products out of
                # the loop. One before each x keeps it from holding all of x at once.
                k.fence()
                w = [k.load(w_at, w_ty, offset=n_bytes * m) for m in range(self.mr)]
                for n in range(self.nr):
                    k.fence()
                    x = k.load(x_at, x_ty, offset=n_bytes * n)
                    for m in range(self.mr):
                        total = sums[m * self.nr + n]
                        total.v = self.dot(k, isa, total.v, w[m], x)
            for i, total in enumerate(sums):
                k.store(out, k.sum(total.v), offset=(item * len(sums) + i) * 4)

    def types(self, lanes: int) -> tuple[Ty, Ty, Ty]:
        """Return the types of a row of w, a row of x, and a sum, for vectors of ``lanes`` f32
        values.
        """
        return {
            "q8": (u8 * (4 * lanes), i8 * (4 * lanes), i32 * lanes),
            "q16": (i16 * (2 * lanes), i16 * (2 * lanes), i32 * lanes),
            "bf16": (bf16 * (2 * lanes), bf16 * (2 * lanes), f32 * lanes),
            "f32": (f32 * lanes, f32 * lanes, f32 * lanes),
        }[self.act]

    def dot(self, k: Builder, isa: Isa, total: Val, w: Val, x: Val) -> Val:
        """Emit the dot products of ``w`` and ``x``, one in each lane of the sums, added to
        ``total``.
        """
        if self.act == "f32":
            return k.fma(w, x, total)
        if self.act == "q8":
            return isa.dot4(k, total, w, x, WEIGHT_MAX)
        if self.act == "q16":
            return isa.word_dots(k, total, w, x)
        assert isa.dot_bf16 is not None
        return isa.dot_bf16(k, total, w, x)

    def run_ref(self, args: Any, run: Any) -> None:
        """Compute ``args.out`` in numpy; w and x in bf16 are given as u16."""
        w = args.w
        x = args.x
        out = args.out
        if self.act == "bf16":
            w, x = ((a.astype(np.uint32) << 16).view(np.float32) for a in (w, x))
        sums = (w.astype(np.float64) @ x.astype(np.float64).T).reshape(-1) * args.rounds
        out[:] = sums if out.dtype == np.float32 else sums.astype(np.int64).astype(np.int32)


@dataclass(frozen=True)
class MatrixDots(Spec):
    """Matrix-register products only: ``out[item, m, n] = rounds * w[m] x[n]``, 16 by 16.

    ``w [2, 16, 32], x [2, 16, 32], out [items, 2, 2, 16, 16]``. w and x are bf16, w by columns if
    the machine needs that, x in pairs of rows (``MatrixUnit.dots_bf16``). Items: repetitions.
    """

    op: ClassVar[str] = "matrix_dots"
    args = DotPeakKernel.args

    def scratch(self, lanes: int) -> int:
        return LINE

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel's code for the items of ``frame``."""
        w = frame.w
        x = frame.x
        out = frame.out
        rounds = frame.rounds
        matrix = isa.matrix
        assert matrix is not None, isa.name
        matrix.begin(k, frame.scratch)
        with k.loop(frame.end, start=frame.begin) as item:
            to = out + item * (4 * REGISTER)
            matrix.scope(k, "dots", (w, x, to, rounds), self._multiply)
        matrix.end(k)

    def _multiply(self, k: Builder, w: Val, x: Val, out: Val, rounds: Val) -> None:
        matrix = k.isa.matrix
        assert matrix is not None
        for i in range(2):
            matrix.load(k, 4 + i, w + i * REGISTER, LINE)
            matrix.load(k, 6 + i, x + i * REGISTER, LINE)
        for c in range(4):
            matrix.zero(k, c)
        with k.loop(rounds):
            matrix.dots_bf16(k)
        for c in range(4):
            matrix.store(k, c, out + c * REGISTER, LINE)

    def run_ref(self, args: Any, run: Any) -> None:
        """Compute ``args.out`` in numpy; w and x in bf16 are given as u16."""
        left, right = (from_bf16_bits(v).reshape(2, 16, 32) for v in (args.w, args.x))
        right = right.reshape(2, 16, 16, 2).transpose(0, 1, 3, 2).reshape(2, 32, 16)
        args.out[:] = args.rounds * (left[:, None] @ right[None])


@dataclass(frozen=True)
class StreamReadKernel(Spec):
    """Reads memory as decoding does: ``out[item] = sum of the item's i32 values``, modulo 2**32.

    An item is ``piece`` bytes, read as ``streams`` parallel runs, each prefetching ``ahead`` bytes
    before they are read.
    """

    op: ClassVar[str] = "stream"
    args = Args("data:in out:out piece")
    streams: int
    ahead: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel's code for the items of ``frame``."""
        data = frame.data
        out = frame.out
        piece = frame.piece
        ty = i32 * isa.lanes
        run = piece // self.streams
        per_line = max(1, LINE // ty.n_bytes)
        with k.loop(frame.end, start=frame.begin) as item:
            sums = [k.var(k.zero(ty)) for _ in range(max(4, self.streams))]
            lines = max(1, len(sums) // self.streams)
            with k.loop(run, step=lines * LINE) as at:
                for s in range(self.streams):
                    for line in range(lines):
                        p = data + (item * piece + at + run * s + line * LINE)
                        if self.ahead:
                            k.prefetch(p + self.ahead)
                        total = sums[s * lines + line]
                        for part in range(per_line):
                            off = part * ty.n_bytes
                            total.v = total.v + k.load(p, ty, offset=off, align=ty.n_bytes)
            k.store(out, k.sum(reduce(add, (each.v for each in sums))), offset=item * 4)

    def run_ref(self, args: Any, run: Any) -> None:
        """Compute ``args.out`` in numpy."""
        pieces = args.data.view(np.int32).reshape(-1, args.piece // 4)
        args.out[: len(pieces)] = pieces.sum(-1, dtype=np.int64).astype(np.int32)


def measure_peaks(
    isa: Isa, n_threads: int, seconds: float = 0.2, *, progress: Progress | None = None
) -> Peaks:
    """Measure each peak for about ``seconds`` on ``n_threads`` threads, and return them: arithmetic
    in registers by kind of activations, and reading a buffer of ``buffer_bytes()``.
    """
    acts = [act for act in DOTS_PER_VALUE if has_dots(act, isa)]
    dots = {act: dots_of(act, isa) for act in acts}
    kernels = load_kernels(
        [*dots.values(), *(StreamReadKernel(*shape) for shape in (*STREAMS, *LONG))], isa
    )
    team = Team(n_threads, isa, LINE)
    rates: dict[str, float] = {}

    def tell(done: int) -> None:
        if progress:
            progress("measure", done, len(acts) + 1)

    try:
        began = time.perf_counter()
        began_cpu = time.process_time()
        for done, act in enumerate(acts):
            tell(done)
            rates[act] = _rate_of_dots(team, kernels[dots[act].name], dots[act], isa, seconds)
        asked = (time.perf_counter() - began) * n_threads
        cpu_share = min(1.0, (time.process_time() - began_cpu) / asked)
        tell(len(acts))
        n_bytes = buffer_bytes()
        data = HostMemory(n_bytes)
        data.bytes[:] = 1  # unwritten pages all map to one page of zeros, which is cached
        shape_s = seconds / len(STREAMS)
        bytes_s = max(stream_rate(team, kernels, s, data.bytes, PIECE, shape_s) for s in STREAMS)
        whole = max(PAGE, n_bytes // n_threads // PAGE * PAGE)
        long_s = max(stream_rate(team, kernels, s, data.bytes, whole, shape_s) for s in LONG)
    finally:
        team.close()
    tell(len(acts) + 1)
    return Peaks(
        rates["q8"],
        rates.get("bf16"),
        rates["f32"],
        bytes_s,
        cpu_share,
        n_bytes,
        n_bytes >= BEYOND * topology.cache_bytes(),
        long_s,
        rates.get("q16"),
    )


def has_dots(act: str, isa: Isa) -> bool:
    """Return whether ``isa`` has dot products of activations of kind ``act``: "q8", "q16", "bf16"
    or "f32".
    """
    if act == "q16":
        return bool(isa.tiles.words[0])
    return act != "bf16" or bool(isa.dot_bf16 or isa.matrix)


def dots_of(act: str, isa: Isa) -> DotPeakKernel | MatrixDots:
    """Return the kernel that measures the peak rate of dot products of kind ``act``."""
    return MatrixDots() if act == "bf16" and isa.matrix else DotPeakKernel(act, *isa.tiles.peak)


def operands(act: str, n: int, lanes: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``n`` random vectors of ``lanes`` times 32 bits for products of kind ``act``; zeros
    would draw less power.
    """
    if act == "q8":
        return rng.integers(0, WEIGHT_MAX + 1, (n, 4 * lanes), np.uint8)
    if act == "q16":
        return rng.integers(-WORD_TOP, WORD_TOP + 1, (n, 2 * lanes), np.int16)
    values = rng.uniform(-1, 1, (n, lanes * DOTS_PER_VALUE[act])).astype(np.float32)
    return values if act == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def _rate_of_dots(
    team: Team, kernel: int, spec: DotPeakKernel | MatrixDots, isa: Isa, seconds: float
) -> float:
    """Return the operations a second of the compiled ``kernel`` (address) of ``spec``, measured for
    about ``seconds``; a multiplication and an addition are two.
    """
    rng = np.random.default_rng(0)
    if isinstance(spec, MatrixDots):
        w, x = (operands("bf16", 2 * 16, 16, rng) for _ in range(2))
        n_values = 4 * 16 * 16
        products = 4 * 16 * 16 * 32
    else:
        w, x = (operands(spec.act, n, isa.lanes, rng) for n in (spec.mr, spec.nr))
        n_values = spec.mr * spec.nr
        products = n_values * isa.lanes * DOTS_PER_VALUE[spec.act]
    n_items = 64 * team.n_threads
    out = np.zeros((n_items, n_values), np.int32)
    args = spec.args.in_order({"w": w, "x": x, "out": out, "rounds": ROUNDS})
    best = _least_time(team, kernel, args, n_items, seconds)
    return 2 * n_items * ROUNDS * products / best


def stream_rate(
    team: Team,
    kernels: dict[str, int],
    shape: tuple[int, int],
    data: np.ndarray,
    piece: int,
    seconds: float,
) -> float:
    """Return the bytes a second at which StreamReadKernel of ``shape`` (streams, ahead) reads
    ``data``, uint8, in items of ``piece`` bytes. ``kernels``: addresses of compiled kernels by
    name.
    """
    n_items = len(data) // piece
    named = {"data": data, "out": np.zeros(n_items, np.int32), "piece": piece}
    args = StreamReadKernel.args.in_order(named)
    return (
        n_items
        * piece
        / _least_time(team, kernels[StreamReadKernel(*shape).name], args, n_items, seconds)
    )


def wanted_bytes(cpus: Path = topology.CPUS) -> int:
    """Return the bytes of a buffer for measuring memory: four times the largest cache, within the
    bounds BUFFER_BYTES.
    """
    least, most = BUFFER_BYTES
    return min(most, max(least, 4 * topology.cache_bytes(cpus)))


def buffer_bytes(
    cpus: Path = topology.CPUS, cgroup: Path = topology.CGROUP, proc: Path = topology.PROC
) -> int:
    """Return the bytes of a buffer for measuring memory, in whole PIECEs, at least one:
    ``wanted_bytes``, or, if that is less, a third (1 / SHARE) of the memory that this process may
    still use.
    """
    wanted = wanted_bytes(cpus)
    usable = usable_memory(cgroup, proc)
    allowed = usable.free_bytes // SHARE if usable else wanted
    return max(PIECE, min(wanted, allowed) // PIECE * PIECE)


def _least_time(
    team: Team, kernel: int, args: Sequence[np.ndarray | int], n_items: int, seconds: float
) -> float:
    """Return the seconds of the quickest of at least two runs of ``n_items`` items, after a
    warm-up; runs are repeated for ``seconds``. ``kernel``: address of the compiled kernel.
    """
    words = [a if isinstance(a, int) else int(a.ctypes.data) for a in args]
    packed = np.array(words, np.int64)
    run = np.zeros(1, RUN_STATE)
    step = np.zeros(1, STEP)
    step[0] = (kernel, packed.ctypes.data, n_items, 0, 1, 1)
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        began = time.perf_counter()
        team.run(int(step.ctypes.data), 1, int(run.ctypes.data))
        times.append(time.perf_counter() - began)
    return min(times[1:])
