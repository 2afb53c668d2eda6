"""Emulated cards in place of this machine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.devices.cuda.emulated import EmulatedDriver
from treadle.devices.cuda import libcuda


@contextmanager
def cards() -> Iterator[list[EmulatedDriver]]:
    """``treadle.load(device="cuda")`` finds an emulated card; these were opened, and all must be
    closed at the end.
    """
    made: list[EmulatedDriver] = []

    def opened(ordinal: int = 0) -> EmulatedDriver:
        made.append(EmulatedDriver(seed=ordinal + len(made)))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libcuda, "CudaDriver", opened)
        yield made
    assert all(driver.closed for driver in made)
