"""Matrix products of a prompt beside other libraries': treadle, PyTorch (oneDNN, MKL), numpy
(OpenBLAS), llama.cpp (where llama-cpp-python is installed), in turns on the same shapes.

    python bench/gemm.py [--threads 2] [--tokens 512] [--rounds 5] [--seconds 240] [FORMAT ...]

Prints a table for docs/performance.md: GOP/s (a multiplication and an addition are two), the median
of the rounds, and its share of what this machine's peak was in the same minutes. Progress goes to
standard error. Before anything is timed every result is compared with float64.

llama.cpp quantises its activations within the product; in treadle the step before writes them in
the product's layout, so here it is not timed. Libraries' threads poll for a while after their
work, so each sample waits before it starts.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from treadle.formats import Format
    from treadle.kernels.matmul.matmul import Matmul

SHAPES = ((2048, 2048), (2048, 5632), (5632, 2048))  # K and M: TinyLlama's
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
REST_S = 0.15  # before a sample: the other libraries' threads must have gone to sleep
WORKS = 40  # calls of one product in llama.cpp, at most
SLOWEST_S = 3.0  # of one product: what takes longer is left out, and told
# llamafile's own words and figures; its kernels are those of llama.cpp's sgemm today.
PUBLISHED = (
    "llamafile (J. Tunney, justine.lol/matmul, March 2024): twice MKL's speed for matrices that "
    "fit into L2; prompts in F16 and Q8_0 30 % to 500 % faster than llama.cpp of that month.",
    "llamafile 0.7 on a Raspberry Pi 5, TinyLlama Q8_0: 45 tokens a second, 16 % of the peak of "
    "its dots of bytes.",
)


class Problem:
    """One product: ``rows`` of weights, uint8 ``[m, bytes of a row]``, and tokens ``x``, f32
    ``[n, k]``, as treadle's own trial has made them.
    """

    def __init__(self, fmt: Format, shape: tuple[int, int], n_tokens: int, n_threads: int) -> None:
        from treadle.profiling.report import row_in_use
        from treadle.profiling.trial import KernelTrial

        k, m = shape
        self.fmt = fmt
        self.n_threads = n_threads
        self.trial = KernelTrial(fmt, row_in_use(), k, m, n_tokens, n_threads)
        self.rows = self.trial.weights.reshape(m, -1)
        self.x = self.trial.x

    def weights(self) -> np.ndarray:
        """f32 ``[m, k]``."""
        return self.fmt.dequantize_rows(self.rows)

    def no_result(self) -> np.ndarray:
        """Memory for a result, f32 ``[n, m]``."""
        import numpy as np

        return np.empty((len(self.x), len(self.rows)), np.float32)


# Takes a sample, in seconds; gives the last result, f32 ``[n, m]``.
Prepared = tuple[Callable[[], float], Callable[[], "np.ndarray"]]


class Engine(Protocol):
    """A library. ``prepare`` gives a product that can be run again and again; None where it has no
    such format.
    """

    name: str

    def prepare(self, given: Problem) -> Prepared | None: ...


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Its seconds."""

    def sample() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return sample


class Treadle:
    """The kernel that a model's plan takes for so many tokens."""

    name = "treadle"

    def prepare(self, given: Problem) -> Prepared | None:
        trial, n = given.trial, len(given.x)
        spec = product(given)
        if (why := trial.compile(spec)) is not None:
            raise SystemExit(why)
        return (
            lambda: trial.seconds(spec, n, cold=False, runs=1),
            lambda: trial.y[:n, : len(given.rows)],
        )


def product(given: Problem) -> Matmul:
    """Treadle's kernel."""
    from treadle.kernels.matmul.select import matmul

    return matmul(given.fmt, given.trial.isa, given.trial.k, tokens=len(given.x))


