"""What ops give before it is made: enough to make it as its user wants it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treadle.models.ops import Rows

if TYPE_CHECKING:
    from treadle.kernels.act import Act
    from treadle.plan import Buffer


@dataclass(eq=False)
class Value(Rows):
    """Rows that are made when they are used: as f32 in columns of a buffer, or as activations."""

    outputs: bool = field(default=False, kw_only=True)  # a row for each output, not each token
    acts: dict[Act, Buffer] = field(default_factory=dict, kw_only=True)  # made


@dataclass(eq=False)
class Floats(Value):
    """Rows that are there, in f32."""

    buffer: Buffer


@dataclass(eq=False)
class Outputs(Value):
    """Those rows of ``x`` that outputs are wanted of."""

    x: Rows


@dataclass(eq=False)
class Normed(Value):
    """A norm of ``x``."""

    x: Rows
    weight: str
    heads: int
    centred: bool


@dataclass(eq=False)
class Roped(Value):
    """``x`` with its pairs turned."""

    x: Rows
    table: int


@dataclass(eq=False)
class GateUp(Value):
    """``fn(gate) * up``."""

    gate: Rows
    up: Rows
    fn: str


@dataclass(eq=False)
class Products:
    """Products of one input, side by side in one buffer once they are made."""

    label: str
    x: Rows
    names: list[str]
    heights: list[int]
    y: Buffer | None = None
    columns: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Product(Value):
    """One of several products."""

    of: Products
    index: int


def of_outputs(x: Rows) -> bool:
    """Whether there is a row for each output, not each token."""
    assert isinstance(x, Value)
    return x.outputs
