"""The shipped tiles multiply out of registers: what their loops move to the stack is counted here.

A q8 tile of gemm may keep some of its f32 sums in L1, where a block of 32 values touches each
once; that costs nothing up to one move for ten multiplies (measured: 2 x 8 with 11 moves runs at
570 GOP/s, 2 x 5 with none at 535). LLVM's scheduler, let loose on an unrolled block, makes more
moves than multiplies. Decoding walks eight rows for the sake of memory, more than sixteen registers
hold; four rows without a spill are no faster there. A tile of 2 x 4 in sixteen registers has its
dots there and its sums in L1: Zen 3 reads Q4_K by 2 x 4 at 187 GOP/s, by 1 x 4, which moves
nothing, at 152. All else keeps everything in registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from treadle.formats import FORMATS, Format, by_name
from treadle.formats.mlx import BITS, GROUPS, mlx
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.jit.builder import Builder
from treadle.jit.compile import emit_assembly
from treadle.jit.kernel import symbol, trace
from treadle.jit.types import i8
from treadle.jit.values import Val
from treadle.kernels.activation_layout import BLOCK, DWORD, WORDS, ActivationLayout
from treadle.kernels.matmul import gemm, select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.panel import code_size

LABEL = re.compile(r"^([.\w]+):")
JUMP = re.compile(r"^\t(?:j\w*|b[\w.]*|cbn?z)\t(?:.*, )?([.\w]+)$")
X86 = r"vpdpbusd|v?pmadd(?:wd|ubsw)|vdpbf16ps|tdpbf16ps|vfn?madd\w+|mulps"
ARM = r"smull2?|u?sdot|u?smmla|bfdot|fmla|bfmopa"
RISCV = r"vfmacc\.v[fv]|vfwmaccbf16\.vv|vqdot\w*\.vv|vw(?:mul|macc)\w*\.v[vx]"
MULTIPLY = re.compile(rf"\t({X86}|{ARM}|{RISCV})\t")
# What RISC-V's tiles multiply by, and packing does not: it interleaves by vwmaccu.
IN_TILES = re.compile(r"\t(vfmacc\.vf|vwmacc(su|us)?\.vx|vfwmaccbf16\.vv|vqdot\w*\.vv)\t")
# Vectors on the stack: RISC-V's are moved as whole registers, by way of an address that is made of
# the stack pointer just before.
STACK = re.compile(r"[xyz]mm\d+.*\(%rsp\)|\(%rsp\).*[xyz]mm\d+|\t(ld|st)[rp]\tq.*\[sp")
# The frame pointer: an address in the stack where a function makes it of the stack pointer, a
# register like any other where it does not.
FRAME = re.compile(r"\t(?:mov|add)\tx29, sp|\tmovq\t%rsp, %rbp|\tleaq\t.*\(%rsp\), %rbp")
BY_FRAME = re.compile(r"[xyz]mm\d+.*\(%rbp\)|\(%rbp\).*[xyz]mm\d+|\t(ld|st)[rp]\tq.*\[x29")
WHOLE = re.compile(r"\tv[ls]\dr\w*\.v\t\w+, \((\w+)\)")
WRITES = re.compile(r"\t(?!s[bhwd]\t|v|b|f?s[wd]\t)\w+\t(\w+), (.*)")


def on_stack(lines: list[str]) -> Iterator[str]:
    """Those that move a vector to the stack or from it."""
    stack = {"sp"}
    for line in lines:
        if STACK.search(line) or ((m := WHOLE.search(line)) and m[1] in stack):
            yield line.strip()
        elif m := WRITES.match(line):
            made = stack & set(re.findall(r"\w+", m[2]))
            stack = stack | {m[1]} if made else stack - {m[1]} | {"sp"}


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


def spills(code: str, multiply: re.Pattern[str] = MULTIPLY) -> tuple[list[str], int]:
    """Vector moves to or from the stack in innermost loops that multiply, and their multiplies."""
    loops = [
        lines for lines in innermost_loops(code) if any(multiply.search(line) for line in lines)
    ]
    assert loops, "no loop multiplies"
    lines = [line for loop in loops for line in loop]
    multiplies = sum(1 for line in lines if MULTIPLY.search(line))
    moves = [move for loop in loops for move in on_stack(loop)]
    if FRAME.search(code):
        moves += [line.strip() for line in lines if BY_FRAME.search(line)]
    return moves, multiplies


def kept_in_memory(spec: Gemm, isa: Isa) -> int:
    """Moves of what 16 registers do not hold beside a tile's dots, and L1 does as fast: sums in
    f32, there and back once for every scale; where dots are added up in i16 more than once for a
    scale, those in i32 as well.
    """
    codes = spec.fmt.codes
    if spec.act in WORDS:
        return 2 * spec.mr * spec.nr
    if codes is None or isa.regs > 16 or spec.unit != DWORD or isa.vector_bits < 256:
        return 0
    kinds = 1
    if isa.shorts is not None and (room := isa.shorts.room(code_size(codes, isa))):
        kinds += 1 < room < codes.sub // 4
    return 2 * spec.mr * spec.nr * (BLOCK // codes.sub) * kinds


def pack_nothing(k: Builder, act: ActivationLayout, panel: Val, *_: object) -> None:
    """In place of packing, which is most of the code: a call all the same."""
    k.store(panel, k.const(0, i8))


ARCHITECTURES = sorted({isa.triple for isa in ROWS.values()})


@pytest.mark.parametrize("triple", ARCHITECTURES, ids=lambda t: t.partition("-")[0] or "x86_64")
@pytest.mark.parametrize("weights", ["Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16"])
@pytest.mark.parametrize("tokens", [1, 512])
def test_sums_stay_in_registers(
    weights: str, tokens: int, triple: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every row of an architecture but the portable one. Rows whose kernels have the same IR
    share its machine code: a third of them.
    """
    compiled: dict[tuple[str, str, int], str] = {}
    for isa in ROWS.values():
        if isa.triple != triple or isa.name == "portable":
            continue
        spec = select.matmul(by_name(weights), isa, 2048, tokens)
        tiled = isinstance(spec, Gemm) and isa.triple.startswith("riscv64")
        with monkeypatch.context() as patch:
            if tiled:  # packing is none of these loops, and takes six times as long to compile
                patch.setattr(gemm, "emit_pack", pack_nothing)
            text = trace(spec, isa)
        # Registers of RISC-V are as long as features say.
        key = text.replace(symbol(spec), "tile"), isa.cpu, isa.vector_bits
        if key not in compiled:
            compiled[key] = emit_assembly(text, isa)
        found, multiplies = spills(compiled[key], IN_TILES if tiled else MULTIPLY)
        allowed = 0
        if spec.act in ("q8", *WORDS):
            allowed = 2 * multiplies if isa.regs < 32 else 0
            if isinstance(spec, Gemm):
                allowed = multiplies // 10 + kept_in_memory(spec, isa)
        what = f"{spec.name} on {isa.name}: {len(found)} vector moves for {multiplies} multiplies"
        assert len(found) <= allowed, f"{what}, first {found[0]}"


