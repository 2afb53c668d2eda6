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

To add one, write a row (``docs/add-an-isa.md``) and list it in its module's ``ROWS``, better
ones last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Set
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE

# Modules of rows, each with a feature (LLVM's name) that all of its rows need: those of other
# processors are not imported to choose among the rows of one.
FAMILIES = {"arm": "neon", "riscv": "v", "x86": "avx2"}


class RowTable(dict[str, Isa]):
    """All rows by name. A program may change the table at run time."""

    def __init__(self, rows: Iterable[Isa]) -> None:
        super().__init__((row.name, row) for row in rows)
        self._own = dict(self)

    def is_changed(self) -> bool:
        """Return whether rows were added, replaced or removed."""
        return self != self._own


if TYPE_CHECKING:
    ROWS: RowTable


def __getattr__(name: str) -> Any:
    if name == "ROWS":  # few programs ask for the rows of other processors
        return globals().setdefault(name, RowTable(_rows([*FAMILIES])))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _rows(families: Iterable[str]) -> list[Isa]:
    """Return the portable row and those of ``families`` (names of modules, such as "x86"), the best
    last.
    """
    rows = [PORTABLE]
    for family in families:
        rows += import_module(f".{family}", __name__).ROWS
    return rows


def runnable(features: Set[str]) -> list[Isa]:
    """Return the rows that a CPU with these features (LLVM's names) can run, the best last."""
    families = [family for family, feature in FAMILIES.items() if feature in features]
    return [row for row in _rows(families) if row.needs <= features]


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
    rows: dict[str, Isa] = __getattr__("ROWS")
    row = rows.get(forced)
    if row is None:
        raise UnsupportedError(f"{asked}: unknown instruction set; choose one of {', '.join(rows)}")
    missing = sorted(row.needs - features)
    if missing:
        raise UnsupportedError(f"{asked}: this CPU does not support {', '.join(missing)}")
    return row
