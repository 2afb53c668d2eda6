"""LLVM IR as text: modules, functions, basic blocks, and operands.

An instruction becomes a line of text when it is emitted. llvmlite's own IR package keeps an object
for each and prints them at the end, which makes tracing a kernel take twice as long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

VOID = "void"
POINTER = "ptr"
FLAG = "i1"
BYTE = "i8"
DWORD = "i32"
Named = TypeVar("Named", "Global", "Function")
CODES = {"half": "e", "float": "f", "double": "d"}  # ``struct`` format characters


class Operand:
    """An operand of an LLVM instruction: the text of its type, and of its name or number."""

    __slots__ = ("ref", "type")

    def __init__(self, ty: str, ref: str) -> None:
        self.type = ty
        self.ref = ref

    def __str__(self) -> str:
        return f"{self.type} {self.ref}"


def vector(scalar: str, lanes: int, *, is_scaled: bool = False) -> str:
    """Return LLVM's name of the type of a vector of ``lanes`` scalars. ``is_scaled``: scalable:
    ``lanes`` for every 128 bits of a register.
    """
    return f"<{'vscale x ' if is_scaled else ''}{lanes} x {scalar}>"


def pointer(space: int) -> str:
    """Return LLVM's name of the pointer type of an address space."""
    return f"{POINTER} addrspace({space})" if space else POINTER


def array_of_bytes(n: int) -> str:
    """Return LLVM's name of the type of ``n`` bytes."""
    return f"[{n} x {BYTE}]"


def _spelt(scalar: str, number: float) -> str:
    """Return LLVM's text of ``number`` as a constant of type ``scalar``."""
    if scalar not in CODES:
        return str(number)
    rounded = struct.unpack(CODES[scalar], struct.pack(CODES[scalar], number))[0]
    return f"0x{struct.pack('>d', rounded).hex()}"  # LLVM prints all float types as a double's bits


def number(scalar: str, value: float) -> Operand:
    """Return the constant ``value`` of LLVM's type ``scalar``."""
    return Operand(scalar, _spelt(scalar, value))


def numbers(scalar: str, ty: str, lanes: tuple[float, ...]) -> Operand:
    """Return a constant vector of type ``ty``, with one number of type ``scalar`` for each lane."""
    return Operand(ty, f"<{', '.join(f'{scalar} {_spelt(scalar, v)}' for v in lanes)}>")


def zero(ty: str) -> Operand:
    """Return the zero of LLVM's type ``ty``."""
    return Operand(ty, "zeroinitializer")


def undefined(ty: str) -> Operand:
    """Return the undefined value (LLVM's ``undef``) of type ``ty``."""
    return Operand(ty, "undef")


class Module:
    """An LLVM module: its functions and constants by name, in order of creation."""

    def __init__(self) -> None:
        self.names: dict[str, Global | Function] = {}
        self._notes: list[str] = []

    def note(self, text: str) -> str:
        """Add a metadata node with this text, unless there is an equal one; return the node's name
        (``!0``).
        """
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
        """Define a global variable of type ``ty`` and return its address. ``how``: its linkage and
        kind, such as "internal global"; ``align``: in bytes; ``init``: its initial value as LLVM's
        text; ``space``: its address space.
        """
        definition = f"{how} {ty} {init}".rstrip() + f", align {align}"
        return self._added(name, Global(name, definition, space))

    def _added(self, name: str, made: Named) -> Named:
        if name in self.names:
            raise ValueError(f"the module already defines {name}")
        self.names[name] = made
        return made

    def __str__(self) -> str:
        notes = (f"!{i} = !{{ {text} }}" for i, text in enumerate(self._notes))
        return "\n".join([*(made.definition for made in self.names.values()), *notes, ""])


class Global(Operand):
    """The address of a global variable."""

    __slots__ = ("definition",)

    def __init__(self, name: str, definition: str, space: int) -> None:
        super().__init__(pointer(space), f'@"{name}"')
        self.definition = f"{self.ref} = {definition}"


