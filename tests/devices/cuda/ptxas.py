"""NVIDIA's assembler, from the registry's wheels: what machine code a kernel becomes on a card."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from treadle.devices.cuda.ptx import emit_ptx
from treadle.isa.isa import Isa
from treadle.kernels.spec import Spec


@cache
def tool(name: str) -> str | None:
    """Where a program of the wheels ``nvidia-cuda-nvcc`` and ``nvidia-cuda-nvdisasm`` is."""
    found = find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    paths = (path for folder in folders or () for path in Path(folder).glob(f"cu*/bin/{name}"))
    return str(next(paths, "")) or None


def required(name: str) -> str:
    """The same; a test without it is skipped, and fails under ``CI=true``."""
    path = tool(name)
    if path is None:
        why = f"no {name}: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return path


@dataclass(frozen=True)
class Assembled:
    """A kernel's machine code on one kind of card."""

    cubin: Path
    registers: int
    spills: int  # bytes stored
    stack: int  # bytes of a thread's own memory: spills, and arrays that are indexed

    def opcodes(self) -> dict[str, int]:
        """How often each instruction is there, by its name up to the first dot."""
        done = subprocess.run(
            [required("nvdisasm"), "-c", str(self.cubin)],
            capture_output=True,
            text=True,
            check=True,
        )
        counts: dict[str, int] = {}
        for name in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\w+)", done.stdout, re.M):
            counts[name] = counts.get(name, 0) + 1
        return counts


def assemble(spec: Spec, isa: Isa, folder: Path) -> Assembled:
    """The kernel through ptxas, for the row's own card; a failure shows what it said."""
    __tracebackhide__ = True
    path = required("ptxas")
    source = folder / "kernel.ptx"
    cubin = folder / f"{isa.name}.cubin"
    source.write_text(emit_ptx(spec, isa))
    command = [path, f"-arch={isa.cpu}", "-v", "-O3", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{spec.name}: {said[-2000:]}"
    numbers = [
        sum(map(int, re.findall(pattern, said)))
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack")
    ]
    return Assembled(cubin, *numbers)
