"""Every kernel through every row, as object code: for x86 rows that this machine may lack, and
for other machines.

The portable row is emitted for aarch64 and riscv64 as well, as proof that nothing of x86 has
leaked into a kernel.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import fields, replace
from math import prod

import pytest

from tests.kernels import registry
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE
from treadle.isa.riscv import LENGTHS
from treadle.jit.compile import emit_assembly, emit_object
from treadle.jit.kernel import symbol, trace
from treadle.kernels.activation_layout import WORDS
from treadle.kernels.attention.paged import Attention
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.quantize.k_search import SearchKernel
from treadle.kernels.spec import Spec

AARCH64 = replace(PORTABLE, name="aarch64", triple="aarch64-unknown-linux-gnu")
RISCV64 = replace(
    PORTABLE,
    name="riscv64",
    triple="riscv64-unknown-linux-gnu",
)
# Without the vector extension LLVM takes every vector apart, which takes long: the smallest kernel
# of each kind shows that it can.
RISCV64_V = replace(RISCV64, features="+v")
EM = {"aarch64": 183, "riscv64": 243}
PORTABLE_SPECS = [
    s
    for s in registry.ALL
    if not (isinstance(s, Matmul) and s.act in ("bf16", *WORDS))
    and not getattr(s, "matrix", False)
    and not getattr(s, "words", False)
    and not isinstance(s, (MatrixGemm, BytesGemm))
]


def size(spec: Spec) -> int:
    """A tile's by a row's by whatever else there is of it."""
    numbers = (getattr(spec, field.name) for field in fields(spec))
    return prod(n for n in numbers if type(n) is int and n > 1)


ONE_OF_EACH = list({type(s): s for s in sorted(PORTABLE_SPECS, key=size)[::-1]}.values())
# LLVM takes a quarter of a second for each: one of each kind here, and every 25th; all of them in
# ``make emulated``. Kernels of one kind emit the same operations, in other numbers.
EVERYTHING = os.environ.get("TREADLE_EMULATED") == "all"
EMITTED = [
    spec for i, spec in enumerate(PORTABLE_SPECS) if EVERYTHING or spec in ONE_OF_EACH or not i % 25
]


def check_elf(code: bytes, machine: int, name: str) -> None:
    """A relocatable little-endian ELF64 file of ``machine`` that defines ``name`` and has code."""
    assert code[:6] == b"\x7fELF\x02\x01"
    kind, found = struct.unpack_from("<HH", code, 16)
    assert (kind, found) == (1, machine)
    (table,) = struct.unpack_from("<Q", code, 40)
    entry_size, n, _ = struct.unpack_from("<HHH", code, 58)
    assert table + entry_size * n <= len(code)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * entry_size) for i in range(n)]
    assert any(s[1] == 1 and s[2] & 4 and s[5] > 0 for s in sections), "no executable section"
    symbols = next(s for s in sections if s[1] == 2)
    strings = sections[symbols[6]]
    defined: set[str] = set()
    missing: set[str] = set()
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        offset, _, _, section = struct.unpack_from("<IBBH", code, at)
        start = strings[4] + offset
        found_name = code[start : code.index(b"\0", start)].decode()
        (defined if section else missing).add(found_name)
    assert name in defined
    # Position-independent code may name the table of offsets; a kernel calls nothing.
    assert missing <= {"", "_GLOBAL_OFFSET_TABLE_"}, missing


@pytest.mark.slow
@pytest.mark.parametrize("spec", EMITTED, ids=registry.name)
def test_portable_kernels_are_emitted_for_other_machines(spec: Spec) -> None:
    text = trace(spec, AARCH64)
    assert "llvm.x86" not in text
    assert text == trace(spec, RISCV64), "the portable IR depends on the machine"
    of_each = [AARCH64, RISCV64 if spec in ONE_OF_EACH else RISCV64_V]
    # One text for both: of each kind one kernel is compiled for both, further ones in turns. So are
    # searches: their text is longer than that of all others, and has the same operations.
    every = EVERYTHING or (spec in ONE_OF_EACH and not isinstance(spec, SearchKernel))
    for isa in of_each if every else of_each[EMITTED.index(spec) % 2 :][:1]:
        check_elf(emit_object(text, isa), EM[isa.name], symbol(spec))


BLOCKS = Gemm("Q8_0", "q8", 352, 2, 2)
LANES = Gemm("Q8_0", "q8", 352, 2, 4)
NIBBLES = Gemm("Q4_0", "q8", 352, 2, 2)
FIFTHS = Gemv("Q5_0", "q8", 352, 4, 1)
STEPS = Gemv("IQ4_NL", "q8", 352, 4, 1)
HALVES = Gemm("F16", "f32", 172, 2, 4)
BRAINS = Gemm("BF16", "bf16", 172, 2, 4)
OUTER = Gemm("Q4_0", "q8", 352, 8, 6, unit=1)
OUTER_BYTES = Gemm("Q8_0", "q8", 352, 4, 6, unit=1)
PAIRS = Gemm("Q8_0", "q8", 352, 2, 8, unit=8)
PAIRS_UNSIGNED = Gemm("MLX8_G64", "q8", 704, 2, 8, unit=8)
MATRIX = MatrixGemm("Q8_0", "bf16", 352, 2, 32)
MATRIX_128 = MatrixGemm("Q8_0", "bf16", 352, 8, 32)
INSTRUCTIONS: dict[str, dict[Spec, list[str]]] = {
    "portable": {BLOCKS: ["pmaddwd"], NIBBLES: ["pmaddwd"]},
    "neon": {BLOCKS: ["smull", "sadalp"], HALVES: ["fcvtl", r"fmla.*s\[3\]"], STEPS: ["tbl"]},
    "neon_dotprod": {LANES: [r"\tsdot.*4b\[3\]"], FIFTHS: [r"\tsdot"]},
    "neon_i8mm": {
        LANES: [r"usdot.*4b\[3\]"],
        FIFTHS: ["usdot"],
        PAIRS: [r"\tsmmla"],
        PAIRS_UNSIGNED: [r"\tusmmla"],
    },
    "neon_bf16": {BRAINS: ["bfdot"], BLOCKS: ["usdot"]},
    "sme": {
        MATRIX_128: [r"\tbfmopa\tza3\.s", r"\tst1w\t\{za0v\.s", r"\tsmstart\tsm"],
        BLOCKS: ["usdot"],
    },
    **{
        f"rvv{length}{more}": {
            HALVES: [r"vfmacc\.vf", *f16],
            OUTER: [r"vwmacc\.vx", r"vfwcvt\.f\.x\.v"],
            OUTER_BYTES: [r"vwmacc\.vx"],
        }
        for length in LENGTHS
        for more, f16 in (("", []), ("_zvfh", [r"vfwcvt\.f\.f\.v"]))
    },
    "rvv256_zvfbfwma": {BRAINS: [r"vfwmaccbf16\.vv"]},
    "rvv256_vqdot": {BLOCKS: [r"vqdotsu\.vv"], FIFTHS: [r"vqdotsu\.vv"]},
    "avx2": {
        BLOCKS: ["vpsignb", "vpmaddwd"],
        NIBBLES: ["vpmaddubsw", "vpaddw"],
        HALVES: ["vcvtph2ps", "vfmadd"],
    },
    "avx2_vnni": {BLOCKS: [r"vpdpbusd.*ymm"], NIBBLES: ["vpdpbusd"]},
    "avx512": {
        BLOCKS: ["vpmovb2m", "vpmaddwd.*zmm"],
        NIBBLES: ["vpmaddubsw.*zmm", "vpaddw.*zmm"],
        HALVES: ["vfmadd.*zmm"],
    },
    "avx512_vnni": {BLOCKS: [r"vpdpbusd.*zmm"]},
    "avx512_vbmi": {NIBBLES: ["vgf2p8affineqb"], FIFTHS: ["vpmultishiftqb"], STEPS: ["vpermb"]},
    "amx_bf16": {MATRIX: ["tdpbf16ps", "vcvtne2ps2bf16"], NIBBLES: ["vgf2p8affineqb"]},
    "avx512_bf16": {BLOCKS: [r"vpdpbusd.*zmm"], BRAINS: [r"vdpbf16ps.*zmm"]},
}


def test_every_row_is_listed() -> None:
    assert set(INSTRUCTIONS) == set(ROWS)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_rows_use_their_instructions_and_no_others(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    isa = ROWS[name]
    for spec, wanted in INSTRUCTIONS[name].items():
        code = emit_assembly(trace(spec, isa), isa)
        for pattern in wanted:
            assert re.search(pattern, code), f"{spec.name} on {name} has no {pattern}"
        wider = {128: "%[yz]mm", 256: "%zmm", 512: "%tmm"}[isa.vector_bits]
        wider = "" if spec is MATRIX else wider
        assert not wider or not re.search(wider, code), f"{spec.name} on {name} uses {wider}"
    # LLVM only warns of a feature that it does not know, and then compiles without it.
    assert "not a recognized" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "spec", [Attention("f16", 8, 2, 64, 1), Gemv("F16", "f32", 172, 4, 1)], ids=registry.name
)
def test_portable_needs_no_more_than_x86_64(spec: Spec) -> None:
    """SSE2 is all that an x86-64 must have; LLVM would fill in the host's features where none are
    given.
    """
    code = emit_assembly(trace(spec, PORTABLE), PORTABLE)
    assert not re.search(
        r"\t(v[a-z]|pshufb|pmulld|pblend|blendv|round|insertps|pinsr[bdq]|pextr[bdq])", code
    )


@pytest.mark.parametrize("row", list(ROWS.values()), ids=lambda row: row.name)
def test_pause_leaves_the_loop(row: Isa) -> None:
    from tests.jit.emit import ir_text
    from treadle.jit.builder import Builder
    from treadle.jit.types import i64
    from treadle.jit.values import Val

    def build(k: Builder, n: Val) -> None:
        with k.loop(k.load(n, i64)):
            row.pause(k)

    code = emit_assembly(ir_text(row, 1, build), row)
    assert re.search(r"\t(j[a-z]*|b[a-z.]*)\t", code), "the loop was removed"
