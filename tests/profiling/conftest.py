"""The fixtures of the kernels' tests serve here too."""

from tests.kernels.conftest import kernel_cache, memory, rng

__all__ = ["kernel_cache", "memory", "rng"]
