"""Trial of one matrix product: every variant of its kernel is checked, then timed, on the same
data.

Hot: the same weights repeatedly, as far as caches hold them. Cold: each run reads the next of many
copies, together larger than the caches, like the layers of a model. Activations and outputs are
reused between runs, as in a model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.devices.cpu.step_loop import STEP
from treadle.devices.cpu.thread_team import HostMemory, Team
from treadle.errors import CacheError, CompileError
from treadle.jit.language import Isa
from treadle.kernels.activation_layout import BLOCK, N_PRODUCTS, ActivationLayout
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.select import tokens_per_item
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.spec import RUN_STATE, Grid, round_up, run_offset
from treadle.machine.topology import cache_bytes
from treadle.profiling.peaks import BEYOND, buffer_bytes

if TYPE_CHECKING:
    from treadle.formats import Format

LEAST_OPS = 1 << 30  # of a timed run: takes far longer than the microseconds to start it
MOST_STEPS = 4096  # of a timed run, however small the product is
ROUNDING = 2.0**-24  # of f32
# Tolerance for weights rounded to bf16 from an f32 that may differ from the twin's in the last bit:
# one in some ten thousand rounds to the neighbour; three of one row may.
NEXT_BF16 = 3 * 2.0**-8
LEFT_OUT = {"bf16x2": 2.0**-18, "bf16x3": 2.0**-24}  # error of split bf16: see N_PRODUCTS
FULL_GROUPS = 64  # rows of y past the last token: a tile writes whole groups


class KernelTrial:
    """Random weights ``[m, k]`` of the format ``fmt`` and random activations of up to ``n`` tokens,
    with a team of ``n_threads`` threads.

    Kernels are compiled for the trial only and freed with it: the cache has no use for a sweep's
    losers. ``clock`` returns seconds. Raises UnsupportedError if ``fmt`` has no rows of ``k``.
    """

    def __init__(
        self,
        fmt: Format,
        isa: Isa,
        k: int,
        m: int,
        n: int,
        n_threads: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from treadle.jit.compile import Linker

        rng = np.random.default_rng(0)
        self.fmt = fmt
        self.isa = isa
        self.k = k
        self.m = m
        self.n_threads = n_threads
        rows = fmt.quantize_rows(rng.standard_normal((m, k), np.float32))
        self._arrays = fmt.split(rows)  # of the tensor; contiguous in a copy
        self.weights = np.concatenate([array.reshape(-1) for array in self._arrays])
        self.x = rng.standard_normal((n, k), np.float32)
        self.stride = round_up(m, COLUMNS)
        self.y = HostMemory((n + FULL_GROUPS) * self.stride * 4).bytes.view(np.float32)
        self.y = self.y.reshape(-1, self.stride)
        self._at = 0  # the next copy to read
        self._cold_bytes = buffer_bytes()  # computed once, before copies take memory
        self._copy_bytes = round_up(len(self.weights), 64)
        self._copies = HostMemory(
            self._copy_bytes
        )  # the first copy; more when cold caches are requested
        self._copies.bytes[: len(self.weights)] = self.weights
        self._inputs: dict[tuple[ActivationLayout, int], np.ndarray] = {}
        self._twins: dict[tuple[ActivationLayout, int], tuple[np.ndarray, np.ndarray]] = {}
        self._addresses: dict[str, int] = {}
        self._linker = Linker()
        self._team: Team | None = None
        self._clock = clock
        self._asked_s = self._got_s = 0.0  # processor time while kernels ran

    @property
    def cpu_share(self) -> float:
        """The share of the requested processor time that the threads got.

        It is less while other programs run; minimum times are then unreliable.
        """
        return min(1.0, self._got_s / self._asked_s) if self._asked_s else 1.0

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return len(self.weights)

    def n_ops(self, n: int) -> int:
        """Return the operations of the product for ``n`` tokens; a multiplication and an addition
        are two.
        """
        return 2 * self.k * self.m * n

    def compile(self, spec: Matmul) -> str | None:
        """Compile the kernel of ``spec``; return LLVM's error, or None if it succeeds.

        Raises CacheError under ``TREADLE_NO_COMPILE=1``.
        """
        from treadle.jit.compile import emit_object
        from treadle.jit.kernel import symbol, trace

        if spec.name not in self._addresses:
            if os.environ.get("TREADLE_NO_COMPILE") == "1":
                raise CacheError("TREADLE_NO_COMPILE=1 forbids compiling, which tuning needs")
            try:
                code = emit_object(trace(spec, self.isa), self.isa)
            except CompileError as error:
                return str(error)
            self._addresses[spec.name] = self._linker.link(symbol(spec), code)
        return None

    def check(self, spec: Matmul, n: int) -> str | None:
        """Run the compiled kernel of ``spec`` for ``n`` tokens and compare the results with those
        of its numpy twin; return the error as text, or None if all are right.
        """
        want, tolerance = self._twin(spec, n)
        self.y[:] = np.nan
        self._run(spec, n, [0])
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(self.y[:n, : self.m] - want) <= tolerance)
        if not wrong.any():
            return None
        token, row = np.unravel_index(int(wrong.argmax()), wrong.shape)
        return (
            f"{int(wrong.sum())} of {wrong.size} results are wrong, the first at token {token}, "
            f"row {row}: {self.y[token, row]:.6g}, expected {want[token, row]:.6g}"
        )

    def seconds(self, spec: Matmul, n: int, cold: bool, runs: int) -> float:
        """Return the least seconds of a product of ``n`` tokens over ``runs`` runs, with ``cold``
        or hot caches.
        """
        n_copies = self._fill() if cold else 1
        per_run = max(1, min(LEAST_OPS // self.n_ops(n), self._cold_copies(), MOST_STEPS))
        if not cold:
            self._run(spec, n, [0])
        least = np.inf
        for _ in range(runs):
            if cold:
                order = [(self._at + i) % n_copies for i in range(per_run)]
                self._at = (self._at + per_run) % n_copies
            else:
                order = [0] * per_run
            least = min(least, self._run(spec, n, order) / per_run)
        return float(least)

    def close(self) -> None:
        """Stop the threads."""
        if self._team is not None:
            self._team.close()
            self._team = None

    # -- memory ---------------------------------------------------------------------------------

    @property
    def from_memory(self) -> bool:
        """Whether there is memory for copies of the weights beyond the caches; else cold times
        include reads from caches.
        """
        return self._cold_copies() * self._copy_bytes >= BEYOND * cache_bytes()

    def _cold_copies(self) -> int:
        return max(2, -(-self._cold_bytes // self._copy_bytes))

    def _fill(self) -> int:
        """Make more copies of the weights than any cache holds; return their number."""
        n = len(self._copies.bytes) // self._copy_bytes
        if n == 1:
            n = self._cold_copies()
            self._copies = HostMemory(n * self._copy_bytes)
            every = self._copies.bytes.reshape(n, self._copy_bytes)
            every[:, : len(self.weights)] = self.weights
        return n

    def _input(self, act: ActivationLayout, n: int) -> np.ndarray:
        if (act, n) not in self._inputs:
            made = HostMemory(act.n_bytes(n)).bytes
            act.write_ref(made, self.x[:n])
            self._inputs[act, n] = made
        return self._inputs[act, n]

    def _slots(self, spec: Matmul, n: int, copy: int, tokens: int) -> list[int]:
        """Return the words of a kernel's arguments for ``n`` tokens, ``tokens`` per item, with the
        copy number ``copy`` of the weights.
        """
        at = self._copies.address + copy * self._copy_bytes
        weights = []
        for array in self._arrays:
            weights.append(at)
            at += array.size
        x, y = (int(a.ctypes.data) for a in (self._input(spec.layout(), n), self.y))
        given: dict[str, Any] = {"x": x, "y": y, "stride": self.stride, "tokens": tokens}
        given |= {"w": [tuple(weights)], "rows": [self.m], "column": [0]}
        return [arg or 0 for arg in spec.args.in_order(given)]

    def _run(self, spec: Matmul, n: int, order: list[int]) -> float:
        """Multiply ``n`` tokens by the copies of the weights with the numbers ``order``, one after
        another; return the seconds of all together.
        """
        scratch = spec.scratch(self.isa.lanes)
        if self._team is None or self._team.scratch < scratch:
            self.close()
            self._team = Team(self.n_threads, self.isa, scratch)
        strips = -(-self.m // spec.rows_per_item(self.isa.lanes))
        tokens = tokens_per_item(spec, strips, n, self.n_threads)
        grid = Grid(strips, spec.count, tokens)
        first, second = np.array([self._slots(spec, n, copy, tokens) for copy in (0, 1)])
        args = first + np.outer(order, second - first)  # only the weights' addresses differ
        run = np.zeros(1, RUN_STATE)
        steps = np.zeros(len(order), STEP)
        run[spec.count] = n
        counted = int(run.ctypes.data) + run_offset(grid.count)
        steps[:] = (self._addresses[spec.name], 0, grid.base, counted, grid.per, 1)
        steps["args"] = int(args.ctypes.data) + args.strides[0] * np.arange(len(order))
        wall = time.perf_counter()
        cpu = time.process_time()
        began = self._clock()
        self._team.run(int(steps.ctypes.data), len(steps), int(run.ctypes.data))
        seconds = self._clock() - began
        self._asked_s += (time.perf_counter() - wall) * self.n_threads
        self._got_s += time.process_time() - cpu
        return seconds

    # -- expected results -----------------------------------------------------------------------

    def _twin(self, spec: Matmul, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numpy twin's results for ``n`` tokens, and their tolerances, both ``[n, m]``.

        They depend only on the kind of activations, so all tiles share them.
        """
        plain = replace(spec.layout(), group=1)
        if (plain, n) not in self._twins:
            y = np.full((n, self.stride), np.nan)
            x = self._input(spec.layout(), n)
            stride = self.stride
            w = [self._arrays]
            args = spec.args(x=x, y=y, stride=stride, w=w, rows=[self.m], column=[0])
            spec.run_ref(args, {spec.count: n})
            x = np.abs(spec.layout().read_ref(self._input(spec.layout(), n), n))
            rounding = (self._chain(spec) + 8) * ROUNDING
            if plain.kind in N_PRODUCTS:
                rounding = (N_PRODUCTS[plain.kind] * self.k + 8) * ROUNDING + LEFT_OUT[plain.kind]
            as_codes = self.fmt.codes is not None and plain.kind not in ("bf16", "q16")
            sizes = self._magnitudes(apart=as_codes)
            tolerance = (x.astype(np.float32) @ sizes.T) * rounding
            if self.fmt.codes is not None and plain.kind == "bf16":
                tolerance += NEXT_BF16 * np.outer(x.max(-1), sizes.max(-1))
            self._twins[plain, n] = y[:, : self.m].copy(), tolerance + 1e-30
        return self._twins[plain, n]

    def _chain(self, spec: Matmul) -> int:
        """Return how many additions in sequence a result may go through: of blocks where integers
        are summed, else of products.
        """
        codes = self.fmt.codes
        n_blocks = spec.layout().kb
        if spec.act == "q16":
            return n_blocks + 16  # 16 for the blocks of gemv's spans, and its lanes
        if codes is None or not n_blocks:
            return self.k
        return (2 if codes.has_m else 1) * n_blocks + 16  # 16 for gemv's lanes

    def _magnitudes(self, *, apart: bool) -> np.ndarray:
        """Return how much each weight can add to a result's rounding error, f32 ``[m, k]``.

        It is the weight's size. Where codes are summed (``apart``), add the sizes of code and
        offset, or of the minimum: less than three times the largest weight of the block, as a
        quantiser puts some code near its limit.
        """
        rows = self.fmt.join(self._arrays).reshape(self.m, -1)
        sizes = np.abs(self.fmt.dequantize_rows(rows)).astype(np.float32)
        if apart:
            group = self.fmt.block if self.fmt.parts else BLOCK  # weights that share a scale
            blocks = sizes.reshape(self.m, -1, group)
            sizes = (blocks + 3 * blocks.max(-1, keepdims=True)).reshape(self.m, -1)
        return sizes
