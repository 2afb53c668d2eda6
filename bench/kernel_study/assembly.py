"""Static analysis of a kernel's assembly: its innermost loop, its spills, and the cycles that
llvm-mca estimates for RISC-V cores.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from treadle.base.fast_classes import dataclass

LABEL = re.compile(r"^(\.L\w+):")
BRANCH = re.compile(r"\b(?:b\w+|j)\s.*?(\.L\w+)\s*$")
VECTOR = re.compile(r"^\tv(?!set)")
SET_TYPE = re.compile(r"^\tvseti?vli\s+\w+, \w+, e(\d+), (mf?\d)")
# Whole registers to memory and back, or scalars: nothing else in these kernels is done so.
SPILL = re.compile(r"^\t(?:vs[1248]r\.v|vl[1248]re\d+\.v|(?:sd|ld|fsd|fld|fsw|flw)\s.*\(sp\))")
CORES = {"X60": "spacemit-x60", "P670": "sifive-p670"}  # LLVM's scheduling models
CYCLES = re.compile(r"^Total Cycles:\s+(\d+)", re.MULTILINE)
ROUNDS = 100  # of a loop that llvm-mca walks: after some, each round takes as long


@dataclass(frozen=True)
class Loop:
    """The innermost loop with most vector instructions: lines of assembly, and the vector type
    (bits of an element, LMUL as LLVM writes it) that holds where it begins.
    """

    lines: list[str]
    element: str = ""
    lmul: str = ""

    @property
    def spills(self) -> int:
        """Stores to the stack and loads from it, in one round."""
        return sum(bool(SPILL.match(line)) for line in self.lines)


def find_loop(assembly: str) -> Loop:
    """Return the innermost loop with the most vector instructions, or the whole text if it has no
    loop.
    """
    lines = assembly.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    spans = [
        (labels[found[1]], i)
        for i, line in enumerate(lines)
        if (found := BRANCH.search(line)) and labels.get(found[1], i) < i
    ]
    # A loop of one block: the studied kernels' innermost loops are. Other jumps back may lead past
    # what is no loop.
    inner = [s for s in spans if not any(s[0] < at <= s[1] for at in labels.values())]
    first, last = max(
        inner or [(0, len(lines) - 1)],
        key=lambda s: sum(bool(VECTOR.match(line)) for line in lines[s[0] : s[1] + 1]),
    )
    body = [line for line in lines[first : last + 1] if re.match(r"\t[a-z]", line)]
    types = [t for line in body if (t := SET_TYPE.match(line))]
    types = types or [t for line in lines[:first] if (t := SET_TYPE.match(line))]
    return Loop(body, types[-1][1], types[-1][2]) if types else Loop(body)


def cycles(loop: Loop, rounds: int, core: str, mca: str) -> int | None:
    """Cycles of ``rounds`` rounds on one of CORES, everything in the first-level cache; None where
    the program ``mca`` knows no such core.
    """
    walked = min(rounds, ROUNDS)
    head = [f"# LLVM-MCA-RISCV-SEW E{loop.element}", f"# LLVM-MCA-RISCV-LMUL {loop.lmul.upper()}"]
    # A branch is one instruction more, wherever it leads.
    body = [re.sub(r"\.L\w+\s*$", ".Lround", line) for line in loop.lines]
    text = "\n".join([*(head if loop.lmul else []), ".Lround:", *body, ""])
    with tempfile.TemporaryDirectory(prefix="treadle-study-") as folder:
        source = Path(folder, "loop.s")
        source.write_text(text)
        options = ["-mtriple=riscv64", f"-mcpu={CORES[core]}", "-mattr=+v,+zvfh,+zihintpause"]
        done = subprocess.run(
            [mca, *options, f"-iterations={walked}", str(source)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    found = CYCLES.search(done.stdout)
    return None if found is None else round(int(found[1]) * rounds / walked)
