"""The shipped tiles keep their sums in registers: no vector goes to the stack inside the loop that multiplies."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from treadle.formats import by_name
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.jit.compile import emit_assembly
from treadle.jit.kernel import trace
from treadle.kernels import choice

LABEL = re.compile(r"^([.\w]+):")
JUMP = re.compile(r"^\tj\w+\t([.\w]+)")
MULTIPLY = re.compile(r"\t(vpdpbusd|v?pmaddwd|vdpbf16ps|vfn?madd\w+|mulps)\t")
STACK = re.compile(r"[xyz]mm\d+.*\(%r[sb]p\)|\(%r[sb]p\).*[xyz]mm\d+")


def innermost_loops(code: str) -> Iterator[list[str]]:
    """Runs of lines from a label to a jump back to it, with no such run inside."""
    lines = code.splitlines()
    at = {m[1]: i for i, line in enumerate(lines) if (m := LABEL.match(line))}
    backward = [
        (at[m[1]], i)
        for i, line in enumerate(lines)
        if (m := JUMP.match(line)) and at.get(m[1], i) < i
    ]
    for first, last in backward:
        inside = any(first <= f and e <= last and (f, e) != (first, last) for f, e in backward)
        if not inside:
            yield lines[first : last + 1]


def spills(code: str) -> list[str]:
    """Vector moves to or from the stack in innermost loops that multiply."""
    loops = [lines for lines in innermost_loops(code) if any(MULTIPLY.search(line) for line in lines)]
    assert loops, "no loop multiplies"
    return [line.strip() for lines in loops for line in lines if STACK.search(line)]


@pytest.mark.parametrize("isa", [r for n, r in ROWS.items() if n != "portable"], ids=lambda r: r.name)
@pytest.mark.parametrize("weights", ["Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16"])
@pytest.mark.parametrize("tokens", [1, 4, 512])
def test_no_spill_in_the_loop(weights: str, tokens: int, isa: Isa) -> None:
    spec = choice.matmul(by_name(weights), isa, 2048, tokens)
    found = spills(emit_assembly(trace(spec, isa), isa))
    assert not found, f"{spec.name} on {isa.name}: {len(found)} vector spills, first {found[0]}"


def test_the_search_finds_a_spill() -> None:
    code = """
.LBB0_1:
\tvmovups\t(%rsp), %zmm3
.LBB0_2:
\tvpdpbusd\t%zmm0, %zmm1, %zmm2
\tvmovups\t%zmm2, 64(%rsp)
\tjne\t.LBB0_2
\tjmp\t.LBB0_1
"""
    assert spills(code) == ["vmovups\t%zmm2, 64(%rsp)"]
