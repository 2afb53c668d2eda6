"""Quantisers side by side, in turns: treadle's kernels, their numpy twins and, where
llama-cpp-python is installed, ggml's.

    python bench/quantize.py [--library LIBGGML_BASE] [--rounds 5] [--numpy] [FORMAT ...]

Prints a table for docs/formats.md: millions of weights a second of one thread's processor time, the
best of the rounds, without and with importances, and the squared error as a share of ggml's.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from treadle.devices.cpu.weight_quantizer import quantize_rows
from treadle.formats import Format, by_name

FORMATS = ("Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_XS", "IQ3_S")
SHAPE = 128, 2048

Quantize = Callable[[Format, np.ndarray, "np.ndarray | None"], np.ndarray]


def ggml(path: Path) -> Quantize:
    """``ggml_quantize_chunk`` of a libggml-base; importances are of columns."""
    library = ctypes.CDLL(str(path))
    function = library.ggml_quantize_chunk
    p = ctypes.c_void_p
    n = ctypes.c_int64
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, p, p, n, n, n, p]

    def quantize(fmt: Format, x: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        out = np.empty((len(x), fmt.row_bytes(x.shape[1])), np.uint8)
        at = None if weights is None else np.ascontiguousarray(weights[0]).ctypes.data
        function(fmt.ggml_id, x.ctypes.data, out.ctypes.data, 0, *x.shape, at)
        return out

    return quantize


def installed() -> Path | None:
    """llama-cpp-python's."""
    spec = importlib.util.find_spec("llama_cpp")
    path = Path(spec.origin).parent / "lib" / "libggml-base.so" if spec and spec.origin else None
    return path if path and path.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--library", type=Path, default=installed())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--numpy", action="store_true", help="time the twins too")
    given = parser.parse_args()
    engines: dict[str, Quantize] = {"treadle": quantize_rows}
    if given.numpy:
        engines["numpy"] = lambda fmt, x, weights: fmt.quantize_rows(x, weights)
    if given.library:
        engines["ggml"] = ggml(given.library)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(SHAPE) * 0.02).astype(np.float32)
    columns = np.broadcast_to(rng.gamma(1, size=SHAPE[1]).astype(np.float32), SHAPE)
    print("| format | importances | " + " | ".join(engines) + " | times ggml | error |")
    print("|---|---|" + "---:|" * (len(engines) + 2))
    for name in given.formats:
        for weights in (None, columns):
            rates, errors = measure(by_name(name), x, weights, engines, given.rounds)
            cells = [f"{rate:.1f}" for rate in rates.values()]
            if "ggml" in engines:
                cells.append(f"{rates['treadle'] / rates['ggml']:.1f}")
                cells.append(f"{errors['treadle'] / errors['ggml']:.3f}")
            kind = "no" if weights is None else "yes"
            print(f"| {name} | {kind} | {' | '.join(cells)} |", flush=True)


def measure(
    fmt: Format,
    x: np.ndarray,
    weights: np.ndarray | None,
    engines: dict[str, Quantize],
    rounds: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Millions of weights a second and squared errors, by engine."""
    best = dict.fromkeys(engines, 0.0)
    errors = {}
    for turn in range(rounds + 1):  # the first compiles
        for name, quantize in engines.items():
            began = time.thread_time()
            made = quantize(fmt, x, weights)
            if turn:
                best[name] = max(best[name], x.size / (time.thread_time() - began) / 1e6)
                continue
            off = (fmt.dequantize_rows(made) - x).astype(np.float64) ** 2
            errors[name] = float((off if weights is None else off * weights).sum())
    return best, errors


if __name__ == "__main__":
    main()
