"""Kernel specs: a spec names a kernel, builds it, and checks it.

A kernel is a pure function of its spec. Its machine code has one signature::

    void kernel(const i64 *args, const RunState *run, i64 begin, i64 end, u8 *scratch)

``args`` holds addresses and integers, in the order that the spec declares (``Args``). The work is
a range of items. Any thread may take any part of it: ``kernel`` does items ``begin`` to ``end`` and
shares nothing but its outputs. ``scratch`` is the thread's own memory, ``spec.scratch(lanes)``
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import chain, repeat, takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.types import Ty, i64, ptr
from treadle.kernels.run_state import run_offset

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Isa, Val


def load_record(k: Builder, p: Val, record: np.dtype[Any]) -> dict[str, Val]:
    """Load all fields of the record at ``p``, by name; all are i64."""
    assert record.names is not None
    return {name: k.load(p, i64, offset=8 * i, align=8) for i, name in enumerate(record.names)}


@dataclass(frozen=True)
class Grid:
    """Number of work items of a step: ``base * ceil(count / per)``. ``count`` names a field of
    RUN_STATE, is "one" (1), or names an argument of the step: a buffer that begins with the number,
    i64, which an earlier step has written. Each ``whole`` consecutive items write to the same cache
    lines, so one thread takes all of them.
    """

    base: int
    count: str = "one"
    per: int = 1
    whole: int = 1

    def items(self, run: Any) -> int:
        """Return the number of items for the RUN_STATE record ``run``."""
        n = 1 if self.count == "one" else int(run[self.count])
        return self.base * -(-n // self.per)


class Args:
    """Declaration of a kernel's arguments in their order, each as ``name:kind``.

    ``in`` and ``out``: a buffer that the kernel reads, or writes; ``inout``: both. ``const``:
    memory that outlives the plan, weights or a pool of pages. ``tensor``: a tuple, one word for
    each array of a tensor in the spec's format. Without a kind: an integer. An argument marked
    ``?`` is optional; if it is left out, the kernel reads 0. Arguments of ``each`` are lists with
    one value for each of several tensors; the words of a tensor are consecutive.
    """

    def __init__(self, once: str = "", each: str = "") -> None:
        words = [word.partition(":") for word in f"{once} {each}".split()]
        kinds = self.kinds = {name: kind.rstrip("?") for name, _, kind in words}
        assert set(kinds.values()) <= {"", "in", "out", "inout", "const", "tensor"}, kinds
        self.each = tuple(kinds)[len(once.split()) :]
        self.left_out: dict[str, Any] = dict.fromkeys(kinds)
        self.required = {name for name, _, kind in words if not kind.endswith("?")}
        self.reads = tuple(name for name in kinds if "in" in kinds[name])
        self.writes = tuple(name for name in kinds if "out" in kinds[name])
        self.buffers = (*self.reads, *self.writes)
        self._plain = not self.each and "tensor" not in kinds.values()  # each value takes one word

    def __call__(self, **given: Any) -> SimpleNamespace:
        """Return ``given`` as attributes, as the numpy twin takes them; None for arguments left
        out.
        """
        return SimpleNamespace(**{**self.left_out, **given})

    def in_order(self, given: Mapping[str, Any]) -> list[Any]:
        """Return the value of each 64-bit word that the kernel gets, in its order, from ``given``,
        the arguments by name; None for those left out.
        """
        whole = {**self.left_out, **given}
        assert len(whole) == len(self.kinds), given
        if self._plain:
            return list(whole.values())
        each = zip(*[whole.pop(name) or repeat(None) for name in self.each], strict=False)
        out: list[Any] = []
        for value in chain(whole.values(), *each):
            if type(value) is tuple:
                out += value
            else:
                out.append(value)
        return out


class Frame:
    """View of a kernel's arguments and of the run's state while the kernel is built. Arguments are
    attributes by name: loading one emits a load of the address or integer.
    """

    def __init__(
        self, k: Builder, spec: Spec, args: Val, run: Val, begin: Val, end: Val, scratch: Val
    ) -> None:
        self.k = k
        self.spec = spec
        self.args = args
        self.block = run
        self.begin = begin
        self.end = end
        self.scratch = scratch

    def __getattr__(self, name: str) -> Val:
        found: Val = self.each(name)
        return found

    def each(self, name: str, i: int = 0) -> Any:
        """Emit a load of argument ``name`` and return it: an address or an integer, or a tuple of
        addresses for the kind ``tensor``. ``i``: which value of an argument of ``Args.each``, a
        list with a value for each tensor; 0 for the other arguments.
        """
        spec: Any = self.spec
        kinds = spec.args.kinds
        sizes = {n: len(spec.fmt.strides) if kinds[n] == "tensor" else 1 for n in kinds}
        ty = ptr if kinds[name] else i64
        at = sum(sizes[n] for n in takewhile(lambda n: n != name, kinds))
        at += i * sum(sizes[n] for n in spec.args.each)
        words = range(at, at + sizes[name])
        found = tuple(self.k.load(self.args, ty, align=8, offset=8 * word) for word in words)
        return found if kinds[name] == "tensor" else found[0]

    def run(self, field: str, ty: Ty = i64) -> Val:
        """Load ``field`` of the run's state, a count as i64; with ``ty`` ptr, the address of the
        array that the field locates.
        """
        value = self.k.load(self.block, i64, align=8, offset=run_offset(field))
        return self.block + value if ty == ptr else value


@dataclass(frozen=True)
class Spec:
    """Base of the specs. A spec is one kernel: its fields are its name, its cache key and its test
    id.
    """

    op: ClassVar[str]
    args: ClassVar[Args] = Args()
    reads_masks: ClassVar[bool] = False  # whether it reads the samplers' token masks

    def __post_init__(self) -> None:
        """Round float fields to f32, as constants in the code are, so that the digits in a name are
        exact.
        """
        kind: Any = type(self)
        for name in _floats(kind):
            # + 0.0 turns -0.0 into 0.0: equal values must have equal names.
            object.__setattr__(self, name, float(np.float32(getattr(self, name))) + 0.0)

    @property
    def name(self) -> str:
        """The kernel's name: ``op``, then the fields, joined by ``_``. A string is its value, a
        number its name and value (``k100``), True the field's name, False ``not_`` and the name.
        Fields at their default are left out.
        """
        parts = [self.op]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                parts.append(field.name if value else f"not_{field.name}")
            else:
                label = "" if isinstance(value, str) else field.name
                # str of the f32: an f-string would write all digits of its f64 value.
                digits = str(np.float32(value)) if isinstance(value, float) else value
                parts.append(f"{label}{digits}")
        return "_".join(parts)

    @property
    def needs(self) -> set[str]:
        """Names of the arguments that must be given: those without ``?``, and optional ones that
        the spec's fields require.
        """
        return self.args.required

    @property
    def compile_ms(self) -> float:
        """Rough estimate of the kernel's compile time in ms: a plan's slowest kernels are compiled
        first.
        """
        return 30.0

    def scratch(self, lanes: int) -> int:
        """Return the bytes of scratch that a thread needs, if vectors have ``lanes`` f32 values."""
        return 0

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        """Return the least bytes of cached keys and values that are read, and the operations on
        them, for ``n_tokens`` tokens of a sequence after ``n_before`` others. (0, 0) for kernels
        that read no pages.
        """
        return 0, 0

    def emit(
        self, k: Builder, isa: Isa, args: Val, run: Val, begin: Val, end: Val, scratch: Val
    ) -> None:
        """Emit the kernel into ``k``'s function. ``args``, ``run``, ``begin``, ``end`` and
        ``scratch`` are the run-time values of the machine code's arguments.
        """
        self.build(k, isa, Frame(k, self, args, run, begin, end, scratch))

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel: a loop over the items ``frame.begin`` to ``frame.end``."""
        raise NotImplementedError

    def run_ref(self, args: Any, run: Any) -> None:
        """Run the numpy twin over the whole grid. ``args`` has arrays and numbers, by name; ``run``
        the run's state.
        """
        raise NotImplementedError


@cache
def _floats(cls: Any) -> tuple[str, ...]:
    """Return the names of the float fields of spec class ``cls``. Cached: a plan makes hundreds of
    specs.
    """
    return tuple(field.name for field in fields(cls) if field.type in ("float", float))


def f32_values(x: np.ndarray) -> np.ndarray:
    """Return a twin's argument as f32: activations that another step packed as f32 are bytes."""
    return x.view(np.float32) if x.dtype == np.uint8 else x


def whole_rows(values: np.ndarray, stride: int) -> np.ndarray:
    """Return the complete rows ``[n, stride]`` of ``values``, a twin's flat argument, which may end
    in the middle of a row.
    """
    return values[: values.size // stride * stride].reshape(-1, stride)


def parts(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Split ``n`` into parts of ``size``, the last one smaller: yield the start and the length of
    each.
    """
    return ((at, min(size, n - at)) for at in range(0, n, size))


def widest(most: int, n: int) -> int:
    """Return the lanes of the widest vector that divides ``n``: ``most``, a power of two,
    or less.
    """
    width = most
    while n % width:
        width //= 2
    return width
