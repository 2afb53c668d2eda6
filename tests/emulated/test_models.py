"""A whole model on an emulated CPU: Python, numpy, LLVM and the threads are that machine's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulated.foreign import run_python

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
    files = data / "truth/llama2c_stories260K_greedy.json", data / "models/stories260K.gguf"
    args = map(str, (*files, *THREADS))
    printed = run_python(machine, cpu, tmp_path / "cache", "-c", SCRIPT, *args)
    said = [line.split() for line in printed.splitlines()]
    assert [line[:2] for line in said] == [[row, str(n)] for n in THREADS]
    assert all(line[2].isdigit() and int(line[2]) > 100 for line in said), printed
