"""Functions that suspend and are resumed later: LLVM coroutines in the kernel language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.jit import ir
from treadle.jit.builder import Builder
from treadle.jit.compile import DEFINITION
from treadle.jit.types import Ty, i8, i32, i64, ptr
from treadle.jit.values import Val

if TYPE_CHECKING:
    from treadle.isa.isa import Isa


TOKEN = "token"
_NONE = ir.Operand(TOKEN, "none")
_FALSE = ir.zero(ir.FLAG)
_NULL = ir.zero(ir.POINTER)


class Coroutine(Builder):
    """Emits a function that suspends itself and is continued by ``resume``. The function returns a
    handle, the argument of ``resume``. Functions that it calls cannot suspend it.
    """

    def __init__(self, function: ir.Function, isa: Isa) -> None:
        super().__init__(function, isa)
        self._leave = self.label("leave")

    def begin(self, frame: Val, room: Val, asked: Val) -> None:
        """Begin the coroutine, and suspend. ``frame``: address of ``room`` bytes of memory for its
        frame. If these are too few, store the size needed at ``asked``, i64, and return null.
        """
        token = self._intrinsic("id", TOKEN, [ir.zero(i32.ir), _NULL, _NULL, _NULL])
        size = Val(self, self._intrinsic("size.i64", i64.ir, []), i64)
        small = self.label("small")
        enough = self.label("enough")
        self.branch(size > room, small, enough)
        self.at(small)
        self.store(asked, size)
        self.b.end(f"ret {_NULL}")
        self.at(enough)
        handle = self._intrinsic("begin", ptr.ir, [token, frame.ir])
        self.at(self._leave)
        self._intrinsic("end", ir.VOID, [handle, _FALSE, _NONE])
        self.b.end(f"ret {handle}")
        self.at(enough)
        self.suspend()

    def suspend(self) -> None:
        """Return to the caller; ``resume`` continues after this point."""
        resumed = self._intrinsic("suspend", i8.ir, [_NONE, _FALSE])
        on = self.label("on")
        self.b.end(f"switch {resumed}, {self._leave} [ i8 0, {on} ]")
        self.at(on)

    def ret(self) -> None:
        """End the coroutine; it must not be resumed again."""
        self.goto(self._leave)

    def _intrinsic(self, name: str, ret: str, args: Sequence[ir.Operand]) -> ir.Operand:
        return self.b.call_named(f"llvm.coro.{name}", ret, args)


def resume(k: Builder, handle: Val) -> None:
    """Continue the coroutine ``handle`` until it suspends again or ends."""
    k.call("llvm.coro.resume", None, [handle.ir])


def trace_coroutine(
    name: str,
    arguments: Sequence[Ty],
    isa: Isa,
    build: Callable[..., None],
    kind: type[Coroutine] = Coroutine,
) -> str:
    """Return the LLVM IR of one coroutine called ``name``, with arguments of the types
    ``arguments``. ``build(k, *args)`` emits all but its end; ``kind`` is the class of k.
    """
    function = _function(name, ptr.ir, arguments)
    _emit(kind(function, isa), function, arguments, build)
    text = str(function.module)
    at = text.index(f'define ptr @"{name}"(')
    return text[:at] + DEFINITION.sub(r"\1 presplitcoroutine", text[at:], count=1)


def trace_function(name: str, arguments: Sequence[Ty], isa: Isa, build: Callable[..., None]) -> str:
    """Return the LLVM IR of one function called ``name`` without a result, with arguments of the
    types ``arguments``. ``build(k, *args)`` emits it.
    """
    function = _function(name, ir.VOID, arguments)
    _emit(Builder(function, isa), function, arguments, build)
    return str(function.module)


def _function(name: str, ret: str, arguments: Sequence[Ty]) -> ir.Function:
    function = ir.Module().function(name, ret, [ty.ir for ty in arguments])
    function.attributes.append("nounwind")
    return function


def _emit(
    k: Builder, function: ir.Function, arguments: Sequence[Ty], build: Callable[..., None]
) -> None:
    given = zip(function.args, arguments, strict=True)
    build(k, *(Val(k, arg, ty) for arg, ty in given))
    k.ret()
