"""``MatrixUnit`` by Intel's Advanced Matrix Extensions: eight registers of 16 rows of 64 bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.isa import portable
from treadle.isa.isa import MatrixUnit
from treadle.jit.types import i8, i64, u8

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Operand, Val


def _config(n: int) -> list[int]:
    """Return the 64 bytes of a tile configuration: palette 1; from byte 16 on the bytes a row of
    each register (16 bits each); from byte 48 on the rows of each register. Registers of a have
    ``n`` bytes a row, those of b ``n / 4`` rows; all others are full.
    """
    columns = [64] * 4 + [n] * 2 + [64] * 2
    rows = [16] * 6 + [n // 4] * 2
    out = [1, *[0] * 63]
    for r in range(8):
        out[16 + 2 * r], out[48 + r] = columns[r], rows[r]
    return out


def _call(k: Builder, name: str, args: list[Any]) -> None:
    k.call(f"llvm.x86.{name}", None, args)


def _register(k: Builder, r: int) -> Any:
    return k.const(r, i8).ir


def begin(k: Builder, p: Val) -> None:
    """Implement ``MatrixUnit.begin`` with ``ldtilecfg``: all registers have 16 rows of 64 bytes.
    ``p``: 64 writable bytes, for the configuration.
    """
    begin_bytes(k, p, 64)


def begin_bytes(k: Builder, p: Val, n: int) -> None:
    """Implement ``MatrixUnit.begin_bytes`` with ``ldtilecfg``: registers of a have rows of ``n``
    bytes, those of b ``n / 4`` rows. ``p``: 64 writable bytes, for the configuration.
    """
    k.store(p, k.const(_config(n), u8 * 64))
    _call(k, "ldtilecfg", [p.ir])


def end(k: Builder) -> None:
    """Implement ``MatrixUnit.end`` with ``tilerelease``: the next thread on this core need not save
    the registers.
    """
    _call(k, "tilerelease", [])


def zero(k: Builder, r: int) -> None:
    """Implement ``MatrixUnit.zero`` with ``tilezero``."""
    _call(k, "tilezero", [_register(k, r)])


def load(k: Builder, r: int, p: Val, stride: int) -> None:
    """Implement ``MatrixUnit.load`` with ``tileloadd``."""
    _call(k, "tileloadd64", [_register(k, r), p.ir, k.i64(stride).ir])


def load_passing(k: Builder, r: int, p: Val, stride: int) -> None:
    """Implement ``MatrixUnit.load_passing`` with ``tileloaddt1``."""
    _call(k, "tileloaddt164", [_register(k, r), p.ir, k.i64(stride).ir])


def store(k: Builder, r: int, p: Val, stride: Operand) -> None:
    """Implement ``MatrixUnit.store`` with ``tilestored``."""
    _call(k, "tilestored64", [_register(k, r), p.ir, k.val(stride, i64).ir])


def dots_bf16(k: Builder) -> None:
    """Implement ``MatrixUnit.dots_bf16`` with ``tdpbf16ps``."""
    for c in range(4):
        _call(k, "tdpbf16ps", [_register(k, r) for r in (c, 4 + c // 2, 6 + c % 2)])


def dot_bytes(k: Builder, c: int, a: int, b: int) -> None:
    """Implement ``MatrixUnit.dot_bytes`` with ``tdpbssd``."""
    _call(k, "tdpbssd", [_register(k, r) for r in (c, a, b)])


MATRIX = MatrixUnit(
    begin=begin,
    end=end,
    zero=zero,
    load=load,
    load_passing=load_passing,
    store=store,
    dots_bf16=dots_bf16,
    scope=portable.matrix_scope,
    begin_bytes=begin_bytes,
    dot_bytes=dot_bytes,
    ordered=True,
    float_tokens=4,
    parts=3,
)
