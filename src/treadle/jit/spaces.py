"""Memory of several kinds or that threads share, and intrinsics of several results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from treadle.jit.types import Ty, boolean, ptr
from treadle.jit.values import Emitter, Val


class Spaces(Emitter):
    """The part of the builder that knows LLVM's address spaces and atomic operations."""

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

    def store_passing(self, p: Val, x: Val) -> None:
        """``x`` to ``p``, aligned to its size, past the caches: for what nobody reads soon."""
        stored = self.b.store(x.ir, p.ir, align=x.ty.n_bytes)
        one = self.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", one)

    def call_several(self, name: str, n: int, ty: Ty, args: Sequence[Any]) -> list[Val]:
        """Call an intrinsic that has ``n`` results, with raw IR arguments."""
        made = self.module.globals.get(name)
        if made is None:
            result = ir.LiteralStructType([ty.ir] * n)
            made = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        results = self.b.call(made, args)
        return [Val(self, self.b.extract_value(results, i), ty) for i in range(n)]

    # -- memory shared between threads ----------------------------------------------------------

    def atomic_load(self, p: Val, ty: Ty) -> Val:
        return Val(self, self.b.load_atomic(p.ir, "seq_cst", ty.n_bytes, typ=ty.ir), ty)

    def atomic_add(self, p: Val, x: Val) -> Val:
        """Add ``x``; gives what was there before."""
        return Val(self, self.b.atomic_rmw("add", p.ir, x.ir, "seq_cst"), x.ty)

    def atomic_set(self, p: Val, x: Val) -> None:
        self.b.atomic_rmw("xchg", p.ir, x.ir, "seq_cst")

    def compare_swap(self, p: Val, old: Val, new: Val) -> Val:
        """Set to ``new`` if it holds ``old``; gives whether it did."""
        both = self.b.cmpxchg(p.ir, old.ir, new.ir, "seq_cst", "seq_cst")
        return Val(self, self.b.extract_value(both, 1), boolean)
