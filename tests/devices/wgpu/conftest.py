"""The wgpu device that these tests share: on a machine without a GPU, Mesa's lavapipe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from treadle.devices.wgpu.device import Wgpu
from treadle.errors import DeviceError


class Shared(Wgpu):
    """One for all engines: no shader is compiled twice."""

    def close(self) -> None:
        """Not when an engine is closed."""


@pytest.fixture(scope="session")
def device() -> Iterator[Shared]:
    try:
        made = Shared()
    except DeviceError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"under CI: {error}")
        pytest.skip(str(error))
    yield made
    Wgpu.close(made)
