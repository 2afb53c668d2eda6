"""The guards themselves: a kernel that steps outside its buffers is caught."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.harness import Memory, assert_close

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("front", "index"), [(False, "len(x)"), (True, "-1")])
def test_a_read_past_a_buffer_faults(front: bool, index: str) -> None:
    script = (
        "import numpy as np\n"
        "from tests.kernels.harness import Memory\n"
        f"x = Memory().array(100, np.float32, front={front})\n"
        "import ctypes\n"
        f"ctypes.c_float.from_address(x.ctypes.data + 4 * ({index})).value\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    env.pop("TREADLE_TEST_ROW", None)  # the child's own memory is meant, not a guest's
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr.decode()


def test_a_write_beside_a_buffer_is_named() -> None:
    memory = Memory()
    x = memory.array(100, np.uint8, name="x")
    memory.check()
    x[:] = 0
    memory.check()
    parts = memory._parts[0][1]
    parts[len(parts) - 103] = 7
    with pytest.raises(AssertionError, match=r"x: byte -3 was written, outside 0\.\.100"):
        memory.check()


def test_a_failure_names_the_worst_element() -> None:
    got = np.ones((3, 4))
    got[1, 2] = 1.5
    got[2, 0] = np.nan
    with pytest.raises(AssertionError, match=r"worst at \(2, 0\): nan, expected 1"):
        assert_close(got, np.ones((3, 4)), 0.25, "it")
    got[2, 0] = 1.1
    with pytest.raises(AssertionError, match=r"worst at \(1, 2\): 1.5.*1 of 12"):
        assert_close(got, np.ones((3, 4)), 0.25, "it")
