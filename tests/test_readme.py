"""The README's example runs as it stands, on a real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_library_example(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    (tmp_path / "model.gguf").symlink_to(data / "models" / "stories260K.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith(", there was a little girl named Lily.")
    assert names["logits"].shape[1] == 512
    assert names["answer"].finish_reason in ("stop", "length", "context")
    names["model"].close()
