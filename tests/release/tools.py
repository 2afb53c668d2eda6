"""Programs of the extra ``release``, beside this Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(name: str) -> str:
    """The path of a program; without it the test is skipped, or fails under ``CI=true``."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        problem = f"{name} is absent: pip install '.[release]'"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(problem)
    return found


def run(
    *command: str | Path, cwd: Path = ROOT, timeout: float = 300, sources: Path | None = None
) -> str:
    """What a program prints; it must end well. It imports treadle from ``sources``, if given."""
    left_out = ("PYTHONPATH", "TREADLE_TESTS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
