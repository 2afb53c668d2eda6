"""Typed values of the kernel language, and the instructions that their operators emit.

There is no implicit promotion: mixing types raises TypeError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from treadle.jit import ir
from treadle.jit.types import Ty, boolean, i64, ptr

Binary: TypeAlias = "Callable[[Val, Operand], Val]"


@lru_cache(maxsize=1 << 14)
def constant(ty: Ty, lanes: tuple[float, ...], text: str = "") -> ir.Operand:
    """Return the LLVM constant of type ``ty`` with these lanes. It is cached, because a kernel has
    thousands. ``text`` is part of the cache key: it tells ``0.0`` from ``-0.0``.
    """
    scalar = ty.scalar.ir
    return ir.numbers(scalar, ty.ir, lanes) if ty.lanes else ir.number(scalar, lanes[0])


class Emitter:
    """Base of the builder: the part that values need. ``b`` (``ir.BlockWriter``) writes lines of
    IR.
    """

    def __init__(self, b: ir.BlockWriter) -> None:
        self.b = b

    def val(self, x: Operand, ty: Ty) -> Val:
        """Return ``x`` as a value: a Python number becomes a constant of ``ty``, in every lane."""
        if isinstance(x, Val):
            return x
        if isinstance(x, Var):
            return x.v
        return self.const(x, ty)

    def const(self, x: float | Sequence[float], ty: Ty) -> Val:
        """Return a constant of ``ty``: one number for every lane, or a sequence with a number for
        each. Raises TypeError for a fraction in an integer type.
        """
        lanes = tuple(x) if isinstance(x, Sequence) else (x,)
        if not ty.is_float:
            made = tuple(int(v) for v in lanes)
            if made != lanes:
                raise TypeError(f"{x} cannot be represented as {ty}")
            lanes = made
        if not isinstance(x, Sequence):
            lanes *= max(ty.lanes, 1)
        # 0.0 == -0.0, but their texts differ.
        return Val(self, constant(ty, lanes, str(lanes) if ty.is_float else ""), ty)

    def gep(self, p: Val, n_bytes: Operand) -> Val:
        """Return the pointer ``n_bytes`` bytes after ``p``."""
        off = self.val(n_bytes, i64)
        return Val(self, self.b.made(ir.POINTER, f"getelementptr i8, {p.ir}, {off.ir}"), ptr)


def _operator(sign: str, of_floats: str | None, signed: str | None, unsigned: str | None) -> Binary:
    """Return Val's method for the operator ``sign``, given the names of LLVM's instruction for
    floats, for signed and for unsigned integers. A name None: the method raises TypeError for that
    kind of number.
    """

    def emit(self: Val, other: Operand) -> Val:
        ty = self.ty
        name = of_floats if ty.is_float else signed if ty.is_signed else unsigned
        if name is None:
            kind, instead = ("floats", "") if ty.is_float else ("integers", "; use //")
            raise TypeError(f"operator {sign} is not defined for {kind} ({ty}){instead}")
        line = f"{name} {self.ir}, {self._other(other).ref}"
        return Val(self.k, self.k.b.made(ty.ir, line), ty)

    return emit


def _reflected(op: Callable[[Val, Val], Val]) -> Binary:
    """Return Val's method for ``op`` with a Python number on the left, such as ``__radd__``."""
    return lambda self, other: op(self.k.val(other, self.ty), self)


def _comparison(of_floats: str, signed: str, unsigned: str) -> Binary:
    def emit(self: Val, other: Operand) -> Val:
        ty = self.ty
        to = boolean.like(self.ty)
        integers = signed if ty.is_signed or ty == ptr else unsigned
        name = f"fcmp {of_floats}" if ty.is_float else f"icmp {integers}"
        line = f"{name} {self.ir}, {self._other(other).ref}"
        return Val(self.k, self.k.b.made(to.ir, line), to)

    return emit


