"""Checks of small models, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import treadle
from treadle.selftest.model_check import CheckReport, check_kernels

SMALL: dict[str, Any] = {"context": 80, "threads": 2, "n_sequences": 4}


def kernels_of(path: Path, **options: Any) -> CheckReport:
    report = CheckReport({}, {}, quick=True)
    with treadle.load(path, **SMALL | options) as model:
        check_kernels(model, report)
    return report
