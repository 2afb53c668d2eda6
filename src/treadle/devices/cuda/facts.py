"""Properties of the GPU for ``treadle doctor``, and its peak copy rate for comparing speeds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from treadle.errors import DeviceError

if TYPE_CHECKING:
    from treadle.devices.cuda.driver import Driver

COPIED = 256 << 20  # bytes at once, at most: far more than a GPU's caches
COPIES = 10


def copy_rate(driver: Driver) -> float:
    """Measure the rate of copies within the GPU's memory: bytes read plus bytes written, per
    second.

    The bytes are random, as some GPUs copy zeros faster. Raises NoMemoryError.
    """
    n_bytes = min(COPIED, driver.memory_info()[0] // 4)
    frm = driver.alloc(2 * n_bytes)
    try:
        driver.write(frm, _random_bytes(n_bytes))
        driver.copy(frm + n_bytes, frm, n_bytes)
        driver.wait()
        began = time.perf_counter()
        for _ in range(COPIES):
            driver.copy(frm + n_bytes, frm, n_bytes)
        driver.wait()
        return 2 * COPIES * n_bytes / (time.perf_counter() - began)
    finally:
        driver.free(frm)


def _random_bytes(n_bytes: int) -> Any:
    import numpy as np

    few = np.random.default_rng(1).integers(0, 256, min(n_bytes, 1 << 20), np.uint8)
    return np.resize(few, n_bytes)


def device_properties() -> dict[str, Any]:
    """Return the properties of the first GPU, by name, for ``treadle doctor``; {"cuda": reason} if
    there is none.
    """
    try:
        from treadle.devices.cuda.libcuda import CudaDriver

        driver = CudaDriver()
    except DeviceError as error:
        return {"cuda": str(error)}
    try:
        facts = driver.facts
        (free, total) = driver.memory_info()
        return {
            "cuda": facts.name,
            "driver": "CUDA " + ".".join(map(str, facts.version)),
            "compute_capability": ".".join(map(str, facts.capability)),
            "multiprocessors": facts.n_units,
            "memory_bytes": total,
            "free_bytes": free,
            "kernels_for": driver.isa.name,
            "copy_bytes_s": copy_rate(driver),
        }
    except DeviceError as error:
        return {"cuda": driver.facts.name, "problem": str(error)}
    finally:
        driver.close()
