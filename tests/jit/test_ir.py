"""LLVM's IR as text: numbers beside llvmlite's, and what LLVM makes of modules."""

from __future__ import annotations

import math
import struct

import llvmlite.binding as llvm
import pytest
from llvmlite import ir as theirs

from treadle.jit import ir

FLOATS = [0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, 65504.0, 6e-8, 2.0**-24, math.inf, -math.inf, math.nan]
ZERO = "0x0000000000000000"
KINDS = {"half": theirs.HalfType(), "float": theirs.FloatType(), "double": theirs.DoubleType()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", FLOATS, ids=str)
def test_floats_are_spelt_as_llvmlite_spells_them(kind: str, value: float) -> None:
    mine = str(ir.number(kind, value))
    other = str(theirs.Constant(KINDS[kind], value))
    assert mine.split()[0] == other.split()[0] == kind
    assert int(mine.split()[1], 16) == int(other.split()[1], 16)
    assert len(mine.split()[1]) == len(ZERO)


def test_a_number_too_large_for_its_type_is_refused() -> None:
    with pytest.raises((OverflowError, struct.error)):
        ir.number("half", 65520.0)


@pytest.mark.parametrize("value", [0, 1, -1, 200, 2**31 - 1, -(2**31)])
def test_integers(value: int) -> None:
    assert str(ir.number("i32", value)) == str(theirs.Constant(theirs.IntType(32), value))


def test_zeros_of_either_sign_in_one_vector() -> None:
    made = ir.numbers("float", ir.vector("float", 2), (0.0, -0.0))
    assert str(made) == f"<2 x float> <float {ZERO}, float 0x8000000000000000>"


def writer(module: ir.Module, ret: str = ir.VOID) -> ir.BlockWriter:
    function = module.function("f", ret, ["i32", ir.POINTER])
    return ir.BlockWriter(function, function.block("entry"))


def parsed(module: ir.Module) -> llvm.ModuleRef:
    made = llvm.parse_assembly(str(module), llvm.create_context())
    made.verify()
    return made


def test_what_llvm_reads() -> None:
    """Bytes, memory of an address space, metadata, an intrinsic, attributes of arguments."""
    module = ir.Module()
    b = writer(module, "i32")
    b.function.arg_attributes[1] = "noalias"
    b.function.attributes.append("nounwind")
    data = bytes(range(256))
    table = module.data("t", ir.array_of_bytes(256), "private constant", 64, ir.bytes_text(data))
    far = module.data("far", ir.array_of_bytes(0), "external addrspace(3) global", 16, space=3)
    assert table.type == ir.POINTER
    assert far.type == ir.pointer(3)
    assert [module.note("i32 1"), module.note("i32 2"), module.note("i32 1")] == ["!0", "!1", "!0"]
    loaded = b.made("i32", f"load i32, {table}, align 4, !nontemporal !0")
    for _ in range(2):  # one declaration
        loaded = b.call_named("llvm.abs.i32", "i32", [loaded, ir.number(ir.FLAG, 0)])
    b.end(f"ret {loaded}")
    made = parsed(module)
    assert {f.name: f.is_declaration for f in made.functions} == {"f": False, "llvm.abs.i32": True}
    (f,) = (f for f in made.functions if f.name == "f")
    assert [sorted(map(bytes, a.attributes)) for a in f.arguments] == [[], [b"noalias"]]
    assert b"nounwind" in f.attributes
    assert [g.name for g in made.global_variables] == ["t", "far"]
    assert f'c"{llvm_text(data)}"' in str(made)


def llvm_text(data: bytes) -> str:
    """As LLVM prints bytes: those of letters as such, and a backslash twice."""
    kept = {b: chr(b) for b in range(32, 127)} | {ord("\\"): "\\" * 2, ord('"'): "\\22"}
    return "".join(kept.get(b, f"\\{b:02X}") for b in data)


def test_a_name_is_taken_once() -> None:
    module = ir.Module()
    module.function("f", ir.VOID, [])
    for again in (
        lambda: module.function("f", ir.VOID, []),
        lambda: module.data("f", "i64", "internal global", 8, "0"),
    ):
        with pytest.raises(ValueError, match="the module already defines f"):
            again()


def test_a_block_ends_once() -> None:
    b = writer(ir.Module())
    b.end("ret void")
    with pytest.raises(ValueError, match="block entry0 already ends with"):
        b.end("ret void")
