"""Memory of this process, as /proc tells it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from treadle.devices.cpu.residence import mapped_bytes, peak_bytes
from treadle.files.mapping import map_file

SMAPS = """\
7f00-7f01 r--s 00000000 08:01 123 {path}
Size:               8 kB
Rss:                4 kB
VmFlags: rd sh
7f02-7f03 rw-p 00000000 00:00 0
Rss:               64 kB
7f04-7f05 r--s 00000000 08:01 123 {path}
Rss:               12 kB
7f06-7f07 r--s 00000000 08:01 124 {path}.other
Rss:              100 kB
"""


def test_as_proc_says(tmp_path: Path) -> None:
    folder = tmp_path / "self"
    path = tmp_path / "a model.gguf"
    folder.mkdir()
    (folder / "status").write_text("Name:\tx\nVmPeak:\t 900 kB\nVmHWM:\t 300 kB\n")
    (folder / "smaps").write_text(SMAPS.format(path=path))
    assert peak_bytes(tmp_path) == 300 << 10
    assert mapped_bytes([path], tmp_path) == 16 << 10
    assert mapped_bytes([], tmp_path) == 0
    assert mapped_bytes([path], tmp_path / "absent") is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's /proc")
def test_of_this_process(tmp_path: Path) -> None:
    before = peak_bytes()
    assert before is not None
    assert before > 10 << 20
    assert peak_bytes(tmp_path) is not None  # without /proc: what the C library says
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    data = np.frombuffer(map_file(path, "a file"), np.uint8)
    assert mapped_bytes([path]) == 0
    assert data.max() == 0
    assert mapped_bytes([path]) == 1 << 20
