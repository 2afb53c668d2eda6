"""Typed values of the kernel language, and what their operators emit.

Nothing is promoted silently: mixing types raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from llvmlite import ir

from treadle.jit.types import Ty, boolean, i64, ptr

Binary: TypeAlias = "Callable[[Val, Operand], Val]"


@lru_cache(maxsize=1 << 14)
def constant(ty: Ty, lanes: tuple[float, ...], text: str = "") -> Any:
    """llvmlite's constant, the same object each time: a vector's is one of objects for all lanes,
    and a kernel has thousands. ``text`` tells apart what is equal and not the same.
    """
    if not ty.lanes:
        return ir.Constant(ty.ir, lanes[0])
    scalar = ty.scalar.ir
    return ir.Constant(ty.ir, [ir.Constant(scalar, v) for v in lanes])


class Emitter:
    """What values need of the builder that they belong to; ``b`` is llvmlite's."""

    def __init__(self, b: Any) -> None:
        self.b = b

    def val(self, x: Operand, ty: Ty) -> Val:
        """``x`` as a value: a Python number becomes a constant (splat) of ``ty``."""
        if isinstance(x, Val):
            return x
        if isinstance(x, Var):
            return x.v
        return self.const(x, ty)

    def const(self, x: float | Sequence[float], ty: Ty) -> Val:
        """A constant; a sequence gives each lane its own number."""
        lanes = tuple(x) if isinstance(x, Sequence) else (x,)
        if not ty.is_float:
            made = tuple(int(v) for v in lanes)
            if made != lanes:
                raise TypeError(f"{x} is no {ty}")
            lanes = made
        if not isinstance(x, Sequence):
            lanes *= max(ty.lanes, 1)
        # Zeros of either sign are equal, their texts are not.
        return Val(self, constant(ty, lanes, str(lanes) if ty.is_float else ""), ty)

    def gep(self, p: Val, n_bytes: Operand) -> Val:
        """The pointer ``n_bytes`` further on."""
        off = self.val(n_bytes, i64)
        return Val(self, self.b.gep(p.ir, [off.ir], source_etype=ir.IntType(8)), ptr)


def _operator(sign: str, of_floats: str | None, signed: str | None, unsigned: str | None) -> Binary:
    """What ``sign`` emits, by llvmlite's names; None for kinds of numbers that do not have it."""

    def emit(self: Val, other: Operand) -> Val:
        ty = self.ty
        name = of_floats if ty.is_float else signed if ty.is_signed else unsigned
        if name is None:
            kind, instead = ("floats", "") if ty.is_float else ("integers", ": use //")
            raise TypeError(f"{sign} is not for {kind} ({ty}){instead}")
        # FMAs may form; nothing may be reordered, so every sum has the one order that the source
        # gives it.
        flags = {"flags": ("contract",)} if ty.is_float else {}
        made = getattr(self.k.b, name)(self.ir, self._other(other), **flags)
        return Val(self.k, made, ty)

    return emit


def _reflected(op: Callable[[Val, Val], Val]) -> Binary:
    """``op`` with a number on its left."""
    return lambda self, other: op(self.k.val(other, self.ty), self)


def _comparison(sign: str) -> Binary:
    def emit(self: Val, other: Operand) -> Val:
        b, ty = self.k.b, self.ty
        integers = b.icmp_signed if ty.is_signed or ty == ptr else b.icmp_unsigned
        made = (b.fcmp_ordered if ty.is_float else integers)(sign, self.ir, self._other(other))
        return Val(self.k, made, boolean.like(ty))

    return emit


