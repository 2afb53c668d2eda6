"""The rows of other machines, and the emulated CPU that each runs on: one that has what the row
needs and as little more as there is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.emulated.guest import Guest, found
from treadle.isa import ROWS
from treadle.isa.portable import PORTABLE
from treadle.isa.riscv import LENGTHS

if TYPE_CHECKING:
    from treadle.isa.isa import Isa

LINUX = {arch: f"{arch}-unknown-linux-gnu" for arch in ("aarch64", "riscv64")}


@dataclass(frozen=True)
class Emulated:
    """A row, and the ``cpu`` of qemu that runs it."""

    isa: Isa
    cpu: str

    @property
    def machine(self) -> str:
        """Its architecture, as qemu names it."""
        return self.isa.triple.partition("-")[0]

    def guest(self) -> Guest:
        """The emulated CPU, one for the whole run; see ``qemu``."""
        return _guest(qemu(self.machine), self.cpu, self.isa)


def qemu(machine: str) -> str:
    """Path of the emulator of a machine; skips the test where there is none.

    Under CI that is a failure: nobody would miss what was silently left out.
    """
    path = found(f"qemu-{machine}")
    if path is None:
        why = f"qemu-{machine} is absent: tools/fetch_emulators.py fetches it"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return path


@cache
def _guest(path: str, cpu: str, isa: Isa) -> Guest:
    return Guest([path, "-cpu", cpu], isa)


def guest_of(isa: Isa) -> Guest:
    """The guest of a row, or of one that differs in operations only."""
    return next(
        e for e in EMULATED.values() if (e.isa.triple, e.isa.features) == (isa.triple, isa.features)
    ).guest()


# Streaming vectors of 512 bits where no length is asked for.
SME = "max,pauth-impdef=on,sme512=on"


def _rvv(name: str, *more: str) -> Emulated:
    """A row of RISC-V on registers of its own length, and no extension that it does not name."""
    row = ROWS[name]
    cpu = f"rv64i,m=true,a=true,f=true,d=true,c=true,v=true,vlen={row.vector_bits}"
    return Emulated(row, ",".join((cpu, *more)))


ALL = [
    # Plain vector arithmetic: nothing of x86 may be in a kernel.
    Emulated(replace(PORTABLE, name="portable_aarch64", triple=LINUX["aarch64"]), "cortex-a53"),
    Emulated(
        replace(PORTABLE, name="portable_riscv64", triple=LINUX["riscv64"], features="+v"),
        "rv64i,m=true,a=true,f=true,d=true,c=true,v=true,vlen=128",
    ),
    Emulated(ROWS["neon"], "cortex-a53"),
    Emulated(ROWS["neon_dotprod"], "cortex-a76"),
    Emulated(ROWS["neon_i8mm"], "neoverse-n2"),
    Emulated(ROWS["neon_bf16"], "neoverse-n2"),
    Emulated(ROWS["sme"], SME),
    *(_rvv(f"rvv{length}") for length in LENGTHS),
    *(_rvv(f"rvv{length}_zvfh", "zvfh=true") for length in LENGTHS),
    _rvv("rvv256_zvfbfwma", "zvfh=true", "zvfbfmin=true", "zvfbfwma=true"),
]
EMULATED: dict[str, Emulated] = {e.isa.name: e for e in ALL}
