"""Fixtures of the tests of ``treadle check``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WriteTiny
from treadle.jit import kernel


@pytest.fixture
def path(tiny: WriteTiny) -> Path:
    return tiny("llama", "F32")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel cache for one test: a faulty kernel must not be found by another one."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("TREADLE_PLANS", "0")
    monkeypatch.delenv("TREADLE_NO_COMPILE", raising=False)
    monkeypatch.setattr(kernel, "_linked", {})
