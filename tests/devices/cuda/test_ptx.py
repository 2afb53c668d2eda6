"""Kernels as PTX, and through NVIDIA's assembler as a card's machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices.cuda.ptxas import assemble
from treadle.devices.cuda.ptx import emit_ptx, trace
from treadle.formats import FORMATS, by_name
from treadle.isa import nvptx
from treadle.isa.isa import Isa
from treadle.jit.kernel import CompileStats, symbol
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.elementwise.elementwise import Embed, Norm
from treadle.kernels.matmul import select
from treadle.kernels.spec import Spec

ROWS = [nvptx.SM_80, nvptx.SM_90]
# Of kernels that a thread does by itself: what reads weights, pages and records.
GENERIC: list[Spec] = [
    Norm("f32", 352, 1, 1e-5),
    Embed("Q4_K", 512),
    Merge(4, 8, 1, 64),
    select.gemm(by_name("Q4_0"), nvptx.SM_80, 352),
    select.gemv(by_name("F16"), nvptx.SM_80, 352, 1),
]


def test_a_card_gets_the_best_row_that_it_can_run() -> None:
    assert nvptx.row(7, 5) is None
    assert nvptx.row(8, 6) is nvptx.SM_80
    assert nvptx.row(8, 9) is nvptx.SM_80
    assert nvptx.row(9, 0) is nvptx.SM_90
    assert nvptx.row(12, 0) is nvptx.SM_90


@pytest.mark.slow  # ptxas comes with the extra dev
@pytest.mark.parametrize("isa", ROWS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("spec", GENERIC, ids=lambda spec: spec.op)
def test_kernels_of_a_thread_assemble(spec: Spec, isa: Isa, tmp_path: Path) -> None:
    assert assemble(spec, isa, tmp_path).spills == 0


def test_memory_is_global_and_bytes_move_in_words() -> None:
    """A pointer that a kernel has read is one to global memory, and no byte is shifted alone."""
    text = emit_ptx(Embed("Q4_0", 64), nvptx.SM_80)
    assert f".visible .entry {symbol(Embed('Q4_0', 64))}(" in text
    assert "ld.global" in text
    assert "ld.b8 " not in text  # of any memory, which is slower
    assert "lshr <16 x i8>" not in trace(Embed("Q4_0", 64), nvptx.SM_80)


@pytest.mark.slow  # ptxas comes with the extra dev
def test_a_lookup_is_byte_permutes(tmp_path: Path) -> None:
    """Five for four codes."""
    ops = assemble(Embed("IQ4_NL", 32), nvptx.SM_80, tmp_path).opcodes()
    assert ops["PRMT"] >= 5 * 32 // 4
    assert "BRX" not in ops  # no table of jumps


def test_ptx_is_kept_in_the_cache() -> None:
    spec = Norm("f32", 96, 1, 1e-5)
    tally = CompileStats()
    first = emit_ptx(spec, nvptx.SM_80, tally)
    assert emit_ptx(spec, nvptx.SM_80, tally) == first
    assert (tally.n_compiled, tally.n_cached) == (1, 1)
    assert emit_ptx(spec, nvptx.SM_90) != first


def test_activations_stay_floats_in_plain_rows() -> None:
    """Whatever the format; of BF16 and of codes in bf16 where there are many tokens."""
    for fmt in FORMATS.values():
        few = select.matmul(fmt, nvptx.SM_80, 512, 1).layout()
        many = select.matmul(fmt, nvptx.SM_80, 512, 512).layout()
        assert (few.kind, few.group) == ("f32", 1), fmt.name
        narrow = fmt.codes is not None or fmt.act == "bf16"
        assert (many.kind, many.group) == ("bf16" if narrow else "f32", 1), fmt.name


def test_16_bit_fields_lie_at_even_bytes() -> None:
    """The row says that a scalar is aligned to its size: so is each field of every format."""
    for fmt in FORMATS.values():
        for name in fmt.dtype.names or ():
            size = fmt.dtype[name].base.itemsize
            (_, offset) = fmt.place(name)
            if size == 2:
                assert offset % 2 == 0, (fmt.name, name)
                assert fmt.dtype.itemsize % 2 == 0, fmt.name
