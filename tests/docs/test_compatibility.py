"""The tests that docs/compatibility.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_named_tests_exist() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    named = re.findall(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)", text.partition("## Trials")[2])
    assert len(named) > 50
    for file, name in named:
        source = (ROOT / "tests" / file).read_text("utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}::{name}"
