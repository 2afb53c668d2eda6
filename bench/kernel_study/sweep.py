"""The settings that are swept, and the result of one setting of one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from bench.kernel_study import assembly
from bench.kernel_study.blocks import DotQ4_0, DotQ4_K, DotQ8_0
from bench.kernel_study.emulator import Emulator, EmulatorError
from bench.kernel_study.rows import Mad, ScaleRow, VecDotF16
from bench.kernel_study.spec import Study, StudyCase
from bench.kernel_study.tiles import AttentionProduct, TileAlongK, TileOfRows
from treadle.base.fast_classes import dataclass
from treadle.isa import ROWS
from treadle.jit.compile import emit_assembly
from treadle.jit.kernel import trace

if TYPE_CHECKING:
    from treadle.isa.isa import Isa

LENGTHS = (128, 256, 512, 1024)  # bits of a register that qemu can have
# values along K; of attention, those of a head
SIZE = 1024
HEAD = 64


@dataclass(frozen=True)
class Kernel:
    """One kernel's settings; ``size`` values along K."""

    name: str
    specs: tuple[Study, ...]
    size: int = SIZE


def _barriers(kind: type, shapes: Sequence[tuple[int, ...]]) -> tuple[Study, ...]:
    """Each shape without barriers, and with them where a round has more than one part."""
    return tuple(
        kind(*shape, barrier)
        for shape in shapes
        for barrier in (False, True)
        if not barrier or shape[-1] > 1
    )


# Of f32 sums in registers: the three budgets of llama.cpp's tile along K (LMUL 1, 2, 4), then
# vectors of rows: the same budgets, and the seven tokens of its repacked products.
ALONG_K = [(1, 4, 6), (2, 4, 3), (4, 2, 2)]
OF_ROWS = [(1, 4, 6), (2, 2, 6), (4, 1, 6), (4, 1, 7)]
ATTENTION = [(1, 4, 4), (1, 4, 6), (2, 2, 4), (2, 2, 6), (4, 1, 6)]
# LMUL x unroll: eight registers of halves at most. Their sums take sixteen, so LMUL 8 has none.
SHAPES = [(m, u) for m, u in product((1, 2, 4, 8), (1, 2, 4, 8)) if m * u <= 8]
KERNELS = (
    Kernel("vec_dot_f16", _barriers(VecDotF16, [shape for shape in SHAPES if shape[0] < 8])),
    Kernel("mad_f16", _barriers(Mad, SHAPES)),
    Kernel("scale_f16", _barriers(ScaleRow, SHAPES)),
    Kernel("dot_q8_0", _barriers(DotQ8_0, list(product((8, 16, 32), (1, 2, 4))))),
    Kernel("dot_q4_0", _barriers(DotQ4_0, list(product((8, 16), (1, 2, 4))))),
    Kernel("dot_q4_k", _barriers(DotQ4_K, list(product((8, 16, 32), (1, 2))))),
    Kernel("sgemm", (*_barriers(TileAlongK, ALONG_K), *_barriers(TileOfRows, OF_ROWS))),
    Kernel("attention", _barriers(AttentionProduct, ATTENTION), HEAD),
)


def rv64gcv(vlen: int) -> Isa:
    """RISC-V with vectors of ``vlen`` bits, and of halves (Zvfh)."""
    row = ROWS["rvv128_zvfh"]
    features = row.features.replace("zvl128b", f"zvl{vlen}b")
    # Not exact: a kernel for one length is run on longer registers too.
    name = f"rv64gcv_zvfh_vlen{vlen}"
    return replace(row, name=name, features=features, vector_bits=vlen, exact=False)


def emulated_cpu(vlen: int) -> str:
    """qemu's words for it, with no extension more."""
    return f"rv64i,m=true,a=true,f=true,d=true,c=true,v=true,zvfh=true,vlen={vlen}"


@dataclass
class SweepResult:
    """One setting. ``wrong``: by VLEN, what is wrong there, or None; counts, spills and cycles are
    of the VLEN that was asked for.
    """

    kernel: str
    spec: Study
    size: int
    products: int
    wrong: dict[int, str | None] = field(default_factory=dict)
    instructions: int | None = None
    spills: int | None = None
    cycles: dict[str, int | None] = field(default_factory=dict)
    hot_ns: float | None = None
    cold_ns: float | None = None
    best: bool = False

    @property
    def is_right(self) -> bool:
        """Wherever it was run."""
        return not any(self.wrong.values())

    @property
    def cost(self) -> float:
        """Cost of one product, least for the best setting: measured time, else X60's cycles, else
        instructions.
        """
        costs = (self.cold_ns, self.cycles.get("X60"), self.instructions)
        return next((c for c in costs if c is not None), 0) / self.products


def problem(case: StudyCase, after: dict[str, np.ndarray]) -> str | None:
    """Return the worst wrong element of the buffers that a kernel left; None if all are right."""
    for name, expected in case.expected.items():
        error = np.abs(after[name].astype(np.float64) - expected)
        over = np.where(np.isnan(error), np.inf, error / case.bound[name])
        worst = np.unravel_index(int(over.argmax()), over.shape)
        if over[worst] > 1:
            got = after[name][worst]
            want = expected[worst]
            at = ", ".join(map(str, worst))
            return f"{name}[{at}] is {got:.6g}, not {want:.6g}"
    return None


def numbers(case: StudyCase) -> dict[str, int]:
    """Arguments that are no buffers, for the same memory in every repetition."""
    return {"n": case.n, "x_step": 0, "y_step": 0, "out_step": 0}


def emulate(
    kernel: Kernel, vlen: int, lengths: tuple[int, ...], qemu: str, mca: str | None
) -> Iterator[SweepResult]:
    """Every setting of a kernel: right at ``lengths``, counted at ``vlen``; without ``mca``, the
    path of llvm-mca, there are no cycles.
    """
    for spec in kernel.specs:
        isa = rv64gcv(vlen)
        found = SweepResult(kernel.name, spec, kernel.size, spec.products(isa, kernel.size))
        for length in dict.fromkeys((vlen, *lengths)):
            found.wrong[length], counted = _run(spec, kernel.size, length, qemu, length == vlen)
            found.instructions = found.instructions if counted is None else counted
        loop = assembly.find_loop(emit_assembly(trace(spec, isa), isa))
        found.spills = loop.spills
        rounds = spec.rounds(isa, kernel.size)
        for core in assembly.CORES if mca else ():
            found.cycles[core] = assembly.cycles(loop, rounds, core, str(mca))
        yield found


def _run(
    spec: Study, size: int, vlen: int, qemu: str, count: bool
) -> tuple[str | None, int | None]:
    """Return the problem at this VLEN, or None, and the number of instructions."""
    isa = rv64gcv(vlen)
    case = spec.case(isa, size, np.random.default_rng(vlen))
    try:
        ran = Emulator(qemu, emulated_cpu(vlen)).run(
            spec, isa, case.arrays, numbers(case), count=count
        )
    except EmulatorError as error:
        return str(error), None
    return problem(case, ran.arrays), ran.instructions


def mark_best(found: list[SweepResult]) -> None:
    """The least cost of what is right, of one kernel."""
    right = [f for f in found if f.is_right]
    if right:
        min(right, key=lambda f: f.cost).best = True