class Torch:
    """PyTorch's CPU build: MKL in F32, oneDNN in the others."""

    name = "PyTorch"

    def __init__(self, n_threads: int) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(n_threads)
        self.types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

    def prepare(self, given: Problem) -> Prepared | None:
        ty = self.types.get(given.fmt.name)
        if ty is None:
            return None
        w = self.torch.from_numpy(given.weights()).to(ty)
        tokens = self.torch.from_numpy(given.x).to(ty)
        out = self.torch.from_numpy(given.no_result()).to(ty)
        return (
            timed(lambda: self.torch.mm(tokens, w.T, out=out)),
            lambda: out.to(self.torch.float32).numpy(),
        )


class Numpy:
    """numpy's matmul: OpenBLAS, F32 alone."""

    name = "numpy"

    def prepare(self, given: Problem) -> Prepared | None:
        import numpy as np

        if given.fmt.name != "F32":
            return None
        x, w, out = given.x, given.weights(), given.no_result()
        return timed(lambda: np.matmul(x, w.T, out=out)), lambda: out


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class LlamaCpp:
    """ggml_mul_mat of the library inside llama-cpp-python."""

    name = "llama.cpp"

    def __init__(self, n_threads: int) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ImportError("llama-cpp-python is not installed")
        folder = Path(spec.origin).parent / "lib"
        self.n_threads = n_threads
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        p = ctypes.c_void_p
        i = ctypes.c_int
        for library, name, gives, takes in (
            (self.base, "ggml_init", p, [InitParams]),
            (self.base, "ggml_new_tensor_2d", p, [p, i, ctypes.c_int64, ctypes.c_int64]),
            (self.base, "ggml_get_data", p, [p]),
            (self.base, "ggml_mul_mat", p, [p, p, p]),
            (self.base, "ggml_new_graph", p, [p]),
            (self.base, "ggml_build_forward_expand", None, [p, p]),
            (self.base, "ggml_free", None, [p]),
            (self.cpu, "ggml_cpu_init", None, []),
            (self.cpu, "ggml_graph_compute_with_ctx", i, [p, p, i]),
        ):
            function = getattr(library, name)
            function.restype = gives
            function.argtypes = takes
        self.cpu.ggml_cpu_init()

    def prepare(self, given: Problem) -> Prepared | None:
        import numpy as np

        rows = given.rows
        x = given.x
        (n, k), m = x.shape, len(rows)
        # Each call takes the memory of its work, the quantised tokens, from the context's.
        room = rows.nbytes + WORKS * x.nbytes + 4 * n * m + (16 << 20)
        ggml = self.base
        at = self.base.ggml_init(InitParams(room, None, False))
        w = ggml.ggml_new_tensor_2d(at, given.fmt.ggml_id, k, m)
        tokens = ggml.ggml_new_tensor_2d(at, 0, k, n)
        for tensor, array in ((w, rows), (tokens, x)):
            ctypes.memmove(ggml.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        out = ggml.ggml_mul_mat(at, w, tokens)
        graph = ggml.ggml_new_graph(at)
        ggml.ggml_build_forward_expand(graph, out)
        values = (ctypes.c_float * (n * m)).from_address(ggml.ggml_get_data(out))

        def run() -> None:
            if self.cpu.ggml_graph_compute_with_ctx(at, graph, self.n_threads):
                raise SystemExit("ggml_graph_compute failed")

        return timed(run), lambda: np.frombuffer(values, np.float32).reshape(n, m)


def engines(n_threads: int) -> list[Engine]:
    """Those that are installed; the others are told."""
    made: list[Engine] = []
    for kind in (Treadle, Torch, Numpy, LlamaCpp):
        try:
            made.append(kind(n_threads) if kind in (Torch, LlamaCpp) else kind())
        except ImportError as error:
            print(f"{kind.name}: {error}", file=sys.stderr)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="for rounds, at most")
    given = parser.parse_args()
    # OpenBLAS reads it when numpy is imported, so nothing here may import that any earlier.
    os.environ["OPENBLAS_NUM_THREADS"] = str(given.threads)
    Bench(given).print()