class Val:
    """A typed run-time value. Arithmetic takes another ``Val`` of the very same type, or a Python
    number.
    """

    __slots__ = ("ir", "k", "ty")

    def __init__(self, k: Emitter, value: Any, ty: Ty) -> None:
        self.k, self.ir, self.ty = k, value, ty

    def __bool__(self) -> bool:
        raise TypeError(f"a run-time value ({self.ty}) in a Python if: use k.if_ or k.select")

    def _other(self, other: Operand) -> Any:
        """The IR of ``other``, as a value of this very type."""
        other = self.k.val(other, self.ty)
        if other.ty != self.ty:
            raise TypeError(f"mixed types: {self.ty} and {other.ty}; convert one with .to()")
        return other.ir

    def __add__(self, other: Operand) -> Val:
        return self.k.gep(self, other) if self.ty == ptr else self._plus(other)

    def __neg__(self) -> Val:
        if self.ty.is_float:
            return Val(self.k, self.k.b.fneg(self.ir), self.ty)
        return 0 - self

    # By llvmlite's names: of floats, of signed and of unsigned integers.
    _plus = _operator("+", "fadd", "add", "add")
    __sub__ = _operator("-", "fsub", "sub", "sub")
    __mul__ = _operator("*", "fmul", "mul", "mul")
    __truediv__ = _operator("/", "fdiv", None, None)
    __floordiv__ = _operator("//", None, "sdiv", "udiv")
    __mod__ = _operator("%", None, "srem", "urem")
    __and__ = _operator("&", None, "and_", "and_")
    __or__ = _operator("|", None, "or_", "or_")
    __xor__ = _operator("^", None, "xor", "xor")
    __lshift__ = _operator("<<", None, "shl", "shl")
    __rshift__ = _operator(">>", None, "ashr", "lshr")
    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rtruediv__ = _reflected(operator.truediv)
    __lt__ = _comparison("<")
    __le__ = _comparison("<=")
    __gt__ = _comparison(">")
    __ge__ = _comparison(">=")
    eq = _comparison("==")  # lane by lane; a method, so that ``==`` keeps its Python meaning

    def to(self, ty: Ty) -> Val:
        """Convert the number: widen by the source's sign, narrow by truncation, round float to
        float.
        """
        if ty.lanes == 0 and self.ty.lanes:
            ty = ty.like(self.ty)
        if ty.lanes != self.ty.lanes:
            raise TypeError(f"{self.ty} to {ty}: the lanes differ; use k.splat or k.shuffle")
        return Val(self.k, _convert(self.k.b, self.ir, self.ty, ty), ty)

    def bits(self, ty: Ty) -> Val:
        """The same bits as another type of the same size."""
        if max(ty.lanes, 1) * ty.bits != max(self.ty.lanes, 1) * self.ty.bits:
            raise TypeError(f"{self.ty} and {ty} differ in size")
        if ty.ir == self.ty.ir:
            return Val(self.k, self.ir, ty)
        return Val(self.k, self.k.b.bitcast(self.ir, ty.ir), ty)


def _convert(b: Any, value: Any, src: Ty, dst: Ty) -> Any:
    """Emit the conversion of ``value`` from ``src`` to ``dst`` (same lanes)."""
    if src.ir == dst.ir:
        return value
    if src.is_float and dst.is_float:
        return (b.fpext if dst.bits > src.bits else b.fptrunc)(value, dst.ir)
    if src.is_float:
        return (b.fptosi if dst.is_signed else b.fptoui)(value, dst.ir)
    if dst.is_float:
        return (b.sitofp if src.is_signed else b.uitofp)(value, dst.ir)
    if dst.bits < src.bits:
        return b.trunc(value, dst.ir)
    return (b.sext if src.is_signed else b.zext)(value, dst.ir)


class Var:
    """A loop-carried value: a stack slot in the entry block that LLVM promotes to a register."""

    __slots__ = ("k", "slot", "ty")

    def __init__(self, k: Emitter, slot: Any, ty: Ty) -> None:
        self.k, self.slot, self.ty = k, slot, ty

    @property
    def v(self) -> Val:
        """The value now."""
        return Val(self.k, self.k.b.load(self.slot, typ=self.ty.ir), self.ty)

    @v.setter
    def v(self, value: Operand) -> None:
        value = self.k.val(value, self.ty)
        if value.ty != self.ty:
            raise TypeError(f"a {self.ty} variable set to {value.ty}")
        self.k.b.store(value.ir, self.slot)

    def __iadd__(self, other: Operand) -> Var:
        self.v = self.v + other
        return self


Operand = Val | Var | int | float
