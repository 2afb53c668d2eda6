"""What doctor tells of this machine's own tiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.devices.cpu.tuned_rows import save
from treadle.kernels.matmul.select import TunedTable
from treadle.profiling.facts import Subject
from treadle.profiling.report import describe, row_in_use


def test_doctor_tells_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("TREADLE_TUNE", raising=False)
    assert "tuning" not in describe(Subject())
    path = save(row_in_use(), TunedTable(gemv_tokens={"Q8_0": 2}))
    report = describe(Subject())
    assert report["tuning"]["formats"] == ["Q8_0"]
    assert report["tuning"]["file"] == str(path)
    assert report["tuning"]["measured"]
    assert report["tuning"]["problem"] is None
    assert not [line for line in report["warnings"] if "shipped tiles" in line]
    path.write_text("{")
    report = describe(Subject())
    assert report["tuning"]["measured"] is None
    assert [line for line in report["warnings"] if "shipped tiles" in line and "not JSON" in line]