class Bench:
    """All that is to be measured, in turns."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.engines = engines(given.threads)
        # By format, shape and engine: what makes a sample, and the samples so far.
        self.samples: dict[tuple[str, tuple[int, int], str], Callable[[], float]] = {}
        self.seconds: dict[tuple[str, tuple[int, int], str], list[float]] = {}
        self.acts: dict[str, str] = {}
        self.peaks: list[dict[str, float]] = []
        for name in given.formats:
            for shape in SHAPES:
                self.prepare(name, shape)
        began = time.perf_counter()
        for done in range(given.rounds):
            if done and time.perf_counter() - began > given.seconds * done / (done + 1):
                print(f"stopped after {done} rounds: time is up", file=sys.stderr)
                break
            self.turn()
            print(f"round {done + 1} of {given.rounds}", file=sys.stderr)

    def prepare(self, name: str, shape: tuple[int, int]) -> None:
        """Make the data of one product, and run it once in each engine: right, and quick enough?"""
        import numpy as np

        from treadle.formats import by_name

        given = Problem(by_name(name), shape, self.given.tokens, self.given.threads)
        some = slice(0, shape[1], 97)
        want = given.x.astype(np.float64) @ given.weights()[some].astype(np.float64).T
        self.acts[name] = product(given).act
        for engine in self.engines:
            made = engine.prepare(given)
            if made is None:
                continue
            sample, result = made
            first = sample()
            error = float(np.linalg.norm(result()[:, some] - want) / np.linalg.norm(want))
            if not error < 0.02:
                raise SystemExit(f"{engine.name} {name}: relative error {error:.3g}")
            if first > SLOWEST_S and sample() > SLOWEST_S:
                print(f"{engine.name} {name} {shape}: {first:.1f} s, left out", file=sys.stderr)
                continue
            self.samples[name, shape, engine.name] = sample

    def turn(self) -> None:
        """One sample of each, and the machine's peaks."""
        from treadle.profiling.peaks import measure_peaks
        from treadle.profiling.report import row_in_use

        for key, sample in self.samples.items():
            time.sleep(REST_S)
            self.seconds.setdefault(key, []).append(sample())
        time.sleep(REST_S)
        peaks = measure_peaks(row_in_use(), self.given.threads)
        self.peaks.append(peaks.as_dict())
        print(f"processor time got for the peaks: {peaks.cpu_share:.0%}", file=sys.stderr)

    def print(self) -> None:
        """The table."""
        from treadle.kernels.activation_layout import N_PRODUCTS
        from treadle.machine.topology import cpu_name
        from treadle.profiling.report import row_in_use

        names = [engine.name for engine in self.engines]
        best = {
            act: max(peaks[act.partition("x")[0]] for peaks in self.peaks) / N_PRODUCTS.get(act, 1)
            for act in set(self.acts.values())
        }
        told = ", ".join(f"{act} {value / 1e9:.0f}" for act, value in sorted(best.items()))
        print(
            f"{cpu_name()}, {row_in_use().name}, {self.given.threads} threads, "
            f"{self.given.tokens} tokens, {len(self.peaks)} rounds in turns, "
            f"{time.strftime('%d %B %Y')}. Peaks, GOP/s: {told}.\n"
        )
        print(f"| format | K x M | peak | {' | '.join(names)} |")
        print("|---" * (3 + len(names)) + "|")
        for name in self.given.formats:
            act = self.acts[name]
            for k, m in SHAPES:
                cells = [self.cell((name, (k, m), each), best[act]) for each in names]
                print(f"| {name} | {k} x {m} | {act} | {' | '.join(cells)} |")
        print("\n" + "\n".join(f"- {line}" for line in PUBLISHED))

    def cell(self, key: tuple[str, tuple[int, int], str], peak: float) -> str:
        """GOP/s and the share of the peak; nothing where it was not run."""
        if key not in self.seconds:
            return ""
        k, m = key[1]
        rate = 2 * k * m * self.given.tokens / statistics.median(self.seconds[key])
        return f"{rate / 1e9:.0f} ({rate / peak:.0%})"


if __name__ == "__main__":
    main()
