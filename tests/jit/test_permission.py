"""Features that the operating system lends: asked for where a CPU has them, and only there."""

from __future__ import annotations

import pytest

from treadle.isa import ROWS
from treadle.jit import permission
from treadle.jit.permission import permitted

FEATURES = {"avx2", "amx-bf16", "amx-tile"}


def test_what_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "_tiles", lambda: False)
    assert permitted(FEATURES) == FEATURES - {"amx-tile"}
    monkeypatch.setattr(permission, "_tiles", lambda: True)
    assert permitted(FEATURES) == FEATURES


def test_a_cpu_without_them_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(permission, "_tiles", refuse)
    assert permitted({"avx2"}) == {"avx2"}


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "aarch64")])
def test_another_system_has_none_to_lend(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it asked: the call's number means something else there."""
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("ctypes.CDLL", None)
    assert "amx-tile" not in permitted(FEATURES)


def test_every_row_with_matrix_registers_asks() -> None:
    for row in ROWS.values():
        assert bool(row.matrix) == bool(row.needs & permission.ASKED_FOR), row.name
