"""How fast decoding goes when it does not wait for memory: one token against a matrix that lies in
the second-level cache, one thread, every format.

    python bench/gemv.py [FORMAT ...] [--seconds 0.3] [--rows 4] [--check]

Prints GB/s of weights and nanoseconds for 256 weights, of the fastest of many short runs, and the
instructions of the inner loop for as many. Memory gives a core about 20 GB/s, but waiting and
computing do not overlap fully: a format should stand well above that.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from treadle.formats import FORMATS, by_name
from treadle.formats.format import Format
from treadle.isa import choose
from treadle.isa.isa import Isa
from treadle.jit.compile import emit_assembly
from treadle.jit.host import host_features
from treadle.jit.kernel import load_kernels, trace
from treadle.kernels.matmul.gemv import ITEM_ROWS, Gemv
from treadle.kernels.matmul.select import gemv
from treadle.kernels.run_state import RUN_STATE

K = 2048
L2 = 1 << 18  # bytes: half of the cache, or less
DOTS = "vpdpbusd|vpmaddubsw"
KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


def aligned(n: int) -> np.ndarray:
    """``n`` bytes from a page's beginning."""
    whole = np.zeros(n + 4096, np.uint8)
    return whole[-whole.ctypes.data % 4096 :][:n]


class Problem:
    """One product, ready to be called."""

    def __init__(self, fmt: Format, spec: Gemv, isa: Isa) -> None:
        rng = np.random.default_rng(0)
        size = fmt.row_bytes(K)
        self.m = L2 // size // ITEM_ROWS * ITEM_ROWS
        few = fmt.quantize_rows(rng.standard_normal((ITEM_ROWS, K), np.float32) * 0.1)
        self.weights = aligned(self.m * size)
        self.weights.reshape(-1, few.size)[:] = few.reshape(-1)
        layout = spec.layout()
        x = aligned(layout.n_bytes(1))
        layout.write_ref(x, rng.standard_normal((1, K), np.float32))
        self.y = aligned(4 * self.m + 256).view(np.float32)
        run = np.zeros(1, RUN_STATE)
        run["n_tokens"] = 1
        scratch = aligned(spec.scratch(isa.lanes) + 64)
        named = {"x": x.ctypes.data, "y": self.y.ctypes.data, "stride": self.m, "tokens": 1}
        named |= {"w": [self.weights.ctypes.data], "rows": [self.m], "column": [0]}
        args = np.array([arg or 0 for arg in spec.args.in_order(named)], np.int64)
        kernel = KERNEL(load_kernels([spec], isa)[spec.name])
        self.want = fmt.dequantize_rows(few).astype(np.float64) @ layout.read_ref(x, 1)[0]
        self.kept = (x, run, scratch, args)
        given = (args.ctypes.data, run.ctypes.data, 0, self.m // ITEM_ROWS, scratch.ctypes.data)
        self.call: Callable[[], None] = partial(kernel, *given)

    def error(self) -> float:
        """The largest difference from numpy, over the largest result."""
        want = np.tile(self.want, self.m // ITEM_ROWS)
        return float(np.abs(self.y[: self.m] - want).max() / np.abs(want).max())

    def fastest(self, seconds: float) -> float:
        """Seconds of the fastest run."""
        self.call()
        best = 1.0
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            self.call()
            best = min(best, time.perf_counter() - now)
        return best


def inner_loop(spec: Gemv, isa: Isa) -> list[str]:
    """The instructions of the loop that holds most of the dots: those of ``mr`` rows."""
    lines = emit_assembly(trace(spec, isa), isa).splitlines()
    blocks: list[list[str]] = [[]]
    for line in map(str, lines):
        if re.match(r"\.?L?\w+:", line):
            blocks.append([])
        elif re.match(r"\s+[a-z]", line):
            blocks[-1].append(line.split("#")[0].strip())
    return max(blocks, key=lambda b: sum(bool(re.search(DOTS + "|fmadd", line)) for line in b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rows", type=int, help="that are walked together")
    parser.add_argument("--check", action="store_true", help="compare with numpy")
    given = parser.parse_args()
    isa = choose(host_features())
    formats = [by_name(f) for f in given.formats] or [f for f in FORMATS.values() if f.codes]
    print(f"{isa.name}: format, GB/s, ns for 256 weights, instructions for them")
    for fmt in formats:
        spec = gemv(fmt, isa, K, 1)
        spec = replace(spec, mr=given.rows or spec.mr)
        problem = Problem(fmt, spec, isa)
        best = problem.fastest(given.seconds)
        loop = inner_loop(spec, isa)
        weights = 256 if fmt.block < 256 else fmt.block
        dots = sum(bool(re.search(DOTS, line)) for line in loop) or 1
        n = len(loop) * (256 * 8 // isa.vector_bits) / dots if dots > 1 else 0
        moved = sum("rsp" in line for line in loop)
        print(
            f"{fmt.name:8} {problem.weights.size / best / 1e9:6.1f} "
            f"{best * 1e9 / (problem.m * K / weights):6.2f} {n:6.1f}"
            + (f"  ({moved} by way of the stack)" if moved else "")
            + (f"  error {problem.error():.1e}" if given.check else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