def kinds() -> dict[str, Format]:
    """A format of each kind that tiles can tell apart."""
    every = [*FORMATS.values(), *(mlx(bits, 64, "F16") for bits in BITS)]
    seen = {
        (c.offset, c.top, c.sub, c.m_sub, c.has_m, c.long_scales, c.folded is None): f
        for f in reversed(every)
        if (c := f.codes)
    }
    return {f.name: f for f in seen.values()}


KINDS = kinds()


def rows_of_codes() -> list[Isa]:
    """A row of each kind that a tile of codes can tell apart, portable's alone left out."""

    def kind(isa: Isa) -> tuple[object, ...]:
        ops = isa.dot4, isa.pairs, isa.widen_f16, isa.lookup, isa.bit_extract, isa.multishift
        tiles = isa.tiles.bytes, isa.tiles.bytes16, isa.tiles.unit
        return isa.triple, isa.vector_bits, isa.regs, *ops, *tiles

    return list({kind(r): r for n, r in reversed(ROWS.items()) if n != "portable"}.values())


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows_of_codes(), ids=lambda r: r.name)
def test_no_tile_of_any_format_spills(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the sums in f32 that a tile of dots touches once for every scale. Plain NEON makes a
    dot of four instructions, and LLVM lets those of neighbours overlap: it may move more. Formats
    whose tiles have the same IR share its machine code.
    """
    monkeypatch.setattr(gemm, "emit_pack", pack_nothing)
    compiled: dict[str, tuple[list[str], int]] = {}
    for fmt in KINDS.values():
        spec = select.gemm(fmt, isa, 2048, matrix=False)
        assert spec.fmt.codes is not None
        text = trace(spec, isa).replace(symbol(spec), "tile")
        if text not in compiled:
            compiled[text] = spills(emit_assembly(text, isa))
        found, multiplies = compiled[text]
        part = 10 if spec.fmt.codes.sub == BLOCK else 5
        allowed = multiplies // (3 if isa.name == "neon" else part) + kept_in_memory(spec, isa)
        what = f"{spec.name} on {isa.name}: {len(found)} vector moves for {multiplies} multiplies"
        assert len(found) <= (allowed if spec.unit == DWORD else 0), f"{what}, first {found[:1]}"


@pytest.mark.parametrize("isa", ["avx2", "avx512_vnni"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_streams_of_bits_are_not_moved_byte_by_byte(bits: int, group: int, isa: str) -> None:
    """What LLVM does with a shuffle that it has no instruction for: five times slower."""
    for tokens in (1, 512):
        spec = select.matmul(mlx(bits, group, "F16"), ROWS[isa], 2048, tokens)
        code = emit_assembly(trace(spec, ROWS[isa]), ROWS[isa])
        assert len(re.findall(r"\tv?p(insr|extr)b\t", code)) <= 16, spec.name


def test_the_search_finds_a_spill_of_a_whole_register() -> None:
    code = """
.LBB0_1:
\taddi\ta0, sp, 16
\tadd\ta1, a0, a2
\tvl1r.v\tv8, (a1)
\tvl1r.v\tv9, (a3)
\tld\ta1, 8(a4)
\tvl1r.v\tv10, (a1)
\tvwmacc.vx\tv12, a5, v8
\tbne\ta3, a6, .LBB0_1
"""
    assert spills(code) == (["vl1r.v\tv8, (a1)"], 1)


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
    assert spills(code) == (["vmovups\t%zmm2, 64(%rsp)"], 1)
