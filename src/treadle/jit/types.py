"""The types of the kernel language: scalars with a sign, vectors of them, and pointers.

``f32``, ``i8`` and the rest are scalars; ``f32 * 16`` is a vector of sixteen. Signedness lives here
and nowhere else: ``u8`` and ``i8`` are the same bits to LLVM, but widen, divide and compare
differently.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.base.fast_classes import cached_property, dataclass
from treadle.jit import ir

# LLVM's names of scalar types, integers excepted.
LLVM = {"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double", "ptr": ir.POINTER}


@dataclass(frozen=True)
class Ty:
    """A type of the kernel language: a scalar (``lanes == 0``), a vector of ``lanes`` scalars, or a
    pointer.
    """

    kind: str  # "f", "bf", "i", "u", "bool" or "ptr"
    bits: int
    lanes: int = 0
    is_scaled: bool = False  # scalable: ``lanes`` times a factor that the machine knows

    @cached_property
    def ir(self) -> str:
        """The type's name in LLVM IR."""
        scalar = LLVM.get(self.scalar_name, f"i{self.bits}")
        return ir.vector(scalar, self.lanes, is_scaled=self.is_scaled) if self.lanes else scalar

    @property
    def scalar_name(self) -> str:
        return self.kind if self.kind in ("ptr", "bool") else f"{self.kind}{self.bits}"

    @property
    def scalar(self) -> Ty:
        return replace(self, lanes=0)

    @property
    def n_bytes(self) -> int:
        """Bytes of a value in memory (a vector of bool is never stored)."""
        return self.bits // 8 * max(self.lanes, 1)

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf")

    @property
    def is_signed(self) -> bool:
        return self.kind == "i"

    def __mul__(self, lanes: int) -> Ty:
        if self.lanes:
            raise TypeError(f"{self} is already a vector")
        return replace(self, lanes=lanes)

    def scalable(self, lanes: int) -> Ty:
        """Return the scalable vector type with ``lanes`` of this scalar for every 128 bits of a
        register, whose length is unknown at compile time.
        """
        return replace(self, lanes=lanes, is_scaled=True)

    def like(self, other: Ty) -> Ty:
        """Return this scalar type with the lanes of ``other``."""
        return replace(self, lanes=other.lanes)

    def __str__(self) -> str:
        return f"{self.scalar_name} * {self.lanes}" if self.lanes else self.scalar_name

    @property
    def mangled(self) -> str:
        """The type's part of an LLVM intrinsic's name, for example ``v16f32``."""
        letter = {"f": "f", "bf": "bf", "i": "i", "u": "i", "bool": "i"}[self.kind]
        vector = f"{'nx' if self.is_scaled else ''}v{self.lanes}" if self.lanes else ""
        return f"{vector}{letter}{self.bits}"


f16 = Ty("f", 16)
bf16 = Ty("bf", 16)
f32 = Ty("f", 32)
f64 = Ty("f", 64)
i8 = Ty("i", 8)
i16 = Ty("i", 16)
i32 = Ty("i", 32)
i64 = Ty("i", 64)
u8 = Ty("u", 8)
u16 = Ty("u", 16)
u32 = Ty("u", 32)
u64 = Ty("u", 64)
boolean = Ty("bool", 1)
ptr = Ty("ptr", 64)
