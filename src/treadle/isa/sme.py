"""64-bit Arm's Scalable Matrix Extension, on streaming vectors of 512 bits: registers of sums are
the four tiles of its array ZA, and a product adds a column of dwords times a row of them, 16 by 16.

In streaming mode a core has these vectors and the array, and most of NEON is illegal. So code that
multiplies is a function of its own (``scope``), which enters the mode and leaves it; LLVM keeps
what the caller has in registers. There are no registers for operands: one is where it was read
from, and a dot reads it there, rows of the right one and columns of the left one. The left one's
columns lie as rows after ``turn``.

ZA is turned on and off without a look at what a caller keeps there: Python's threads and treadle's
own keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.isa.isa import MatrixUnit
from treadle.jit.language import Builder, Operand, Val
from treadle.jit.types import Ty, bf16, boolean, i32, i64, ptr

SME = "llvm.aarch64.sme"
LENGTH = 512  # bits of a streaming vector
SIDE = LENGTH // 32  # rows of a tile, and dwords
LEFT, RIGHT = 4, 6  # the first two operands, rows of a and of b
EVERY = 31  # a pattern of ``ptrue``: all lanes
SLOT = 16  # bytes: of an operand where it is, and how far its rows are apart


def _every_lane(k: Builder, lanes: int) -> Any:
    ty = boolean.scalable(lanes)
    return k.call(f"llvm.aarch64.sve.ptrue.{ty.mangled}", ty, [k.const(EVERY, i32).ir]).ir


def _move(k: Builder, how: str, tile: int, p: Val, stride: Operand) -> None:
    """Slices of a tile, in their order, from or to rows of memory."""
    every, number = _every_lane(k, 4), k.const(tile, i32).ir
    with k.loop(SIDE) as i:
        k.call(f"{SME}.{how}", None, [every, (p + i * stride).ir, number, i.to(i32).ir])


def _slot(k: Builder, r: int) -> Val:
    return k.room(4 * SLOT, "operands") + (r - LEFT) * SLOT


def begin(k: Builder, p: Val) -> None:
    """Nothing: ``scope`` does it."""


def end(k: Builder) -> None:
    """Nothing."""


def scope(k: Builder, name: str, args: Sequence[Val], build: Callable[..., None]) -> None:
    """A function whose body is in streaming mode and has ZA."""

    def streaming(k: Builder, *args: Val) -> None:
        k.call(f"{SME}.za.enable", None, [])
        build(k, *args)
        k.call(f"{SME}.za.disable", None, [])

    k.outlined(name, args, streaming, ('"aarch64_pstate_sm_body"',))


def zero(k: Builder, r: int) -> None:
    """``zero``: a tile of dwords is every fourth of eight of 64 bits."""
    k.call(f"{SME}.zero", None, [k.const(0x11 << r, i32).ir])


def load(k: Builder, r: int, p: Val, stride: int) -> None:
    """``ld1w`` of sums; of an operand a note of where it is."""
    if r < LEFT:
        _move(k, "ld1w.horiz", r, p, stride)
        return
    k.store(_slot(k, r), p, align=8)
    k.store(_slot(k, r), k.i64(stride), offset=8, align=8)


def store(k: Builder, r: int, p: Val, stride: Operand) -> None:
    """``st1w``."""
    _move(k, "st1w.horiz", r, p, stride)


def dots_bf16(k: Builder) -> None:
    """``bfmopa``: for each pair of values, four outer products of what is loaded once."""
    ty: Ty = bf16.scalable(8)
    every = _every_lane(k, 8)

    def line(r: int, at: int) -> Any:
        p, stride = k.load(_slot(k, r), ptr, align=8), k.load(_slot(k, r), i64, offset=8, align=8)
        return k.load(p + stride * at, ty).ir

    for at in range(SIDE):
        left, right = ([line(first + i, at) for i in range(2)] for first in (LEFT, RIGHT))
        for c in range(4):
            args = [k.const(c, i32).ir, every, every, left[c // 2], right[c % 2]]
            k.call(f"{SME}.mopa.wide.{ty.mangled}", None, args)


def turn(k: Builder, p: Val, stride: int) -> None:
    """Through a tile: rows in, columns out."""
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
