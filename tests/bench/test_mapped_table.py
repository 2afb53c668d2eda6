"""A table of n-grams of 2 GB in 700 MB of memory: the rows of a text become resident, no others."""

from __future__ import annotations

import itertools
import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
N_TOKENS = 48


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux's list of mapped memory")
def test_memory_grows_by_the_rows_that_are_read(tmp_path: Path) -> None:
    """A row of 128 bytes makes its own page resident, or the two that it lies across. The table is
    a hole: it takes no disk. Where this user may make no control group, the same holds without a
    limit.
    """
    command = [sys.executable, str(ROOT / "bench/mapped_table.py"), "--json"]
    command += ["--tokens", str(N_TOKENS)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    told = json.loads(done.stdout)
    assert told["table"] == 2 << 30
    assert told["disk"] < 16 << 20
    assert told["peak"] < told["limit"] == 700 << 20 or not told["limit"]
    lines = told["lines"]
    assert (lines[0]["rows"], lines[0]["cached"]) == (0, 0)
    for old, new in itertools.pairwise(lines):
        more = new["rows"] - old["rows"]
        assert 3 * N_TOKENS < more <= 4 * N_TOKENS  # four n-grams a token, few of them known
        grown = new["cached"] - old["cached"]
        assert 0.9 * more * mmap.PAGESIZE <= grown <= 1.1 * more * mmap.PAGESIZE
    rest = told["disk"] + (64 << 10)
    assert lines[-1]["mapped"] <= rest + 1.1 * lines[-1]["rows"] * mmap.PAGESIZE
