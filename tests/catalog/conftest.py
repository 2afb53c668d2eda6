"""A hub's cache, and treadle's own cache, that are empty."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the hub's cache; records of models are kept apart from other tests'."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "treadle"))
    monkeypatch.delenv("TREADLE_MODELS", raising=False)
    return tmp_path / "hub"
