"""A whole model on an emulated CPU: Python, numpy, LLVM and the threads are that machine's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.emulated.guest import FOLDER, found

ROOT = Path(__file__).resolve().parents[2]
THREADS = (1, 2, 3)
SCRIPT = """
import json, sys
import treadle

greedy = treadle.Sampling(temperature=0)
case = json.load(open(sys.argv[1]))[0]
for threads in map(int, sys.argv[3:]):
    with treadle.load(sys.argv[2], threads=threads) as model:
        made = model.generate(case["prompt"], max_tokens=60, sampling=greedy)
        text = case["prompt"] + made.finish()
        print(model.isa.name, threads, case["text"].startswith(text) and len(text), flush=True)
"""
# The emulated CPU, and the row that it is to choose. SME is off: OpenBLAS's code for it gives wrong
# numbers under qemu.
CPUS = [
    ("aarch64", "cortex-a53", "neon"),
    ("aarch64", "cortex-a76", "neon_dotprod"),
    ("aarch64", "max,sme=off,pauth-impdef=on", "neon_bf16"),
    ("riscv64", "rv64,v=true,vlen=128", "rvv128"),
    ("riscv64", "rv64,v=true,vlen=256,zvfh=true", "rvv256_zvfh"),
    ("riscv64", "rv64,v=true,vlen=1024,zvfh=true", "rvv512_zvfh"),
]


@pytest.mark.parametrize(("machine", "cpu", "row"), CPUS, ids=[row for _, _, row in CPUS])
def test_known_text(machine: str, cpu: str, row: str, data: Path, tmp_path: Path) -> None:
    """The row is the one that was found, and the text that of llama2.c on any number of threads."""
    root, emulator = FOLDER / machine, found(f"qemu-{machine}")
    if not root.is_dir() or emulator is None:
        pytest.skip(f"{root} is absent: tools/fetch_emulators.py --roots fetches it (0.7 GB)")
    (python,) = (root / "usr/bin").glob("python3.[0-9][0-9]")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, (root / "site", ROOT / "src"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TREADLE_CACHE": str(tmp_path / "cache"),
        "TREADLE_TUNE": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    files = data / "truth/llama2c_stories260K_greedy.json", data / "models/stories260K.gguf"
    # Where Debian has a choice of libraries, a script that is not run here would make the link.
    libraries = ":".join(map(str, (root / "usr/lib").glob("*-linux-gnu/[bl]*a*/")))
    qemu = [emulator, "-cpu", cpu, "-L", str(root), "-E", f"LD_LIBRARY_PATH={libraries}"]
    run = ["nice", "-n", "15", *qemu, str(python), "-c", SCRIPT]
    done = subprocess.run(
        [*run, *map(str, (*files, *THREADS))], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in said] == [[row, str(n)] for n in THREADS]
    assert all(line[2].isdigit() and int(line[2]) > 100 for line in said), done.stdout
