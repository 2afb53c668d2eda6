"""The loader of objects, in place of LLVM's linker."""

from __future__ import annotations

import ctypes

import pytest

from treadle.isa import choose
from treadle.jit import elf
from treadle.jit.compile import emit_object
from treadle.jit.host import host_features
from treadle.system import HERE, machine

pytestmark = pytest.mark.skipif(
    HERE != "linux" or machine() != "x86_64", reason="another system's objects"
)

COUNTER = """
@count = internal global i64 40
@step = internal global i64 0

define i64 @next() nounwind {
  %a = load i64, ptr @count
  %s = load i64, ptr @step
  %b = add i64 %a, 1
  %t = add i64 %s, 1
  store i64 %b, ptr @count
  store i64 %t, ptr @step
  %c = add i64 %b, %t
  ret i64 %c
}
"""
TABLE = """
@table = internal constant [4 x double] [double 1.0, double 2.5, double 4.0, double 8.0]

define double @get(i64 %i) nounwind {
  %p = getelementptr [4 x double], ptr @table, i64 0, i64 %i
  %x = load double, ptr %p
  %y = fmul double %x, 3.0
  %z = call double @twice(double %y)
  ret double %z
}

define internal double @twice(double %x) noinline nounwind {
  %y = fadd double %x, %x
  ret double %y
}
"""
OUTSIDE = """
declare double @sin(double)

define double @get(double %x) nounwind {
  %y = call double @sin(double %x)
  ret double %y
}
"""


def emitted(text: str) -> bytes:
    return emit_object(text, choose(host_features()))


def test_constants_and_calls() -> None:
    address = elf.load("get", emitted(TABLE))
    assert address is not None
    get = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(address)
    assert [get(i) for i in range(4)] == [6.0, 15.0, 24.0, 48.0]


def test_data_that_is_written() -> None:
    code = emitted(COUNTER)
    counters = []
    for _ in range(2):  # each has data of its own
        address = elf.load("next", code)
        assert address is not None
        counters.append(ctypes.CFUNCTYPE(ctypes.c_int64)(address))
    assert [counters[0](), counters[0](), counters[1]()] == [42, 44, 42]


def test_what_is_left_to_llvm() -> None:
    assert elf.load("get", emitted(OUTSIDE)) is None
    code = emitted(TABLE)
    assert elf.load("missing", code) is None
    assert elf.load("get", b"\x7fELF") is None
    aarch64 = code[:18] + (183).to_bytes(2, "little") + code[20:]
    assert elf.load("get", aarch64) is None


def test_no_part_of_an_object_is_loaded() -> None:
    code = emitted(TABLE)
    assert all(elf.load("get", code[:n]) is None for n in range(0, len(code), 7))
