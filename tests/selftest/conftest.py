"""Fixtures of the tests of ``treadle check``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WriteTiny


@pytest.fixture
def path(tiny: WriteTiny) -> Path:
    return tiny("llama", "F32")


@pytest.fixture
def own_cache(own_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel cache for one test: a faulty kernel must not be found by another one."""
    monkeypatch.setenv("TREADLE_PLANS", "0")
