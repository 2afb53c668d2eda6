"""Quantisation with compiled kernels where a format's search has one, else with numpy.

It starts no threads: the callers that convert files have their own, and a kernel releases the GIL.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.devices.cpu.thread_team import HostMemory
from treadle.isa import choose
from treadle.jit.kernel import load_kernels
from treadle.kernels.quantize.k_search import SearchKernel
from treadle.kernels.quantize.select import search_kernel
from treadle.kernels.run_state import RUN_STATE, round_up

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.formats.format import F32Array

KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


def quantize_rows(
    fmt: Format, x: F32Array, weights: F32Array | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Quantise float32 [..., k] like ``fmt.quantize_rows``, with a compiled search kernel if there
    is one for the format. Raises CompileError and CacheError.
    """
    aware = weights is not None
    spec = search_kernel(fmt, aware)
    return fmt.quantize_rows(x, weights, Searcher(spec) if spec else None)


class Searcher:
    """A compiled scale search, to be passed as ``search`` to ``Format.quantize_rows``."""

    def __init__(self, spec: SearchKernel) -> None:
        from treadle.jit.host import host_features

        self.spec, self.isa = spec, choose(host_features())
        self.kernel = _linked(spec, self.isa)

    def __call__(self, x: F32Array, weights: F32Array | None) -> Any:
        """Search the super-blocks of float32 ``[n, block]``; ``weights``: importances of the same
        shape, or None. Returns scales and codes, not yet packed, as the numpy search of the format
        does.
        """
        spec = self.spec
        lanes = self.isa.lanes
        n = len(x)
        padded = round_up(n, lanes)
        x = np.ascontiguousarray(x, np.float32)
        found: dict[str, np.ndarray] = {
            **{name: np.empty(padded, np.float32) for name in spec.scales},
            **{
                name: np.empty((padded // lanes, spec.n_sub, lanes), np.uint8)
                for name in spec.integers
            },
            "codes": np.empty((padded, spec.block), np.uint8),
        }
        given = {name: array.ctypes.data for name, array in found.items()}
        given |= {"x": x.ctypes.data, "n": n}
        if weights is not None:
            weights = np.ascontiguousarray(weights, np.float32)
            given["importance"] = weights.ctypes.data
        args = np.array([arg or 0 for arg in spec.args.in_order(given)], np.int64)
        run = np.zeros(1, RUN_STATE)
        scratch = HostMemory(spec.scratch(lanes)).bytes
        self.kernel(args.ctypes.data, run.ctypes.data, 0, padded // lanes, scratch.ctypes.data)
        return spec.numbers(found, n)


@lru_cache
def _linked(spec: SearchKernel, isa: Any) -> Any:
    return KERNEL(load_kernels([spec], isa)[spec.name])
