"""Python of an emulated machine, with what treadle needs there: ``tools/fetch_emulators.py
--roots``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.emulated.guest import FOLDER, found

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900.0  # seconds for one program: emulated, on a busy machine


def run_python(machine: str, cpu: str, cache: Path, *args: str) -> str:
    """What Python prints with ``args`` on a ``cpu`` of qemu; ``cache``: a folder for its kernels.

    Skips the test where the machine's root is not here; fails it where Python does.
    """
    root = FOLDER / machine
    emulator = found(f"qemu-{machine}")
    if not root.is_dir() or emulator is None:
        pytest.skip(f"{root} is absent: tools/fetch_emulators.py --roots fetches it (0.7 GB)")
    (python,) = (root / "usr/bin").glob("python3.[0-9][0-9]")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, (root / "site", ROOT / "src"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TREADLE_CACHE": str(cache),
        "TREADLE_TUNE": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    # Where Debian has a choice of libraries, a script that is not run here would make the link.
    libraries = ":".join(map(str, (root / "usr/lib").glob("*-linux-gnu/[bl]*a*/")))
    qemu = [emulator, "-cpu", cpu, "-L", str(root), "-E", f"LD_LIBRARY_PATH={libraries}"]
    done = subprocess.run(
        ["nice", "-n", "15", *qemu, str(python), *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
