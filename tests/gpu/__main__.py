"""Every kernel of a GPU with every weight format, in the emulator and through NVIDIA's assembler:
``python -m tests.gpu [pytest's arguments]``.
"""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    env = {**os.environ, "TREADLE_TEST_GPU": "all"}
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=env).returncode)
