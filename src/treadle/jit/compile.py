"""LLVM IR to machine code, and machine code to callable addresses, by LLVM."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import llvmlite
import llvmlite.binding as llvm

from treadle.errors import CompileError

if TYPE_CHECKING:
    from treadle.isa.isa import Isa


def compiler_versions() -> dict[str, str]:
    """Return the versions of llvmlite and of the LLVM inside it."""
    version = ".".join(map(str, llvm.llvm_version_info))
    return {"llvmlite": llvmlite.__version__, "llvm": version}


DEFINITION = re.compile(r"^(define .*\))", re.MULTILINE)  # of a function, up to its attributes

# Features and the ABI that every Linux of an architecture assumes and LLVM does not.
BASE_FEATURES = {"riscv64": ("+m,+a,+f,+d,+c", "lp64d")}


def architecture(triple: str) -> str:
    """Return LLVM's name of the architecture in ``triple``, the same on every system ("aarch64",
    not "arm64").
    """
    name = triple.partition("-")[0]
    return "aarch64" if name == "arm64" else name


def is_native(isa: Isa) -> bool:
    """Whether this process's architecture is that of ``isa``."""
    here = architecture(llvm.get_process_triple())
    return not isa.triple or architecture(isa.triple) == here


@lru_cache(maxsize=1)
def _initialize(every_target: bool) -> None:
    if every_target:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    else:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()


@lru_cache(maxsize=8)
def _target_machine(isa: Isa, triple: str = "") -> Any:
    if triple:
        return _machine(triple, isa.cpu, isa.features, jit=False)
    native = is_native(isa)
    triple = llvm.get_process_triple() if native else isa.triple
    return _machine(triple, isa.cpu, isa.features, native)


def prepare(isa: Isa) -> None:
    """Create LLVM's target for ``isa`` now, which the first compilation would do otherwise."""
    _target_machine(isa)


def _machine(triple: str, cpu: str = "", features: str = "", jit: bool = True) -> Any:
    """Return LLVM's target machine for ``triple`` and, if given, LLVM's names of a CPU and of
    features. ``jit``: the code will run in this process.
    """
    _initialize(not jit)
    granted, abi = BASE_FEATURES.get(architecture(triple), ("", ""))
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu,
        features=",".join(filter(None, (granted, features))),
        opt=3,
        reloc="pic",
        jit=jit,
        abiname=abi,
    )


def _passes() -> Any:
    """Return LLVM's pass manager for kernels, with few passes: the Python function has already
    unrolled and vectorised its code.

    LLVM's -O2 takes three times as long and gives the same speed. Two of its passes do harm: one
    gathers an unrolled block's integer sums at the block's end, where they spill; one turns stores
    into calls of memset.
    """
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()  # variables become registers
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_new_gvn_pass()
    passes.add_loop_rotate_pass()  # one jump an iteration
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    return passes


def _with_length(ir_text: str, isa: Isa) -> str:
    """Return ``ir_text``; if ``isa`` is exact, its functions state the length of a vector register,
    in units of 64 bits.
    """
    if not isa.exact:
        return ir_text
    n = isa.vector_bits // 64
    return DEFINITION.sub(rf"\1 vscale_range({n},{n})", ir_text)


def optimise(ir_text: str, isa: Isa, triple: str = "") -> Any:
    """Parse, check and optimise one module of LLVM IR; return llvmlite's module. ``triple``: the
    target system, "" for this process's. Raises CompileError if LLVM rejects the IR.
    """
    machine = _target_machine(isa, triple)
    try:
        # A context of its own: LLVM deletes the global context's modules at process exit. A forked
        # child would find a half-optimised one there, and abort.
        module = llvm.parse_assembly(_with_length(ir_text, isa), llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"LLVM rejects the kernel's IR (a bug in treadle): {error}") from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    _passes().run(module, llvm.create_pass_builder(machine, llvm.PipelineTuningOptions()))
    if "llvm.coro." in ir_text:  # LLVM's -O0 pipeline splits coroutines, and does little else
        lowest = llvm.create_pass_builder(machine, llvm.PipelineTuningOptions(speed_level=0))
        lowest.getModulePassManager().run(module, lowest)
    return module


def emit_object(ir_text: str, isa: Isa, triple: str = "") -> bytes:
    """Return the machine code of one module of LLVM IR, as a relocatable object file. ``triple``:
    as in ``optimise``. Raises CompileError if LLVM rejects the IR.
    """
    module = optimise(ir_text, isa, triple)
    return bytes(_target_machine(isa, triple).emit_object(module))


def emit_assembly(ir_text: str, isa: Isa, triple: str = "") -> str:
    """Return the assembly text of one module of LLVM IR. ``triple``: as in ``optimise``. Raises
    CompileError if LLVM rejects the IR.
    """
    return str(_target_machine(isa, triple).emit_assembly(optimise(ir_text, isa, triple)))


class Linker:
    """LLVM's linker: loads objects into this process. Code stays loaded as long as the Linker
    lives.
    """

    def __init__(self) -> None:
        # Without a target machine LLVM assumes a RISC-V without floats, and crashes.
        triple = llvm.get_process_triple()
        # LLVM's older linker lacks some of RISC-V's relocations.
        newer = architecture(triple) == "riscv64"
        self._jit = llvm.create_lljit_compiler(_machine(triple), use_jit_link=newer)
        self._libraries: list[Any] = []
        self._names = count()  # unique: the name of a link that Ctrl-C interrupted stays taken

    def link(self, symbol: str, code: bytes) -> int:
        """Load the object ``code`` and return the address of the function ``symbol`` in it."""
        library = (
            llvm.JITLibraryBuilder()
            .add_object_img(code)
            .add_current_process()
            .export_symbol(symbol)
            .link(self._jit, f"{symbol}#{next(self._names)}")
        )
        self._libraries.append(library)
        return int(library[symbol])
