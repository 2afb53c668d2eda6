"""Safe pickle reader: builds dicts, lists, tuples, numbers and strings, and executes no code.

A pickle is a program for a stack machine, and two of its instructions can name and call any
function of any module. Here ``pickletools`` only disassembles the instructions. Those that
checkpoints need are interpreted below; all others are refused. Names are looked up only in the
caller's table: nothing is imported, whatever the file says.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from treadle.errors import FileError

MAX_BYTES = 64 << 20  # size limit of a pickle: 10,000 tensors take 2 MB


class Name(NamedTuple):
    """A name (function or class) in the pickle, of Python's ``module``, that the caller's table
    has; ``meaning`` is its value there.
    """

    module: str
    name: str
    meaning: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


Names = Mapping[tuple[str, str], Any]
Persistent = Callable[[Any], Any]


def load_pickle(raw: bytes, names: Names, persistent: Persistent, *, path: Path, where: str) -> Any:
    """Return the object that the pickle ``raw`` describes; ``path`` and ``where``, its archive
    member, are for messages.

    ``names`` maps each allowed (module, name) to a callable, which REDUCE may call with the
    pickle's arguments, or to any other value, which is only passed on. ``persistent`` converts a
    persistent id to a value. Both raise ValueError to refuse. Raises FileError for anything that a
    checkpoint does not need.
    """
    machine = _Machine(names, persistent)
    at = 0
    try:
        if len(raw) > MAX_BYTES:
            raise ValueError(f"{len(raw)} bytes of pickle")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in a damaged string
            for op, arg, pos in pickletools.genops(raw):
                at = pos or 0
                if op.name not in _OPS:
                    raise ValueError(f"instruction {op.name}, which tensors do not need")
                _OPS[op.name](machine, arg)
        return machine.result
    except IndexError:
        message = "reads from an empty stack"
    except (ValueError, TypeError, KeyError, OverflowError, struct.error) as e:
        message = str(e)
    raise FileError(
        f"pickle byte {at}: {message[:300]}", path=path, where=where, expected="tensors by name"
    )


class _Machine:
    """The stack machine that a pickle is written for: stack, marks and memo."""

    def __init__(self, names: Names, persistent: Persistent) -> None:
        self.names = names
        self.persistent = persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stack under each mark
        self.memo: dict[int, Any] = {}
        self.result: Any = None

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        """Remove the last mark and all items above it from the stack, and return these."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def take(self, n: int) -> tuple[Any, ...]:
        if n > len(self.stack):
            raise IndexError
        items = tuple(self.stack[len(self.stack) - n :])
        del self.stack[len(self.stack) - n :]
        return items

    # -- instructions -------------------------------------------------------------------------

    def keep(self, arg: int | None) -> None:
        self.memo[len(self.memo) if arg is None else arg] = self.stack[-1]

    def recall(self, arg: int) -> None:
        if arg not in self.memo:
            raise ValueError(f"memo {arg}, which is empty")
        self.push(self.memo[arg])

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"sets items of a {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # No tuples: hashing a tuple that the memo nests in itself never ends.
            if type(key) not in (str, int):
                raise ValueError(f"a key that is a {_kind(key)}")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError(f"appends to a {_kind(self.stack[-1])}")
        self.stack[-1].extend(items)

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        if (module, name) not in self.names:
            raise ValueError(f"asks for {module}.{name}, which tensors do not need: refused")
        self.push(Name(module, name, self.names[module, name]))

    def reduce(self) -> None:
        function, args = self.take(2)
        if type(function) is not Name or not callable(function.meaning) or type(args) is not tuple:
            raise ValueError(f"calls a {_kind(function)}")
        self.push(function.meaning(*args))

    def build(self) -> None:
        """Handle BUILD: drop the state of an OrderedDict (torch's ``_metadata``), which is
        unused.
        """
        target, state = self.take(2)
        if type(target) is not dict or type(state) is not dict:
            raise ValueError(f"sets the state of a {_kind(target)}")
        self.push(target)

    def stop(self) -> None:
        (self.result,) = self.take(1)


def _kind(value: Any) -> str:
    """Return the name of the value's type, for messages: its contents may be huge."""
    return str(value) if type(value) is Name else type(value).__name__


def _pushes(_machine: _Machine, arg: Any) -> None:
    _machine.push(arg)


def _two(items: str) -> tuple[str, str]:
    module, _, name = items.partition(" ")
    return module, name


def _refuse_proto(_machine: _Machine, arg: int) -> None:
    if arg > 5:
        raise ValueError(f"pickle protocol {arg}")
    return None


_OPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": _refuse_proto,
    "FRAME": lambda m, a: None,
    "STOP": lambda m, a: m.stop(),
    "MARK": lambda m, a: m.mark(),
    **dict.fromkeys(
        (
            "BININT",
            "BININT1",
            "BININT2",
            "LONG1",
            "BINFLOAT",
            "BINUNICODE",
            "SHORT_BINUNICODE",
            "BINUNICODE8",
            "BINBYTES",
            "SHORT_BINBYTES",
        ),
        _pushes,
    ),
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    "EMPTY_DICT": lambda m, a: m.push({}),
    "EMPTY_LIST": lambda m, a: m.push([]),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "TUPLE1": lambda m, a: m.push(m.take(1)),
    "TUPLE2": lambda m, a: m.push(m.take(2)),
    "TUPLE3": lambda m, a: m.push(m.take(3)),
    "TUPLE": lambda m, a: m.push(tuple(m.to_mark())),
    "SETITEM": lambda m, a: m.set_items(list(m.take(2))),
    "SETITEMS": lambda m, a: m.set_items(m.to_mark()),
    "APPEND": lambda m, a: m.extend(list(m.take(1))),
    "APPENDS": lambda m, a: m.extend(m.to_mark()),
    "BINPUT": lambda m, a: m.keep(a),
    "LONG_BINPUT": lambda m, a: m.keep(a),
    "MEMOIZE": lambda m, a: m.keep(None),
    "BINGET": lambda m, a: m.recall(a),
    "LONG_BINGET": lambda m, a: m.recall(a),
    "GLOBAL": lambda m, a: m.find(*_two(a)),
    "STACK_GLOBAL": lambda m, a: m.find(*m.take(2)),
    "BINPERSID": lambda m, a: m.push(m.persistent(m.take(1)[0])),
    "REDUCE": lambda m, a: m.reduce(),
    "BUILD": lambda m, a: m.build(),
}
