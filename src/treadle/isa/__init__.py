"""The supported instruction sets, and the choice among them.

::

    isa.py       Isa: the fields of a row, and the meaning of each operation
    portable.py  reference code of every operation, for any LLVM target
    x86.py       AVX2, the AVX-512 families, and AMX's row
    amx.py       Intel's matrix registers
    arm.py       NEON, and rows with dots of bytes and bf16
    sme.py       Arm's matrix registers
    riscv.py     RISC-V vectors (RVV 1.0)
    nvptx.py     NVIDIA GPUs

To add one, write a row (``docs/add-an-isa.md``) and list it in ``ROWS``, better ones last.
"""

from __future__ import annotations

import os
from collections.abc import Set

from treadle.errors import UnsupportedError
from treadle.isa import arm, riscv
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE
from treadle.isa.x86 import (
    AMX_BF16,
    AVX2,
    AVX2_VNNI,
    AVX512,
    AVX512_BF16,
    AVX512_VBMI,
    AVX512_VNNI,
)

ROWS: dict[str, Isa] = {
    row.name: row
    for row in (
        PORTABLE,
        arm.PLAIN,
        arm.DOTPROD,
        arm.I8MM,
        arm.BF16,
        arm.SME,
        *riscv.RVV,
        riscv.BF16,
        riscv.VQDOT,
        AVX2,
        AVX2_VNNI,
        AVX512,
        AVX512_VNNI,
        AVX512_VBMI,
        AVX512_BF16,
        AMX_BF16,
    )
}


def runnable(features: Set[str]) -> list[Isa]:
    """Return the rows that a CPU with these features (LLVM's names) can run, the best last."""
    return [row for row in ROWS.values() if row.needs <= features]


def best(features: Set[str]) -> Isa:
    """Return the fastest row for a CPU with these features (LLVM's names)."""
    return [row for row in runnable(features) if not row.slow_with & features][-1]


def choose(features: Set[str], forced: str | None = None) -> Isa:
    """Return the row named ``forced``, else the one named by ``TREADLE_ISA``, else the ``best`` row
    for a CPU with these features (LLVM's names).

    Raises UnsupportedError for a name that is unknown or that this CPU cannot run.
    """
    asked = f"isa={forced!r}"
    if not forced:
        forced = os.environ.get("TREADLE_ISA")
        asked = f"TREADLE_ISA={forced}"
    if not forced:
        return best(features)
    row = ROWS.get(forced)
    if row is None:
        raise UnsupportedError(f"{asked}: unknown instruction set; choose one of {', '.join(ROWS)}")
    missing = sorted(row.needs - features)
    if missing:
        raise UnsupportedError(f"{asked}: this CPU does not support {', '.join(missing)}")
    return row
