"""Every kernel test on every emulated row: ``python -m tests.emulated [ROW ...]``.

Each row is a pytest of its own, one after the other. Prints a line a row; exit status 1 where one
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.emulated.rows import EMULATED

TESTS = ["tests/kernels", "tests/isa/test_ops.py", "tests/jit/test_math.py"]


def main(names: list[str]) -> int:
    """Run them; the number of rows that failed."""
    failed = 0
    for name in names or EMULATED:
        env = {**os.environ, "TREADLE_TEST_ROW": name}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", *TESTS],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = done.stdout.splitlines()
        print(f"{name:20}", lines[-1] if lines else "no answer", flush=True)
        if done.returncode:
            failed += 1
            print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
