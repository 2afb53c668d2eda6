"""What a kernel is to the rest of treadle: a spec that names it, builds it, and checks it.

A kernel is a pure function of its spec. Its machine code has one signature::

    void kernel(const i64 *args, const RunState *run, i64 begin, i64 end, u8 *scratch)

``args`` holds addresses and integers, in the order that the spec's docstring gives. The work is
a range of items; any thread may take any part of it, so ``kernel`` does items ``begin`` to ``end``
and shares nothing but its outputs. ``scratch`` is the thread's own memory, ``spec.scratch`` bytes
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from treadle.jit.types import Ty, i64, ptr

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

# What changes from one run to the next. The compiled steps read it by pointer; ``engine.py`` fills
# it.
RUN_STATE = np.dtype(
    [
        ("n_tokens", "i8"),  # rows of this batch
        ("n_outputs", "i8"),  # rows of which logits are wanted
        ("n_attn_items", "i8"),  # attention: work items
        ("n_attn_merges", "i8"),  # attention: query groups whose keys were split among items
        ("tokens", "i8"),  # *i32 [n_tokens]
        ("output_rows", "i8"),  # *i32 [n_outputs]: which rows
        ("rope_global", "i8"),  # *f32 [n_tokens, 2, rope_dims / 2]: cosines, then sines
        ("rope_local", "i8"),  # the same for layers with the local rope base
        (
            "kv_slots_global",
            "i8",
        ),  # *i64 [n_tokens]: slot = page * page_size + place, where to write
        ("kv_slots_local", "i8"),  # the same in the sliding-window layers' pool
        ("attn_items_global", "i8"),  # *AttnItem [n_attn_items]
        ("attn_items_local", "i8"),
        ("attn_merges_global", "i8"),  # *AttnMerge [n_attn_merges]
        ("attn_merges_local", "i8"),
        ("n_attn_items_local", "i8"),
        ("n_attn_merges_local", "i8"),
    ]
)
COUNTS = (
    "one",
    "n_tokens",
    "n_outputs",
    "n_attn_items",
    "n_attn_merges",
    "n_attn_items_local",
    "n_attn_merges_local",
)


@dataclass(frozen=True)
class Grid:
    """Work items of a step: ``base * ceil(count / per)``, ``count`` a field of RUN_STATE or the
    constant one.
    """

    base: int
    count: str = "one"
    per: int = 1

    def items(self, run: Any) -> int:
        """Items for the RUN_STATE record ``run``."""
        n = 1 if self.count == "one" else int(run[self.count])
        return self.base * -(-n // self.per)


class Frame:
    """A kernel's arguments while it is being built: typed access to ``args`` and to the run's
    state.
    """

    def __init__(self, k: Builder, args: Val, run: Val, begin: Val, end: Val, scratch: Val) -> None:
        self.k, self.args, self._run = k, args, run
        self.begin, self.end, self.scratch = begin, end, scratch

    def ptr(self, slot: int) -> Val:
        return self.k.load(self.args, ptr, align=8, offset=8 * slot)

    def int(self, slot: int) -> Val:
        return self.k.load(self.args, i64, align=8, offset=8 * slot)

    def run(self, field: str, ty: Ty = i64) -> Val:
        fields_ = RUN_STATE.fields
        assert fields_ is not None
        return self.k.load(self._run, ty, align=8, offset=int(fields_[field][1]))


@dataclass(frozen=True)
class Spec:
    """One kernel. A subclass adds at most ten fields; together they are its name, its cache key and
    its test id.
    """

    op: ClassVar[str]

    def __post_init__(self) -> None:
        """Round floats to f32, as constants of the code are: then a name's digits tell all."""
        kind: Any = type(self)
        for name in _floats(kind):
            # + 0.0: the zeros are equal, and so is their name.
            object.__setattr__(self, name, float(np.float32(getattr(self, name))) + 0.0)

    @property
    def name(self) -> str:
        """``op_value_value``; a field at its default is left out, True gives the field's own
        name.
        """
        parts = [self.op]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is True:
                parts.append(field.name)
            elif value != field.default:
                label = "" if isinstance(value, str) else field.name
                # str: an f-string would write all digits of the f64 that the f32 is.
                digits = str(np.float32(value)) if isinstance(value, float) else value
                parts.append(f"{label}{digits}")
        return "_".join(parts)

    @property
    def scratch(self) -> int:
        """Bytes of scratch a thread needs."""
        return 0

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        """Bytes of keys and values that ``n_tokens`` of one sequence behind ``n_before`` others
        make this kernel read at least, and operations on them: nothing, but for attention.
        """
        return 0, 0

    def emit(
        self, k: Builder, isa: Isa, args: Val, run: Val, begin: Val, end: Val, scratch: Val
    ) -> None:
        """Emit the kernel into ``k``'s function, whose arguments these are."""
        self.build(k, isa, Frame(k, args, run, begin, end, scratch))

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel."""
        raise NotImplementedError

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        """The numpy twin: does the whole grid on arrays in the order of the step's reads and
        writes.
        """
        raise NotImplementedError


@cache
def _floats(cls: Any) -> tuple[str, ...]:
    """The fields of a kind of spec that are floats: looked up once, for a plan makes hundreds."""
    return tuple(field.name for field in fields(cls) if field.type in ("float", float))


def round_up(n: int, multiple: int) -> int:
    """The next multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def widest(most: int, n: int) -> int:
    """The widest vector, a power of two of at most ``most`` lanes, that divides ``n``."""
    width = most
    while n % width:
        width //= 2
    return width
