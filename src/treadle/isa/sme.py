"""``MatrixUnit`` by 64-bit Arm's Scalable Matrix Extension, with streaming vectors of 512 bits.

The four accumulators are the four tiles of the array ZA. A product adds a column of dwords times a
row of dwords, 16 by 16.

In streaming mode a core has these vectors and the array, and most of NEON is illegal. So code that
multiplies is a function of its own (``scope``), which enters and leaves the mode; LLVM saves the
caller's registers. There are no registers for operands: loading one records its address, and a dot
reads it from memory, rows of the right operand and columns of the left one. ``turn`` stores the
left one's columns as rows.

ZA is turned on and off without saving it for a caller: neither Python's threads nor treadle's use
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.isa.isa import MatrixUnit
from treadle.jit.types import Ty, bf16, boolean, i32, i64, ptr

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Operand, Val

SME = "llvm.aarch64.sme"
LENGTH = 512  # bits of a streaming vector
SIDE = LENGTH // 32  # rows of a tile, and dwords in a row
LEFT = 4  # rows of a: the first operand
RIGHT = 6  # rows of b: the second operand
EVERY = 31  # a pattern of ``ptrue``: all lanes
SLOT = 16  # bytes of a slot: an operand's address and its row stride


def _every_lane(k: Builder, lanes: int) -> Any:
    ty = boolean.scalable(lanes)
    return k.call(f"llvm.aarch64.sve.ptrue.{ty.mangled}", ty, [k.const(EVERY, i32).ir]).ir


def _move(k: Builder, how: str, tile: int, p: Val, stride: Operand) -> None:
    """Load or store the 16 slices of matrix register ``tile``, in order, from or to rows of memory
    at ``p``, ``stride`` bytes apart. ``how``: the name of the intrinsic.
    """
    every = _every_lane(k, 4)
    number = k.const(tile, i32).ir
    with k.loop(SIDE) as i:
        k.call(f"{SME}.{how}", None, [every, (p + i * stride).ir, number, i.to(i32).ir])


def _slot(k: Builder, r: int) -> Val:
    return k.room(4 * SLOT, "operands") + (r - LEFT) * SLOT


def begin(k: Builder, p: Val) -> None:
    """Implement ``MatrixUnit.begin``: emit nothing; ``scope`` acquires the registers."""


def end(k: Builder) -> None:
    """Implement ``MatrixUnit.end``: emit nothing."""


def scope(k: Builder, name: str, args: Sequence[Val], build: Callable[..., None]) -> None:
    """Implement ``MatrixUnit.scope``: emit ``build`` as a function whose body is in streaming mode
    with ZA enabled.
    """

    def streaming(k: Builder, *args: Val) -> None:
        k.call(f"{SME}.za.enable", None, [])
        build(k, *args)
        k.call(f"{SME}.za.disable", None, [])

    k.outlined(name, args, streaming, ('"aarch64_pstate_sm_body"',))


def zero(k: Builder, r: int) -> None:
    """Implement ``MatrixUnit.zero`` with the instruction ``zero``: a tile of dwords is two of the
    eight tiles of 64 bits, four apart.
    """
    k.call(f"{SME}.zero", None, [k.const(0x11 << r, i32).ir])


def load(k: Builder, r: int, p: Val, stride: int) -> None:
    """Implement ``MatrixUnit.load``: load sums with ``ld1w``; for an operand, only record its
    address and stride.
    """
    if r < LEFT:
        _move(k, "ld1w.horiz", r, p, stride)
        return
    k.store(_slot(k, r), p, align=8)
    k.store(_slot(k, r), k.i64(stride), offset=8, align=8)


def store(k: Builder, r: int, p: Val, stride: Operand) -> None:
    """Implement ``MatrixUnit.store`` with ``st1w``."""
    _move(k, "st1w.horiz", r, p, stride)


def dots_bf16(k: Builder) -> None:
    """Implement ``MatrixUnit.dots_bf16`` with ``bfmopa``: for each pair of values of K, four outer
    products of operands loaded once.
    """
    ty: Ty = bf16.scalable(8)
    every = _every_lane(k, 8)

    def line(r: int, at: int) -> Any:
        p = k.load(_slot(k, r), ptr, align=8)
        stride = k.load(_slot(k, r), i64, offset=8, align=8)
        return k.load(p + stride * at, ty).ir

    for at in range(SIDE):
        left, right = ([line(first + i, at) for i in range(2)] for first in (LEFT, RIGHT))
        for c in range(4):
            args = [k.const(c, i32).ir, every, every, left[c // 2], right[c % 2]]
            k.call(f"{SME}.mopa.wide.{ty.mangled}", None, args)


def turn(k: Builder, p: Val, stride: int) -> None:
    """Implement ``MatrixUnit.turn`` through a tile: load rows, store columns."""
    _move(k, "ld1w.horiz", 0, p, stride)
    _move(k, "st1w.vert", 0, p, stride)


MATRIX = MatrixUnit(
    begin=begin,
    end=end,
    zero=zero,
    load=load,
    load_passing=load,
    store=store,
    dots_bf16=dots_bf16,
    scope=scope,
    turn=turn,
)
