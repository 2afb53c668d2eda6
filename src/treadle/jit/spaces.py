"""Address spaces, atomic operations, and intrinsics with several results."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.jit import ir
from treadle.jit.types import Ty, boolean, i64, ptr
from treadle.jit.values import Emitter, Val


class Spaces(Emitter):
    """Base of the builder: LLVM's address spaces, atomic operations, and intrinsics with several
    results.
    """

    module: ir.Module

    def in_space(self, p: Val, space: int) -> ir.Operand:
        """Return address ``p`` as a pointer of LLVM's address space ``space``, as raw IR for the
        call of an intrinsic.
        """
        ty = ir.pointer(space)
        return self.b.made(ty, f"addrspacecast {p.ir} to {ty}")

    def address(self, p: Val) -> Val:
        """Return address ``p`` as an integer, i64."""
        return Val(self, self.b.made(i64.ir, f"ptrtoint {p.ir} to {i64.ir}"), i64)

    def outside(self, name: str, space: int, align: int) -> Val:
        """Return a pointer to the external memory ``name`` in address space ``space``, aligned to
        ``align`` bytes; the launch of the kernel decides its size.
        """
        made = self.module.names.get(name)
        if made is None:
            how = f"external addrspace({space}) global"
            made = self.module.data(name, ir.array_of_bytes(0), how, align, space=space)
        return Val(self, self.b.made(ir.POINTER, f"addrspacecast {made} to ptr"), ptr)

    def store_passing(self, p: Val, x: Val) -> None:
        """Store ``x`` at ``p``, which is aligned to the size of ``x``, bypassing the caches: for
        data that is not read again soon.
        """
        one = self.module.note("i32 1")
        self.b.write(f"store {x.ir}, {p.ir}, align {x.ty.n_bytes}, !nontemporal {one}")

    def call_several(self, name: str, n: int, ty: Ty, args: Sequence[ir.Operand]) -> list[Val]:
        """Call an intrinsic with ``n`` results of type ``ty``, with raw IR arguments;
        return them.
        """
        results = self.b.call_named(name, f"{{{', '.join([ty.ir] * n)}}}", args)
        return [Val(self, self.b.made(ty.ir, f"extractvalue {results}, {i}"), ty) for i in range(n)]

    # -- memory shared between threads ----------------------------------------------------------

    def atomic_load(self, p: Val, ty: Ty) -> Val:
        line = f"load atomic {ty.ir}, {p.ir} seq_cst, align {ty.n_bytes}"
        return Val(self, self.b.made(ty.ir, line), ty)

    def atomic_add(self, p: Val, x: Val) -> Val:
        """Add ``x`` to the value at ``p`` atomically; return the previous value."""
        return Val(self, self.b.made(x.ty.ir, f"atomicrmw add {p.ir}, {x.ir} seq_cst"), x.ty)

    def atomic_set(self, p: Val, x: Val) -> None:
        self.b.made(x.ty.ir, f"atomicrmw xchg {p.ir}, {x.ir} seq_cst")

    def compare_swap(self, p: Val, old: Val, new: Val) -> Val:
        """Set the value at ``p`` to ``new`` atomically if it is ``old``; return whether it was."""
        both = f"{{{old.ty.ir}, {boolean.ir}}}"
        found = self.b.made(both, f"cmpxchg {p.ir}, {old.ir}, {new.ir} seq_cst seq_cst")
        return Val(self, self.b.made(boolean.ir, f"extractvalue {found}, 1"), boolean)
