"""Memory of several kinds, and intrinsics of several results: what a GPU's instructions need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from treadle.jit.types import Ty, ptr
from treadle.jit.values import Emitter, Val


class Spaces(Emitter):
    """The part of the builder that knows LLVM's address spaces."""

    module: Any

    def in_space(self, p: Val, space: int) -> Any:
        """The same address as a pointer of an address space: raw IR, for an intrinsic."""
        return self.b.addrspacecast(p.ir, ir.PointerType(addrspace=space))

    def outside(self, name: str, space: int, align: int) -> Val:
        """A pointer to memory of an address space whose size who launches the kernel knows."""
        made = self.module.globals.get(name)
        if made is None:
            ty = ir.ArrayType(ir.IntType(8), 0)
            made = ir.GlobalVariable(self.module, ty, name, addrspace=space)
            made.linkage, made.align = "external", align
        return Val(self, self.b.addrspacecast(made, ptr.ir), ptr)

    def call_several(self, name: str, n: int, ty: Ty, args: Sequence[Any]) -> list[Val]:
        """Call an intrinsic that has ``n`` results, with raw IR arguments."""
        made = self.module.globals.get(name)
        if made is None:
            result = ir.LiteralStructType([ty.ir] * n)
            made = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        results = self.b.call(made, args)
        return [Val(self, self.b.extract_value(results, i), ty) for i in range(n)]