class Val:
    """A typed run-time value, with Python's operators. The other operand must be a ``Val`` of
    exactly the same type or a Python number; other types raise TypeError.
    """

    __slots__ = ("ir", "k", "ty")

    def __init__(self, k: Emitter, value: ir.Operand, ty: Ty) -> None:
        self.k = k
        self.ir = value
        self.ty = ty

    def __bool__(self) -> bool:
        raise TypeError(
            f"a run-time value ({self.ty}) cannot be the condition of a Python if; "
            "use k.if_ or k.select"
        )

    def _other(self, other: Operand) -> ir.Operand:
        """Return the IR of an operator's other operand. Raises TypeError if its type is not this
        value's.
        """
        other = self.k.val(other, self.ty)
        if other.ty != self.ty:
            raise TypeError(f"mixed types: {self.ty} and {other.ty}; convert one with .to()")
        return other.ir

    def __add__(self, other: Operand) -> Val:
        return self.k.gep(self, other) if self.ty == ptr else self._plus(other)

    def __neg__(self) -> Val:
        if self.ty.is_float:
            return Val(self.k, self.k.b.made(self.ty.ir, f"fneg {self.ir}"), self.ty)
        return 0 - self

    # LLVM's instruction names: floats, signed integers, unsigned integers. FMAs may form
    # (``contract``), but nothing may be reordered: every sum keeps the order of the source.
    _plus = _operator("+", "fadd contract", "add", "add")
    __sub__ = _operator("-", "fsub contract", "sub", "sub")
    __mul__ = _operator("*", "fmul contract", "mul", "mul")
    __truediv__ = _operator("/", "fdiv contract", None, None)
    __floordiv__ = _operator("//", None, "sdiv", "udiv")
    __mod__ = _operator("%", None, "srem", "urem")
    __and__ = _operator("&", None, "and", "and")
    __or__ = _operator("|", None, "or", "or")
    __xor__ = _operator("^", None, "xor", "xor")
    __lshift__ = _operator("<<", None, "shl", "shl")
    __rshift__ = _operator(">>", None, "ashr", "lshr")
    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rtruediv__ = _reflected(operator.truediv)
    __lt__ = _comparison("olt", "slt", "ult")
    __le__ = _comparison("ole", "sle", "ule")
    __gt__ = _comparison("ogt", "sgt", "ugt")
    __ge__ = _comparison("oge", "sge", "uge")
    # A method, not ``==``, so that ``==`` keeps its Python meaning. Compares lane by lane.
    eq = _comparison("oeq", "eq", "eq")

    def to(self, ty: Ty) -> Val:
        """Convert the value to ``ty`` (of a scalar ``ty``: with this value's lanes): integers widen
        by the source's sign and narrow by truncation, floats are rounded.
        """
        if ty.lanes == 0 and self.ty.lanes:
            ty = ty.like(self.ty)
        if ty.lanes != self.ty.lanes:
            raise TypeError(
                f"cannot convert {self.ty} to {ty}: different numbers of lanes; "
                "use k.splat or k.shuffle"
            )
        if ty.ir == self.ty.ir:
            return Val(self.k, self.ir, ty)
        line = f"{_conversion(self.ty, ty)} {self.ir} to {ty.ir}"
        return Val(self.k, self.k.b.made(ty.ir, line), ty)

    def bits(self, ty: Ty) -> Val:
        """Return the same bits as type ``ty``. Raises TypeError if the sizes differ."""
        if max(ty.lanes, 1) * ty.bits != max(self.ty.lanes, 1) * self.ty.bits:
            raise TypeError(f"bits(): {self.ty} and {ty} differ in size")
        if ty.ir == self.ty.ir:
            return Val(self.k, self.ir, ty)
        return Val(self.k, self.k.b.made(ty.ir, f"bitcast {self.ir} to {ty.ir}"), ty)


def _conversion(src: Ty, dst: Ty) -> str:
    """Return LLVM's name of the numeric conversion from ``src`` to ``dst`` (same lanes)."""
    if src.is_float and dst.is_float:
        return "fpext" if dst.bits > src.bits else "fptrunc"
    if src.is_float:
        return "fptosi" if dst.is_signed else "fptoui"
    if dst.is_float:
        return "sitofp" if src.is_signed else "uitofp"
    if dst.bits < src.bits:
        return "trunc"
    return "sext" if src.is_signed else "zext"


class Var:
    """A variable of the kernel: a stack slot in the entry block that LLVM promotes to a register.
    ``.v`` reads and assigns it.
    """

    __slots__ = ("k", "slot", "ty")

    def __init__(self, k: Emitter, slot: ir.Operand, ty: Ty) -> None:
        self.k = k
        self.slot = slot
        self.ty = ty

    @property
    def v(self) -> Val:
        """The current value."""
        return Val(self.k, self.k.b.made(self.ty.ir, f"load {self.ty.ir}, {self.slot}"), self.ty)

    @v.setter
    def v(self, value: Operand) -> None:
        value = self.k.val(value, self.ty)
        if value.ty != self.ty:
            raise TypeError(f"cannot assign a {value.ty} value to a {self.ty} variable")
        self.k.b.write(f"store {value.ir}, {self.slot}")

    def __iadd__(self, other: Operand) -> Var:
        self.v = self.v + other
        return self


Operand = Val | Var | int | float
