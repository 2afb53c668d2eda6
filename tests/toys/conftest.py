"""What every toy needs: its own rows in the tables, and kernels that no other run has cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Register = Callable[[dict[str, Any], str, Any], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Register:
    """``register(table, name, row)``, until the test is over."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    return monkeypatch.setitem