class Function(Operand):
    """An LLVM function. Without blocks it is an external declaration."""

    __slots__ = (
        "arg_attributes",
        "args",
        "attributes",
        "blocks",
        "module",
        "n_made",
        "name",
        "ret",
        "start",
    )

    def __init__(
        self, module: Module, name: str, ret: str, types: list[str], start: list[str]
    ) -> None:
        super().__init__(POINTER, f'@"{name}"')
        self.module = module
        self.name = name
        self.ret = ret
        self.start = start
        self.args = [Operand(ty, f"%a{i}") for i, ty in enumerate(types)]
        self.arg_attributes = [""] * len(types)
        self.attributes: list[str] = []
        self.blocks: list[BasicBlock] = []
        self.n_made = 0

    def block(self, name: str) -> BasicBlock:
        """Append a new basic block."""
        result = BasicBlock(f"{name}{len(self.blocks)}")
        self.blocks.append(result)
        return result

    @property
    def definition(self) -> str:
        types = [
            " ".join(filter(None, (a.type, attribute)))
            for a, attribute in zip(self.args, self.arg_attributes, strict=True)
        ]
        if not self.blocks:
            return f"declare {self.ret} {self.ref}({', '.join(types)})"
        args = ", ".join(f"{ty} {a.ref}" for ty, a in zip(types, self.args, strict=True))
        start = " ".join(["define", *self.start, self.ret])
        head = " ".join([f"{start} {self.ref}({args})", *self.attributes])
        return "\n".join([head, "{", *(block.text for block in self.blocks), "}", ""])


class BasicBlock:
    """A basic block: instructions, then a jump or a return."""

    __slots__ = ("end", "lines", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.end = ""
        self.lines: list[str] = []

    def __str__(self) -> str:
        return f"label %{self.name}"

    @property
    def text(self) -> str:
        return "\n  ".join([f"{self.name}:", *self.lines, self.end])


def bytes_text(data: bytes) -> str:
    """Return LLVM's text of ``data`` as a constant array of bytes."""
    return 'c"' + "".join([f"\\{byte:02x}" for byte in data]) + '"'


class BlockWriter:
    """Appends instructions, as lines of LLVM IR, to the current basic block of a function."""

    def __init__(self, function: Function, block: BasicBlock) -> None:
        self.function = function
        self.module = function.module
        self.block = block

    def write(self, line: str) -> None:
        """Append the instruction ``line``, which has no result."""
        self.block.lines.append(line)

    def made(self, ty: str, line: str) -> Operand:
        """Append the instruction ``line``, which has a result of type ``ty``, and return the
        result.
        """
        function = self.function
        function.n_made += 1
        ref = f"%v{function.n_made}"
        self.block.lines.append(f"{ref} = {line}")
        return Operand(ty, ref)

    def end(self, line: str) -> None:
        """Set the block's terminator to the instruction ``line``. Raises ValueError if there is one
        already.
        """
        if self.block.end:
            raise ValueError(
                f"block {self.block.name} already ends with {self.block.end}; cannot add {line}"
            )
        self.block.end = line

    def branch(self, to: BasicBlock) -> None:
        self.end(f"br {to}")

    def call(self, ret: str, callee: str, args: Sequence[Operand]) -> Operand:
        """Call the function ``callee`` (LLVM's text) and return its result, of type ``ret``.
        ``ret`` VOID: no result.
        """
        line = f"call {ret} {callee}({', '.join(map(str, args))})"
        if ret != VOID:
            return self.made(ret, line)
        self.write(line)
        return Operand(VOID, "")

    def call_named(self, name: str, ret: str, args: Sequence[Operand]) -> Operand:
        """Call the external function ``name``, usually an intrinsic, and return its result, of type
        ``ret``. The first call declares the function in the module.
        """
        function = self.module.names.get(name)
        if function is None:
            function = self.module.function(name, ret, [a.type for a in args])
        return self.call(ret, function.ref, args)
