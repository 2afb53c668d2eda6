"""The kernel language in numpy: what an instruction set's operations compute, on any machine.

A value is an array, and an intrinsic is what its vendor's manual says of the instruction. So rows
of machines that are not here compute here, in no time, and independently of LLVM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treadle.isa.isa import Isa
from treadle.jit.types import Ty, boolean
from treadle.kernels.activation_layout import from_bf16_bits, to_bf16_bits

Rows = Any  # an array of the lanes


def dtype(ty: Ty) -> Any:
    """Numpy's type of a scalar; a bf16 is its bits."""
    if ty.kind == "bf":
        return np.dtype(np.uint16)
    return np.dtype("?" if ty == boolean.like(ty) else f"{ty.kind}{ty.bits // 8}")


class NumpyVal:
    """A value: its type, and its lanes (one of a scalar)."""

    def __init__(self, ty: Ty, rows: Rows) -> None:
        self.ty = ty
        self.rows = np.asarray(rows, dtype(ty)).reshape(max(ty.lanes, 1))

    @property
    def ir(self) -> NumpyVal:
        return self

    def _other(self, other: Any) -> Rows:
        if isinstance(other, NumpyVal):
            assert other.ty == self.ty, f"mixed types: {self.ty} and {other.ty}"
            return other.rows
        return np.asarray(other).astype(dtype(self.ty))

    def _made(self, rows: Rows) -> NumpyVal:
        return NumpyVal(self.ty, rows.astype(dtype(self.ty)))

    def __add__(self, other: Any) -> NumpyVal:
        return self._made(self.rows + self._other(other))

    def __sub__(self, other: Any) -> NumpyVal:
        return self._made(self.rows - self._other(other))

    def __mul__(self, other: Any) -> NumpyVal:
        return self._made(self.rows * self._other(other))

    def __rtruediv__(self, other: Any) -> NumpyVal:
        return self._made(self._other(other) / self.rows)

    def __neg__(self) -> NumpyVal:
        return self._made(-self.rows)

    def __and__(self, other: Any) -> NumpyVal:
        return self._made(self.rows & self._other(other))

    def __or__(self, other: Any) -> NumpyVal:
        return self._made(self.rows | self._other(other))

    def __xor__(self, other: Any) -> NumpyVal:
        return self._made(self.rows ^ self._other(other))

    def __lshift__(self, other: Any) -> NumpyVal:
        return self._made(self.rows << self._other(other))

    def __rshift__(self, other: Any) -> NumpyVal:
        return self._made(self.rows >> self._other(other))

    def __lt__(self, other: Any) -> NumpyVal:
        return NumpyVal(boolean.like(self.ty), self.rows < self._other(other))

    def __gt__(self, other: Any) -> NumpyVal:
        return NumpyVal(boolean.like(self.ty), self.rows > self._other(other))

    def __ge__(self, other: Any) -> NumpyVal:
        return NumpyVal(boolean.like(self.ty), self.rows >= self._other(other))

    def eq(self, other: Any) -> NumpyVal:
        return NumpyVal(boolean.like(self.ty), self.rows == self._other(other))

    def to(self, ty: Ty) -> NumpyVal:
        ty = ty.like(self.ty)
        if ty.kind == "bf":
            return NumpyVal(ty, to_bf16_bits(self.rows))
        rows = from_bf16_bits(self.rows) if self.ty.kind == "bf" else self.rows
        return NumpyVal(ty, rows.astype(dtype(ty)))

    def bits(self, ty: Ty) -> NumpyVal:
        assert self.rows.nbytes == max(ty.lanes, 1) * ty.bits // 8
        return NumpyVal(ty, self.rows.view(dtype(ty)))


class NumpyBuilder:
    """The part of ``jit/builder.py`` that operations on vectors use."""

    def __init__(self, isa: Isa) -> None:
        self.isa = isa
        self.called: list[str] = []

    def const(self, x: Any, ty: Ty) -> NumpyVal:
        rows = np.broadcast_to(np.asarray(x), max(ty.lanes, 1))
        return NumpyVal(ty, rows.astype(dtype(ty)))

    def val(self, x: Any, ty: Ty) -> NumpyVal:
        return x if isinstance(x, NumpyVal) else self.const(x, ty)

    def zero(self, ty: Ty) -> NumpyVal:
        return self.const(0, ty)

    def shuffle(self, a: NumpyVal, b: NumpyVal, mask: Sequence[int]) -> NumpyVal:
        both = np.concatenate([a.rows, b.rows])
        return NumpyVal(a.ty.scalar * len(mask), both[list(mask)])

    def concat(self, *parts: NumpyVal) -> NumpyVal:
        rows = np.concatenate([part.rows for part in parts])
        return NumpyVal(parts[0].ty.scalar * len(rows), rows)

    def split(self, v: NumpyVal, lanes: int) -> list[NumpyVal]:
        return [NumpyVal(v.ty.scalar * lanes, rows) for rows in v.rows.reshape(-1, lanes)]

    def select(self, cond: NumpyVal, a: NumpyVal, b: NumpyVal) -> NumpyVal:
        return NumpyVal(a.ty, np.where(cond.rows, a.rows, b.rows))

    def insert(self, v: NumpyVal, x: NumpyVal, lane: int) -> NumpyVal:
        rows = v.rows.copy()
        rows[lane] = x.rows[0]
        return NumpyVal(v.ty, rows)

    def extract(self, v: NumpyVal, lane: int) -> NumpyVal:
        return NumpyVal(v.ty.scalar, v.rows[lane])

    def abs(self, v: NumpyVal) -> NumpyVal:
        return v._made(np.abs(v.rows))  # of the least number itself, as in the language

    def fma(self, a: NumpyVal, b: NumpyVal, c: NumpyVal) -> NumpyVal:
        wide = a.rows.astype(np.float64) * b.rows + c.rows
        return a._made(wide)

    def pin(self, v: NumpyVal, register: str) -> NumpyVal:
        return v

    def call(self, name: str, ret: Ty | None, args: Sequence[NumpyVal]) -> NumpyVal:
        self.called.append(name)
        for pattern, meaning in INTRINSICS.items():
            if re.search(pattern, name):
                rows = meaning(*(arg.rows for arg in args))
                assert ret is not None
                return NumpyVal(ret, rows.astype(dtype(ret)))
        raise NotImplementedError(name)


