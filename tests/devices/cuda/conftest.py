"""The kernel cache of a test run, and memory that an emulated GPU's kernels use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices.cuda.machine import Blocks
from tests.kernels.conftest import kernel_cache as kernel_cache
from tests.kernels.conftest import memory as memory
from tests.kernels.conftest import rng as rng
from tests.kernels.harness import Memory


@pytest.fixture
def blocks() -> Iterator[Memory]:
    """Guarded buffers of kernels that the emulator runs."""
    made = Memory(Blocks())
    yield made
    made.check()
