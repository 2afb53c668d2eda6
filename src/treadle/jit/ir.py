"""LLVM's IR, written down as it is made: modules, functions, blocks, and the names of values.

An instruction is a line of text as soon as it is emitted. llvmlite's package for the same keeps an
object for each, and writes all of them out at the end: tracing a kernel takes twice as long so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

VOID, POINTER, FLAG, BYTE, DWORD = "void", "ptr", "i1", "i8", "i32"
Named = TypeVar("Named", "Global", "Function")
CODES = {"half": "e", "float": "f", "double": "d"}  # of ``struct``


class Operand:
    """What an instruction's operand is: LLVM's spelling of its type, and its name or number."""

    __slots__ = ("ref", "type")

    def __init__(self, ty: str, ref: str) -> None:
        self.type, self.ref = ty, ref

    def __str__(self) -> str:
        return f"{self.type} {self.ref}"


def vector(scalar: str, lanes: int, *, is_scaled: bool = False) -> str:
    """A vector's type; one that is scaled is as long as a register."""
    return f"<{'vscale x ' if is_scaled else ''}{lanes} x {scalar}>"


def pointer(space: int) -> str:
    """The type of addresses in an address space."""
    return f"{POINTER} addrspace({space})" if space else POINTER


def array_of_bytes(n: int) -> str:
    """The type of so much memory."""
    return f"[{n} x {BYTE}]"


def _spelt(scalar: str, number: float) -> str:
    """A number of a scalar type."""
    if scalar not in CODES:
        return str(number)
    rounded = struct.unpack(CODES[scalar], struct.pack(CODES[scalar], number))[0]
    return f"0x{struct.pack('>d', rounded).hex()}"  # a double's bits, whatever the type


def number(scalar: str, value: float) -> Operand:
    """A constant of a scalar type."""
    return Operand(scalar, _spelt(scalar, value))


def numbers(scalar: str, ty: str, lanes: tuple[float, ...]) -> Operand:
    """A constant vector of type ``ty``, each lane a number of its own."""
    return Operand(ty, f"<{', '.join(f'{scalar} {_spelt(scalar, v)}' for v in lanes)}>")


def zero(ty: str) -> Operand:
    """The zero of any type."""
    return Operand(ty, "zeroinitializer")


def undefined(ty: str) -> Operand:
    """A value that nobody minds."""
    return Operand(ty, "undef")


class Module:
    """What one object is made of: functions and constants by name, in the order of their making."""

    def __init__(self) -> None:
        self.names: dict[str, Global | Function] = {}
        self._notes: list[str] = []

    def note(self, text: str) -> str:
        """The name of a piece of metadata; the same is kept once."""
        if text not in self._notes:
            self._notes.append(text)
        return f"!{self._notes.index(text)}"

    def function(
        self,
        name: str,
        ret: str,
        types: list[str],
        *,
        linkage: str = "",
        convention: str = "",
    ) -> Function:
        start = f"{linkage} {convention}".split()
        return self._added(name, Function(self, name, ret, types, start))

    def data(
        self, name: str, ty: str, how: str, align: int, init: str = "", space: int = 0
    ) -> Global:
        """Memory of that name: ``how`` it is kept, what it is at first, its address space."""
        definition = f"{how} {ty} {init}".rstrip() + f", align {align}"
        return self._added(name, Global(name, definition, space))

    def _added(self, name: str, made: Named) -> Named:
        if name in self.names:
            raise ValueError(f"{name} is there already")
        self.names[name] = made
        return made

    def __str__(self) -> str:
        notes = (f"!{i} = !{{ {text} }}" for i, text in enumerate(self._notes))
        return "\n".join([*(made.definition for made in self.names.values()), *notes, ""])


class Global(Operand):
    """The address of memory that has a name."""

    __slots__ = ("definition",)

    def __init__(self, name: str, definition: str, space: int) -> None:
        super().__init__(pointer(space), f'@"{name}"')
        self.definition = f"{self.ref} = {definition}"


class Function(Operand):
    """A function: one without blocks is somebody else's."""

    __slots__ = ("args", "attributes", "blocks", "module", "n_made", "name", "ret", "start", "told")

    def __init__(
        self, module: Module, name: str, ret: str, types: list[str], start: list[str]
    ) -> None:
        super().__init__(POINTER, f'@"{name}"')
        self.module, self.name, self.ret, self.start = module, name, ret, start
        self.args = [Operand(ty, f"%a{i}") for i, ty in enumerate(types)]
        self.told = [""] * len(types)  # attributes of the arguments
        self.attributes: list[str] = []
        self.blocks: list[BasicBlock] = []
        self.n_made = 0

    def block(self, name: str) -> BasicBlock:
        """A new block, behind those there are."""
        made = BasicBlock(f"{name}{len(self.blocks)}")
        self.blocks.append(made)
        return made

    @property
    def definition(self) -> str:
        types = [
            " ".join(filter(None, (a.type, told)))
            for a, told in zip(self.args, self.told, strict=True)
        ]
        if not self.blocks:
            return f"declare {self.ret} {self.ref}({', '.join(types)})"
        args = ", ".join(f"{ty} {a.ref}" for ty, a in zip(types, self.args, strict=True))
        start = " ".join(["define", *self.start, self.ret])
        head = " ".join([f"{start} {self.ref}({args})", *self.attributes])
        return "\n".join([head, "{", *(block.text for block in self.blocks), "}", ""])


class BasicBlock:
    """Instructions that follow each other, and the jump or return at their end."""

    __slots__ = ("end", "lines", "name")

    def __init__(self, name: str) -> None:
        self.name, self.end = name, ""
        self.lines: list[str] = []

    def __str__(self) -> str:
        return f"label %{self.name}"

    @property
    def text(self) -> str:
        return "\n  ".join([f"{self.name}:", *self.lines, self.end])


def bytes_text(data: bytes) -> str:
    """A constant array of bytes."""
    return 'c"' + "".join([f"\\{byte:02x}" for byte in data]) + '"'


class BlockWriter:
    """Where instructions go: a block of a function. Lines are as LLVM's reference manual has
    them.
    """

    def __init__(self, function: Function, block: BasicBlock) -> None:
        self.function, self.module, self.block = function, function.module, block

    def write(self, line: str) -> None:
        """An instruction that gives nothing."""
        self.block.lines.append(line)

    def made(self, ty: str, line: str) -> Operand:
        """An instruction that gives a ``ty``."""
        function = self.function
        function.n_made += 1
        ref = f"%v{function.n_made}"
        self.block.lines.append(f"{ref} = {line}")
        return Operand(ty, ref)

    def end(self, line: str) -> None:
        """The block's last line."""
        if self.block.end:
            raise ValueError(f"{self.block.name} ends twice: {self.block.end}, {line}")
        self.block.end = line

    def branch(self, to: BasicBlock) -> None:
        self.end(f"br {to}")

    def call(self, ret: str, callee: str, args: Sequence[Operand]) -> Operand:
        """Call what ``callee`` is the name of; nothing is given where ``ret`` is VOID."""
        line = f"call {ret} {callee}({', '.join(map(str, args))})"
        if ret != VOID:
            return self.made(ret, line)
        self.write(line)
        return Operand(VOID, "")

    def call_named(self, name: str, ret: str, args: Sequence[Operand]) -> Operand:
        """Call a function of somebody else, an intrinsic mostly."""
        function = self.module.names.get(name)
        if function is None:
            function = self.module.function(name, ret, [a.type for a in args])
        return self.call(ret, function.ref, args)
