"""What a block of 32 values costs a tile, scales included: instructions, and cycles by llvm-mca.

``python -m tests.isa.blocks [ROW ...]`` prints them; ``tools/fetch_emulators.py --mca`` fetches
llvm-mca.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from unittest import mock

from tests.emulated.guest import found
from tests.isa.test_tiles import JUMP, LABEL, pack_nothing
from treadle.formats import by_name
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.jit.compile import emit_assembly
from treadle.jit.kernel import trace
from treadle.kernels.activation_layout import BLOCK, DWORD
from treadle.kernels.matmul import gemm, select
from treadle.kernels.matmul.tile_outer import OUTER, UNROLL
from treadle.kernels.matmul.tile_pairs import PAIRS

PRODUCTS = {DWORD: r"\t(u?sdot|smull2?)\t", OUTER: r"\tvwmacc\w*\.vx\t", PAIRS: r"\tu?smmla\t"}
ROUND = {OUTER: UNROLL, PAIRS: PAIRS}  # values of K that the loop over K takes at a time
CORES = {"aarch64": ("neoverse-n2", "neoverse-v1", "neoverse-v2")}
CYCLES = re.compile(r"^Total Cycles:\s+(\d+)", re.MULTILINE)
N_BLOCKS = 50  # that llvm-mca walks


@dataclass(frozen=True)
class Block:
    """The instructions that a tile executes for one, and how many products of bytes they make."""

    lines: list[str]
    products: int

    @property
    def per_instruction(self) -> float:
        return self.products / len(self.lines)

    def per_cycle(self, triple: str, core: str) -> float:
        """Products a cycle of a core, by llvm-mca. Raises AssertionError where it cannot tell."""
        mca = found("llvm-mca")
        assert mca is not None, "llvm-mca is absent: tools/fetch_emulators.py --mca fetches it"
        # A branch is one instruction more, wherever it leads.
        body = [re.sub(r"\.L\w+$", ".Lround", line) for line in self.lines]
        with tempfile.NamedTemporaryFile("w", suffix=".s") as source:
            source.write("\n".join([".Lround:", *body, ""]))
            source.flush()
            options = [f"-mtriple={triple}", f"-mcpu={core}", "-mattr=+dotprod,+i8mm"]
            command = [mca, *options, f"-iterations={N_BLOCKS}", source.name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        cycles = CYCLES.search(done.stdout)
        assert cycles, done.stderr[:500]
        return self.products * N_BLOCKS / int(cycles[1])


def block(weights: str, isa: Isa) -> Block:
    """Of the shipped tile for many tokens; of formats with a scale for 32 values and no minimums.

    The loop over K stands inside the loop over blocks, and counts as often as it is walked; tiles
    of dots have no such loop.
    """
    with mock.patch.object(gemm, "emit_pack", pack_nothing):
        spec = select.gemm(by_name(weights), isa, 2048, matrix=False)
        lines = emit_assembly(trace(spec, isa), isa).splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := LABEL.match(line))}
    spans = [
        (labels[m[1]], i + 1)
        for i, line in enumerate(lines)
        if (m := JUMP.match(line)) and labels.get(m[1], i) < i
    ]

    def n_products(span: tuple[int, int]) -> int:
        return sum(bool(re.search(PRODUCTS[spec.unit], line)) for line in lines[slice(*span)])

    def code(first: int, last: int) -> list[str]:
        return [line for line in lines[first:last] if re.match(r"\t[a-z]", line)]

    within = [s for s in spans if n_products(s)]
    inner = [s for s in within if not any(_inside(t, s) for t in within)]
    first, last = max(inner, key=n_products)
    found_code = code(first, last)
    if spec.unit != DWORD:
        around = min((s for s in within if _inside((first, last), s)), key=lambda s: s[1] - s[0])
        found_code = found_code * (BLOCK // ROUND[spec.unit])
        found_code = [*code(around[0], first), *found_code, *code(last, around[1])]
    return Block(found_code, spec.mr * isa.lanes * spec.nr * BLOCK)


def _inside(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a != b and b[0] <= a[0] and a[1] <= b[1]


def main(names: list[str]) -> None:
    rows = [ROWS[n] for n in names] if names else [r for r in ROWS.values() if r.triple]
    for isa in rows:
        for weights in ("Q8_0", "Q4_0"):
            made = block(weights, isa)
            line = f"{isa.name:15} {weights}: {len(made.lines)} instructions for {made.products}"
            line += f" products, {made.per_instruction:.1f} each"
            for core in CORES.get(isa.triple.partition("-")[0], ()):
                line += f"; {core} {made.per_cycle(isa.triple, core):.1f} a cycle"
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
