"""The builder that emits LLVM IR: the kernel language.

Running a kernel's Python function once emits its code. Python's ``for`` and ``if`` run while
building: they unroll and select. ``with k.loop(n)`` and ``with k.if_(c)`` emit loops and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from treadle.jit import ir
from treadle.jit.sharing import Sharing
from treadle.jit.spaces import Spaces
from treadle.jit.types import Ty, i8, i32, i64, ptr
from treadle.jit.values import Operand, Val, Var, constant

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.isa.isa import Isa


class Builder(Spaces):
    """Emits the code of one function: the kernel language. ``b`` (``ir.BlockWriter``) writes raw
    lines of IR, for the few callers that need it. ``sharing``: the threads that share a work item;
    None if each thread has its own.
    """

    sharing: Sharing | None = None

    def __init__(self, function: ir.Function, isa: Isa) -> None:
        self.isa = isa
        self.function = function
        self.module = function.module
        # Stack slots go to the entry block, so that a slot made inside a loop is allocated once.
        self._slots = ir.BlockWriter(function, function.block("entry"))
        self._rooms: dict[str, ir.Operand] = {}
        start = function.block("start")
        self._slots.branch(start)
        super().__init__(ir.BlockWriter(function, start))

    # -- values ---------------------------------------------------------------------------------

    def zero(self, ty: Ty) -> Val:
        return Val(self, ir.zero(ty.ir), ty)

    def var(self, init: Val) -> Var:
        """Return a variable with the initial value ``init``."""
        slot = self._slots.made(ir.POINTER, f"alloca {init.ty.ir}")
        result = Var(self, slot, init.ty)
        result.v = init
        return result

    def room(self, n_bytes: int, name: str = "") -> Val:
        """Return a pointer to ``n_bytes`` of the function's stack memory, aligned to 64. The same
        ``name`` gives the same memory.
        """
        made = self._rooms.get(name)
        if made is None:
            line = f"alloca {ir.array_of_bytes(n_bytes)}, align 64"
            made = self._slots.made(ir.POINTER, line)
            if name:
                self._rooms[name] = made
        return Val(self, made, ptr)

    def i64(self, x: int) -> Val:
        return self.const(x, i64)

    # -- memory ---------------------------------------------------------------------------------

    def load(self, p: Val, ty: Ty, *, align: int = 1, offset: Operand = 0) -> Val:
        """Load a ``ty`` from ``offset`` bytes after ``p``. ``align``: a power of two of bytes to
        which the address is certainly aligned.
        """
        if not (isinstance(offset, int) and offset == 0):
            p = self.gep(p, offset)
        line = f"load {ty.ir}, {p.ir}, align {self._aligned(ty, align)}"
        return Val(self, self.b.made(ty.ir, line), ty)

    def store(self, p: Val, x: Val, *, align: int = 1, offset: Operand = 0) -> None:
        if not (isinstance(offset, int) and offset == 0):
            p = self.gep(p, offset)
        self.b.write(f"store {x.ir}, {p.ir}, align {self._aligned(x.ty, align)}")

    def _aligned(self, ty: Ty, align: int) -> int:
        """Return the alignment in bytes that a load or store of ``ty`` may assume: ``align``, or
        more if the instruction set guarantees more (``Isa.aligned``).
        """
        return max(align, min(ty.bits // 8, self.isa.aligned))

    def load_first(self, p: Val, ty: Ty, n: int, align: int = 1) -> Val:
        """Load the first ``n`` lanes of a ``ty`` at ``p``, with zeros in the others. Memory past
        the ``n`` lanes is not touched.
        """
        if n == ty.lanes:
            return self.load(p, ty, align=align)
        if n == 0:
            return self.zero(ty)
        if n == 1:
            return self.insert(self.zero(ty), self.load(p, ty.scalar), 0)
        part = self.load(p, ty.scalar * n)
        return self.shuffle(part, self.zero(part.ty), [min(i, n) for i in range(ty.lanes)])

    def store_first(self, p: Val, x: Val, n: int) -> None:
        """Store only the first ``n`` lanes of ``x`` at ``p``."""
        if n == 1:
            self.store(p, self.extract(x, 0))
        else:
            self.store(p, x if n == x.ty.lanes else self.shuffle(x, x, list(range(n))))

    def prefetch(self, p: Val, locality: int = 3, *, write: bool = False) -> None:
        """Prefetch the cache line at ``p``. ``locality``: 3 for the first-level cache, 2 for the
        second, as LLVM's; ``write``: the line will be written.
        """
        c = [ir.number(ir.DWORD, v) for v in (int(write), locality, 1)]
        self.call("llvm.prefetch.p0", None, [p.ir, *c])

    def table(self, array: NDArray[Any]) -> Val:
        """Return a pointer to the bytes of ``array``, a constant in the kernel's object. Equal
        bytes are stored once.
        """
        data = array.tobytes()
        name = f"table.{sha256(data).hexdigest()[:16]}"
        made = self.module.names.get(name)
        if made is None:
            ty = ir.array_of_bytes(len(data))
            made = self.module.data(name, ty, "private constant", 64, ir.bytes_text(data))
        return Val(self, made, ptr)

    def static(self, name: str) -> Val:
        """Return a pointer to 8 bytes in the kernel's object, zero at first; they live as long as
        the code. The same ``name`` gives the same bytes.
        """
        return Val(self, self.module.data(name, i64.ir, "internal global", 8, "0"), ptr)

    def gather(self, table: Val, index: Val, ty: Ty) -> Val:
        """Return ``table[index[i]]`` in lane i. ``table``: the address of scalars of type ``ty``;
        ``index``: a vector of non-negative integers. The instruction set implements it
        (``Isa.gather``).
        """
        return self.isa.gather(self, table, index, ty)

    def masked_gather(self, table: Val, index: Val, ty: Ty) -> Val:
        """Do the work of ``gather`` by LLVM's intrinsic, for machines that have an instruction for
        it.
        """
        lanes = ty.lanes
        line = f"getelementptr {ty.scalar.ir}, {table.ir}, {index.ir}"
        at = self.b.made(ir.vector(ir.POINTER, lanes), line)
        every = ir.numbers(ir.FLAG, ir.vector(ir.FLAG, lanes), (1,) * lanes)
        align = ir.number(ir.DWORD, ty.scalar.n_bytes)
        name = f"llvm.masked.gather.{ty.mangled}.v{lanes}p0"
        return self.call(name, ty, [at, align, every, ir.undefined(ty.ir)])

    # -- vectors --------------------------------------------------------------------------------

    def lookup(self, table: Sequence[int], index: Val) -> Val:
        """Return ``table[index[i] % 16]`` in lane i (u8), for a table of 16 bytes. The instruction
        set implements it (``Isa.lookup``).
        """
        return self.isa.lookup(self, table, index)

    def splat(self, x: Operand, ty: Ty) -> Val:
        """Return ``x`` in every lane of ``ty``."""
        x = self.val(x, ty.scalar)
        if x.ty != ty.scalar:
            raise TypeError(f"cannot splat {x.ty} into {ty}: the scalar types differ")
        first = self.insert(Val(self, ir.undefined(ty.ir), ty), x, 0)
        return self.shuffle(first, first, [0] * ty.lanes)

    def insert(self, v: Val, x: Val, lane: int) -> Val:
        return Val(self, self.b.made(v.ty.ir, f"insertelement {v.ir}, {x.ir}, i32 {lane}"), v.ty)

    def extract(self, v: Val, lane: int) -> Val:
        ty = v.ty.scalar
        return Val(self, self.b.made(ty.ir, f"extractelement {v.ir}, i32 {lane}"), ty)

    def shuffle(self, a: Val, b: Val, mask: Sequence[int]) -> Val:
        """Return a vector whose lane i is the lane numbered ``mask[i]`` of ``a`` and ``b``
        together: the lanes of ``a`` are numbered from 0 on, those of ``b`` follow.
        """
        index = constant(i32 * len(mask), tuple(mask))
        ty = a.ty.scalar * len(mask)
        return Val(self, self.b.made(ty.ir, f"shufflevector {a.ir}, {b.ir}, {index}"), ty)

    def concat(self, *parts: Val) -> Val:
        """Concatenate the vectors ``parts``, of one type. Their number must be a power of two."""
        while len(parts) > 1:
            n = parts[0].ty.lanes
            parts = tuple(
                self.shuffle(a, b, range(2 * n))
                for a, b in zip(parts[::2], parts[1::2], strict=True)
            )
        return parts[0]

    def split(self, v: Val, lanes: int) -> list[Val]:
        """Cut ``v`` into vectors of ``lanes`` lanes each."""
        if lanes == v.ty.lanes:
            return [v]
        return [self.shuffle(v, v, range(i, i + lanes)) for i in range(0, v.ty.lanes, lanes)]

    def evens(self, v: Val, run: int) -> tuple[Val, Val]:
        """Cut ``v`` into runs of ``run`` lanes; return a vector of the first, third ... runs, and
        one of the second, fourth ...
        """
        n = v.ty.lanes
        first = [i + j for i in range(0, n, 2 * run) for j in range(run)]
        return self.shuffle(v, v, first), self.shuffle(v, v, [i + run for i in first])

    def each(self, v: Val, run: int, times: int) -> Val:
        """Return ``v`` with each run of ``run`` lanes repeated ``times`` times."""
        starts = [i for i in range(0, v.ty.lanes, run) for _ in range(times)]
        return self.shuffle(v, v, [i + j for i in starts for j in range(run)])

    def select(self, cond: Val, a: Val, b: Val) -> Val:
        """Return ``a`` where ``cond`` holds, else ``b``."""
        if a.ty != b.ty:
            raise TypeError(f"mixed types: {a.ty} and {b.ty}; convert one with .to()")
        return Val(self, self.b.made(a.ty.ir, f"select {cond.ir}, {a.ir}, {b.ir}"), a.ty)

    def max(self, a: Val, b: Operand) -> Val:
        """Return the larger of ``a`` and ``b``; ``b`` where either is NaN (as SSE does)."""
        b = self.val(b, a.ty)
        return self.select(a > b, a, b)

    def min(self, a: Val, b: Operand) -> Val:
        """Return the smaller of ``a`` and ``b``; ``b`` where either is NaN."""
        b = self.val(b, a.ty)
        return self.select(a < b, a, b)

    def reduce(self, v: Val, op: Any) -> Val:
        """Reduce all lanes of ``v`` by ``op`` in a fixed tree: combine halves until one lane is
        left.
        """
        n = v.ty.lanes
        while n > 1:
            half = n // 2
            low = self.shuffle(v, v, range(half))
            high = self.shuffle(v, v, range(half, 2 * half))
            v = op(low, high)
            n = half
        return self.extract(v, 0)

    def sum(self, v: Val) -> Val:
        return self.reduce(v, lambda a, b: a + b)

    def total(self, v: Val) -> Val:
        """Return the sum of the lanes of ``v``; if several threads share the work item, of the
        lanes of all of them.
        """
        return self.sharing.total(self.sum(v)) if self.sharing else self.sum(v)

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """Return ``a * b + c``, with one rounding where the machine has a fused multiply-add."""
        if not a.ty == b.ty == c.ty:
            raise TypeError(f"mixed types: {a.ty}, {b.ty} and {c.ty}; convert with .to()")
        return self.call(f"llvm.fmuladd.{a.ty.mangled}", a.ty, [a.ir, b.ir, c.ir])

    def abs(self, v: Val) -> Val:
        if v.ty.is_float:
            return self.call(f"llvm.fabs.{v.ty.mangled}", v.ty, [v.ir])
        return self.max(v, -v)

    def sqrt(self, v: Val) -> Val:
        return self.call(f"llvm.sqrt.{v.ty.mangled}", v.ty, [v.ir])

    def round(self, v: Val) -> Val:
        """Round a float (of magnitude below 2**22) to the nearest integer, ties to even, as a
        float.

        Adding and subtracting 1.5 * 2**23 leaves no fraction bits. It needs neither SSE4.1 nor
        libm.
        """
        magic = self.const(12582912.0, v.ty)
        # Without ``contract``, unlike other sums: LLVM must not simplify this.
        plus = self.b.made(v.ty.ir, f"fadd {v.ir}, {magic.ir.ref}")
        return Val(self, self.b.made(v.ty.ir, f"fsub {plus}, {magic.ir.ref}"), v.ty)

    # -- control --------------------------------------------------------------------------------

    @contextmanager
    def loop(self, stop: Operand, *, start: Operand = 0, step: Operand = 1) -> Iterator[Val]:
        """Loop at run time as ``for i in range(start, stop, step)``, step above 0; yields ``i``
        (i64).
        """
        stop_v = self.val(stop, i64)
        step_v = self.val(step, i64)
        index = self.var(self.val(start, i64))
        head, body, done = (self.label(n) for n in ("loop", "body", "done"))
        self.goto(head)
        self.at(head)
        i = index.v
        self.branch(i < stop_v, body, done)
        self.at(body)
        yield i
        index.v = i + step_v
        self.goto(head)
        self.at(done)

    @contextmanager
    def shared_loop(self, stop: Operand, *, start: Operand = 0, step: int = 1) -> Iterator[Val]:
        """Loop as ``loop`` does, with independent iterations: the threads that share a work item,
        if any, each run some of them.
        """
        if self.sharing:
            start = self.val(start, i64) + self.sharing.me * step
            step = step * self.sharing.n
        with self.loop(stop, start=start, step=step) as i:
            yield i

    def runs(self, n: int, size: int, emit: Callable[[Val, int], None]) -> None:
        """Split ``n`` values into runs of ``size``: emit ``emit(i, size)`` for each whole run
        number ``i``, in a ``shared_loop``, then ``emit`` once for the remainder, if any, with its
        smaller count.
        """
        full, rest = divmod(n, size)
        with self.shared_loop(full) as i:
            emit(i, size)
        if rest:
            with self.once():
                emit(self.i64(full), rest)

    @contextmanager
    def if_(self, cond: Val) -> Iterator[None]:
        """Run the body if ``cond``, a scalar bool, holds at run time."""
        body = self.label("if")
        after = self.label("endif")
        self.branch(cond, body, after)
        with self._within(body, after):
            yield
        self.at(after)

    @contextmanager
    def once(self) -> Iterator[None]:
        """Run the body in only one of the threads that share a work item."""
        if self.sharing:
            with self.if_(self.sharing.me.eq(0)):
                yield
        else:
            yield

    @contextmanager
    def if_else(self, cond: Val) -> Iterator[tuple[Any, Any]]:
        """Branch on ``cond``: ``with k.if_else(c) as (then, other): with then: ...; with other:
        ...``.
        """
        then, other, after = (self.label(n) for n in ("if", "else", "endif"))
        self.branch(cond, then, other)
        yield self._within(then, after), self._within(other, after)
        self.at(after)

    @contextmanager
    def _within(self, body: ir.BasicBlock, after: ir.BasicBlock) -> Iterator[None]:
        """Emit the code of the ``with`` body in block ``body``, then a jump to block ``after``,
        unless that code has ended its block itself.
        """
        self.at(body)
        yield
        if not self.b.block.end:
            self.goto(after)

    def call(self, name: str, ret: Ty | None, args: Sequence[ir.Operand]) -> Val:
        """Call an intrinsic or other external function by name, with raw IR arguments; return its
        result. ``ret`` None: no result.
        """
        return Val(self, self.b.call_named(name, ret.ir if ret else ir.VOID, args), ret or i8)

    def call_pointer(self, function: Val, ret: Ty | None, args: Sequence[Val]) -> Val:
        """Call the function at address ``function``; return its result. ``ret`` None: no result."""
        given = [a.ir for a in args]
        made = self.b.call(ret.ir if ret else ir.VOID, function.ir.ref, given)
        return Val(self, made, ret or i8)

    def outlined(
        self,
        name: str,
        args: Sequence[Val],
        build: Callable[..., None],
        attributes: Sequence[str] = (),
    ) -> None:
        """Emit ``build(k, *args)`` as a function of its own, and a call to it. ``attributes``: LLVM
        attributes of the function, besides the usual ones.

        Constants that LLVM finds in the function then occupy no registers of the caller. A second
        call with the same ``name`` calls the same function: ``build`` is not run again.
        """
        name = f"{self.function.name}_{name}"
        given = [a.ir for a in args]
        function = self.module.names.get(name)
        if function is None:
            types = [a.type for a in given]
            function = self.module.function(name, ir.VOID, types, linkage="internal")
            function.attributes = ["nounwind", "noinline", *attributes]
            k = Builder(function, self.isa)
            build(k, *(Val(k, made, a.ty) for made, a in zip(function.args, args, strict=True)))
            k.ret()
        self.b.call(ir.VOID, function.ref, given)

    # -- blocks, for control flow that loops and conditions cannot express ----------------------

    def label(self, name: str) -> ir.BasicBlock:
        return self.function.block(name)

    def goto(self, label: ir.BasicBlock) -> None:
        self.b.branch(label)

    def branch(self, cond: Val, yes: ir.BasicBlock, no: ir.BasicBlock) -> None:
        self.b.end(f"br {cond.ir}, {yes}, {no}")

    def at(self, label: ir.BasicBlock) -> None:
        """Emit the code of all later calls in block ``label``."""
        self.b.block = label

    def fence(self, *rooms: Val) -> None:
        """Emit an empty statement that LLVM's scheduler does not move memory operations across. It
        keeps an unrolled block's loads from moving together and spilling. Memory at the addresses
        ``rooms`` is loaded again afterwards.
        """
        registers = ",".join(["r"] * len(rooms) + ["~{memory}"])
        self.b.call(ir.VOID, f'asm sideeffect "", "{registers}"', [room.ir for room in rooms])

    def pin(self, v: Val, register: str) -> Val:
        """Pass ``v`` through an empty statement on a register of class ``register`` (the target's
        letter).

        Without it LLVM's scheduler may delay an unrolled block's integer sums until its end, and
        spill all their operands until then.
        """
        # ``sideeffect`` keeps the order of the program.
        same = f'asm sideeffect "", "={register},0"'
        return Val(self, self.b.call(v.ty.ir, same, [v.ir]), v.ty)

    def ret(self) -> None:
        self.b.end("ret void")
