"""Every kernel of a GPU with every weight format, in the emulator and through NVIDIA's assembler,
and the server's tests on an emulated card: ``python -m tests.devices.cuda [pytest's arguments]``.
"""

from __future__ import annotations

import os
import subprocess
import sys

FOLDERS = "tests/devices/cuda", "tests/server"
# What is told of the packaged model, and what only a trained one writes.
NOT_FOR_A_RANDOM_MODEL = (
    "test_ollama.py::test_what_is_served",
    "test_native.py::test_why_it_stopped[body0-word-(]",
    "test_tools.py::test_arguments_are_sent_as_they_come",
)

if __name__ == "__main__":
    env = {**os.environ, "TREADLE_TEST_GPU": "all"}
    left_out = [f"--deselect=tests/server/{test}" for test in NOT_FOR_A_RANDOM_MODEL]
    command = [sys.executable, "-m", "pytest", "-q", *FOLDERS, *left_out, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=env).returncode)