def by(n: int, *factors: Rows) -> Rows:
    """Products, in int64, summed over ``n`` neighbours."""
    product = np.prod([each.astype(np.int64) for each in factors], axis=0)
    return product.reshape(-1, n).sum(1)


def pmaddubsw(w: Rows, x: Rows) -> Rows:
    return np.clip(by(2, w, x), -32768, 32767)


def pshufb(table: Rows, index: Rows) -> Rows:
    at = np.arange(len(index)) // 16 * 16 + index % 16
    return np.where(index & 0x80, 0, table[at])


def multishift(control: Rows, source: Rows) -> Rows:
    words = np.repeat(source.view(np.uint64), 8)
    by = (control & 63).astype(np.uint64)
    return (words >> by | words << (-by & np.uint64(63))) & np.uint64(255)


def affine(x: Rows, matrix: Rows, added: Rows) -> Rows:
    rows = np.repeat(matrix.reshape(-1, 8), 8, axis=0)  # of each byte, for its highest bit first
    parity = np.bitwise_count(rows & x[:, None]) & 1
    return np.packbits(parity, axis=1)[:, 0] ^ added[0]


def bf16_dot(c: Rows, a: Rows, b: Rows) -> Rows:
    product = from_bf16_bits(a).astype(np.float64) * from_bf16_bits(b)
    return c + product.reshape(-1, 2).sum(1)


def mmla(c: Rows, a: Rows, b: Rows) -> Rows:
    return c + (a.reshape(2, 8).astype(int) @ b.reshape(2, 8).astype(int).T).reshape(-1)


def prmt(a: Rows, b: Rows, picked: Rows) -> Rows:
    given = np.concatenate([a, b]).view(np.uint8)
    made = []
    for i in range(4):
        nibble = int(picked[0]) >> 4 * i & 15
        byte = int(given[nibble & 7])
        made.append((255 if byte >> 7 else 0) if nibble & 8 else byte)
    return np.array(made, np.uint8).view(np.uint32)


def dp4a(w: Rows, x: Rows, c: Rows, kind: Any) -> Rows:
    return c + by(4, w.view(kind), x.view(np.int8))


# Intel's, Arm's, RISC-V's and NVIDIA's manuals, by a part of LLVM's name.
INTRINSICS: dict[str, Callable[..., Rows]] = {
    r"pmadd\.?ubs?\.?(sw|w)": pmaddubsw,
    r"psign\.b": lambda a, b: a * np.sign(b),
    r"pmaddw?\.w?d": lambda a, b: by(2, a, b),
    r"pmul\.hr\.sw": lambda a, b: ((a.astype(int) * b >> 14) + 1) >> 1,
    r"vpdpbusd": lambda c, w, x: c + by(4, w, x),
    r"vpdpwssd": lambda c, a, b: c + by(2, a, b),
    r"dpbf16ps|bfdot": bf16_dot,
    r"cvtne2ps2bf16": lambda b, a: np.concatenate([to_bf16_bits(a), to_bf16_bits(b)]),
    r"pshuf\.b": pshufb,
    r"pmultishift": multishift,
    r"permvar": lambda table, index: table[index % len(table)],
    r"rcp14": lambda x, other, mask: (1 / x.astype(np.float64)) * (1 - 2.0**-15),
    r"vgf2p8affineqb": affine,
    r"smull\.v8i16": lambda a, b: a.astype(np.int16) * b,
    r"addp\.v8i16": lambda a, b: np.concatenate([a, b]).reshape(-1, 2).sum(1, np.int16),
    r"saddlp": lambda a: a.astype(np.int32).reshape(-1, 2).sum(1),
    r"\.u?sdot\.": lambda c, w, x: c + by(4, w, x),
    r"smmla": mmla,
    r"tbl1": lambda table, index: np.where(index < 16, table[index % 16], 0),
    r"partial\.reduce\.add": lambda c, products: c + products.reshape(len(c), -1).sum(1),
    r"nvvm\.prmt": prmt,
    r"idp4a\.s\.s": lambda w, x, c: dp4a(w, x, c, np.int8),
    r"idp4a\.u\.s": lambda w, x, c: dp4a(w, x, c, np.uint8),
    r"rcp\.approx": lambda x: 1 / x,
}
