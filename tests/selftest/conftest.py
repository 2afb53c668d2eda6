"""A cache of its own for each test: a faulty kernel must not be found by another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.jit import kernel


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setenv("TREADLE_PLANS", "0")
    monkeypatch.delenv("TREADLE_NO_COMPILE", raising=False)
    monkeypatch.setattr(kernel, "_linked", {})
