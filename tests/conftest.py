"""Fixtures that every test directory shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real models and golden files beside the checkout; not part of the project."""
    folder = Path(os.environ.get("TREADLE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{folder} is absent under CI")
        pytest.skip(f"{folder} is absent: this test needs the shared models")
    return folder
