"""Functions that suspend and are resumed later: LLVM's coroutines, in the kernel language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from treadle.jit.builder import Builder
from treadle.jit.compile import DEFINITION
from treadle.jit.types import Ty, i8, i32, i64, ptr
from treadle.jit.values import Val

if TYPE_CHECKING:
    from treadle.isa.isa import Isa


class _Token(ir.Type):  # type: ignore[misc]  # llvmlite lacks it
    def _to_string(self) -> str:
        return "token"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Token)

    def __hash__(self) -> int:
        return hash(_Token)


_NONE = ir.FormattedConstant(_Token(), "none")
_FALSE, _NULL = ir.Constant(ir.IntType(1), 0), ir.Constant(ptr.ir, None)


class Coroutine(Builder):
    """Emits a function that gives a handle, for ``resume``. What it calls cannot suspend."""

    def __init__(self, function: Any, isa: Isa) -> None:
        super().__init__(function, isa)
        self._leave = self.label("leave")

    def begin(self, frame: Val, room: Val, asked: Val) -> None:
        """Whatever outlives a suspension is kept at ``frame``, and suspend. Where ``room`` bytes
        are not enough, the number needed goes to ``asked``, i64, and the function gives null.
        """
        token = self._intrinsic("id", _Token(), [ir.Constant(i32.ir, 0), _NULL, _NULL, _NULL])
        size = Val(self, self._intrinsic("size.i64", i64.ir, []), i64)
        small, enough = self.label("small"), self.label("enough")
        self.branch(size > room, small, enough)
        self.at(small)
        self.store(asked, size)
        self.b.ret(_NULL)
        self.at(enough)
        handle = self._intrinsic("begin", ptr.ir, [token, frame.ir])
        self.at(self._leave)
        self._intrinsic("end", ir.VoidType(), [handle, _FALSE, _NONE])
        self.b.ret(handle)
        self.at(enough)
        self.suspend()

    def suspend(self) -> None:
        """Give control back; go on here when resumed."""
        resumed, on = self._intrinsic("suspend", i8.ir, [_NONE, _FALSE]), self.label("on")
        self.b.switch(resumed, self._leave).add_case(ir.Constant(i8.ir, 0), on)
        self.at(on)

    def ret(self) -> None:
        """The end: it may not be resumed any more."""
        self.goto(self._leave)

    def _intrinsic(self, name: str, ret: Any, args: Sequence[Any]) -> Any:
        name = f"llvm.coro.{name}"
        made = self.module.globals.get(name)
        if made is None:
            made = ir.Function(self.module, ir.FunctionType(ret, [a.type for a in args]), name)
        return self.b.call(made, args)


def resume(k: Builder, handle: Val) -> None:
    """Let a coroutine go on, until it suspends again or ends."""
    k.call("llvm.coro.resume", None, [handle.ir])


def trace_coroutine(
    name: str,
    arguments: Sequence[Ty],
    isa: Isa,
    build: Callable[..., None],
    kind: type[Coroutine] = Coroutine,
) -> str:
    """IR of one coroutine; ``build(k, *args)`` begins it, and emits it but for its end. ``kind``:
    k's.
    """
    function = _function(name, ptr.ir, arguments)
    _emit(kind(function, isa), function, arguments, build)
    text = str(function.module)
    at = text.index(f'define ptr @"{name}"(')
    return text[:at] + DEFINITION.sub(r"\1 presplitcoroutine", text[at:], count=1)


def trace_function(name: str, arguments: Sequence[Ty], isa: Isa, build: Callable[..., None]) -> str:
    """IR of one function that gives nothing; ``build(k, *args)`` emits it."""
    function = _function(name, ir.VoidType(), arguments)
    _emit(Builder(function, isa), function, arguments, build)
    return str(function.module)


def _function(name: str, ret: Any, arguments: Sequence[Ty]) -> Any:
    signature = ir.FunctionType(ret, [ty.ir for ty in arguments])
    function = ir.Function(ir.Module(name=name), signature, name=name)
    function.attributes.add("nounwind")
    return function


def _emit(k: Builder, function: Any, arguments: Sequence[Ty], build: Callable[..., None]) -> None:
    given = zip(function.args, arguments, strict=True)
    build(k, *(Val(k, arg, ty) for arg, ty in given))
    k.ret()
