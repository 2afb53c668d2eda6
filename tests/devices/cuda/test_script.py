"""``bench/gpu.py``, for the day when there is a card: it runs to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.cuda.machine import EVERYTHING

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not EVERYTHING, reason="20 s of an emulated card: python -m tests.devices.cuda")
def test_a_rehearsal() -> None:
    command = [sys.executable, "bench/gpu.py", "--rehearse", "--formats", "Q4_0,Q8_0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for words in ("Q8_0 20 tokens", "tokens/s", "attn.rope"):
        assert words in " ".join(done.stdout.split()), done.stdout
