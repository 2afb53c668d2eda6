"""Features that the operating system lends: asked for where a CPU has them, and only there."""

from __future__ import annotations

import pytest

from treadle.isa import ROWS
from treadle.jit.host import FEATURES_TO_REQUEST, permitted
from treadle.system import SYSTEM

FEATURES = {"avx2", "amx-bf16", "amx-tile"}


def test_what_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SYSTEM, "request_tiles", lambda: False)
    assert permitted(FEATURES) == FEATURES - {"amx-tile"}
    monkeypatch.setattr(SYSTEM, "request_tiles", lambda: True)
    assert permitted(FEATURES) == FEATURES


def test_a_cpu_without_them_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(SYSTEM, "request_tiles", refuse)
    assert permitted({"avx2"}) == {"avx2"}


def test_another_architecture_has_none_to_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the system asked: the call's number means something else there."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", None)
    assert "amx-tile" not in permitted(FEATURES)


def test_every_x86_row_with_matrix_registers_asks() -> None:
    for row in (row for row in ROWS.values() if not row.triple):
        assert bool(row.matrix) == bool(row.needs & FEATURES_TO_REQUEST), row.name
