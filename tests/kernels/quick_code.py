"""Machine code for tests alone, generated quickly: of an emulated GPU, and of units that are made
of memory or of plain instructions.
"""

from __future__ import annotations

from functools import cache as cache_of_calls

import llvmlite.binding as llvm

from treadle.isa.isa import Isa
from treadle.jit import cache
from treadle.jit.compile import Linker, optimise
from treadle.jit.kernel import isa_key, symbol, trace
from treadle.kernels.spec import Spec

MADE_UP = ("_matrix", "_signed", "_words")  # ends of names in rows.py


def is_made_up(isa: Isa) -> bool:
    """Whether no machine has this row."""
    return isa.name.endswith(MADE_UP)


def emit_quickly(ir_text: str, isa: Isa) -> bytes:
    """A module's machine code for this process: the same passes over its IR as ever, then LLVM's
    lowest level. It takes a fifth of the time, as no registers or instructions are sought.
    """
    module = optimise(ir_text, isa)
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=0, reloc="pic", jit=True
    )
    return bytes(machine.emit_object(module))


@cache_of_calls
def linker() -> Linker:
    """One for all such code of the process."""
    return Linker()


def quick_object(spec: Spec, isa: Isa) -> bytes:
    """A kernel's object: from the cache, else generated and stored."""
    key = f"{isa_key(isa)}\0quickly"
    code = cache.read(spec.name, key)
    if code is None:
        code = emit_quickly(trace(spec, isa), isa)
        cache.write(spec.name, key, code, {"isa": isa.name})
    return code


@cache_of_calls
def load_quickly(spec: Spec, isa: Isa) -> int:
    """A kernel's address."""
    return linker().link(symbol(spec), quick_object(spec, isa))
