"""Typed values of the kernel language, and what their operators emit.

Nothing is promoted silently: mixing types raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from treadle.jit.types import Ty, boolean, i64, ptr

# FMAs may form; nothing may be reordered, so every sum has the one order that the source gives it.
_FLAGS = ("contract",)


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
        lanes = list(x) if isinstance(x, Sequence) else [x] * max(ty.lanes, 1)
        if not ty.is_float:
            if any(v != int(v) for v in lanes):
                raise TypeError(f"{x} is no {ty}")
            lanes = [int(v) for v in lanes]
        if not ty.lanes:
            return Val(self, ir.Constant(ty.ir, lanes[0]), ty)
        scalar = ty.scalar.ir
        return Val(self, ir.Constant(ty.ir, [ir.Constant(scalar, v) for v in lanes]), ty)

    def gep(self, p: Val, n_bytes: Operand) -> Val:
        """The pointer ``n_bytes`` further on."""
        off = self.val(n_bytes, i64)
        return Val(self, self.b.gep(p.ir, [off.ir], source_etype=ir.IntType(8)), ptr)


class Val:
    """A typed run-time value. Arithmetic takes another ``Val`` of the very same type, or a Python
    number.
    """

    __slots__ = ("ir", "k", "ty")

    def __init__(self, k: Emitter, value: Any, ty: Ty) -> None:
        self.k, self.ir, self.ty = k, value, ty

    def __bool__(self) -> bool:
        raise TypeError(f"a run-time value ({self.ty}) in a Python if: use k.if_ or k.select")

    def _other(self, other: Operand) -> Val:
        other = self.k.val(other, self.ty)
        if other.ty != self.ty:
            raise TypeError(f"mixed types: {self.ty} and {other.ty}; convert one with .to()")
        return other

    def _whole(self, other: Operand, what: str) -> Any:
        """The IR of ``other``, for an operation that only integers (and bools) have."""
        if self.ty.is_float:
            raise TypeError(f"{what} is not for floats ({self.ty})")
        return self._other(other).ir

    def _arith(self, other: Operand, f: str, i: str) -> Val:
        b = self._other(other)
        build = self.k.b
        made = (
            getattr(build, f)(self.ir, b.ir, flags=_FLAGS)
            if self.ty.is_float
            else getattr(build, i)(self.ir, b.ir)
        )
        return Val(self.k, made, self.ty)

    def __add__(self, other: Operand) -> Val:
        if self.ty == ptr:
            return self.k.gep(self, other)
        return self._arith(other, "fadd", "add")

    def __sub__(self, other: Operand) -> Val:
        return self._arith(other, "fsub", "sub")

    def __mul__(self, other: Operand) -> Val:
        return self._arith(other, "fmul", "mul")

    def __truediv__(self, other: Operand) -> Val:
        if not self.ty.is_float:
            raise TypeError(f"/ divides floats, not {self.ty}: use //")
        return self._arith(other, "fdiv", "")

    def __floordiv__(self, other: Operand) -> Val:
        op = self.k.b.sdiv if self.ty.is_signed else self.k.b.udiv
        return Val(self.k, op(self.ir, self._whole(other, "//")), self.ty)

    def __mod__(self, other: Operand) -> Val:
        op = self.k.b.srem if self.ty.is_signed else self.k.b.urem
        return Val(self.k, op(self.ir, self._whole(other, "%")), self.ty)

    def __radd__(self, other: Operand) -> Val:
        return self.k.val(other, self.ty) + self

    def __rsub__(self, other: Operand) -> Val:
        return self.k.val(other, self.ty) - self

    def __rmul__(self, other: Operand) -> Val:
        return self.k.val(other, self.ty) * self

    def __rtruediv__(self, other: Operand) -> Val:
        return self.k.val(other, self.ty) / self

    def __neg__(self) -> Val:
        if self.ty.is_float:
            return Val(self.k, self.k.b.fneg(self.ir), self.ty)
        return 0 - self

    def __and__(self, other: Operand) -> Val:
        return Val(self.k, self.k.b.and_(self.ir, self._whole(other, "&")), self.ty)

    def __or__(self, other: Operand) -> Val:
        return Val(self.k, self.k.b.or_(self.ir, self._whole(other, "|")), self.ty)

    def __xor__(self, other: Operand) -> Val:
        return Val(self.k, self.k.b.xor(self.ir, self._whole(other, "^")), self.ty)

    def __lshift__(self, other: Operand) -> Val:
        return Val(self.k, self.k.b.shl(self.ir, self._whole(other, "<<")), self.ty)

    def __rshift__(self, other: Operand) -> Val:
        op = self.k.b.ashr if self.ty.is_signed else self.k.b.lshr
        return Val(self.k, op(self.ir, self._whole(other, ">>")), self.ty)

    def _compare(self, how: str, other: Operand) -> Val:
        b = self._other(other)
        build = self.k.b
        if self.ty.is_float:
            made = build.fcmp_ordered(how, self.ir, b.ir)
        else:
            signed = self.ty.is_signed or self.ty == ptr
            made = (build.icmp_signed if signed else build.icmp_unsigned)(how, self.ir, b.ir)
        return Val(self.k, made, boolean.like(self.ty))

    def __lt__(self, other: Operand) -> Val:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Val:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Val:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Val:
        return self._compare(">=", other)

    def eq(self, other: Operand) -> Val:
        """Lane-wise equality (a method, so that ``==`` keeps its Python meaning)."""
        return self._compare("==", other)

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
