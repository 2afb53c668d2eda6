"""What ops give before it is made: enough to make it as its user wants it."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from treadle.base.fast_dataclass import dataclass
from treadle.models.ops import Rows
from treadle.plan.plan import ANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.plan.plan import Buffer


@dataclass(eq=False)
class Value(Rows):
    """Rows that are made when they are used: as f32 in columns of a buffer, or as activations."""

    outputs: bool = field(default=False, kw_only=True)  # a row for each output, not each token
    acts: dict[ActivationLayout, Buffer] = field(default_factory=dict, kw_only=True)  # made


@dataclass(eq=False)
class Floats(Value):
    """Rows that are there, in f32, from a column of a buffer on."""

    buffer: Buffer
    column: int = 0


@dataclass(eq=False)
class OutputRows(Value):
    """Those rows of ``x`` that outputs are wanted of."""

    x: Rows


@dataclass(eq=False)
class NormOf(Value):
    """A norm of ``x``."""

    x: Rows
    weight: str
    heads: int
    centred: bool
    scale: float
    eps: float
    own: bool = field(default=False, kw_only=True)  # each head has weights of its own
    wide: Buffer | None = field(default=None, kw_only=True)  # f32 in rows as a product's, made


@dataclass(eq=False)
class RopeOf(Value):
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
class ActivationOf(Value):
    """``fn(x)``."""

    x: Rows
    fn: str


@dataclass(eq=False)
class StepOutput(Value):
    """Rows that a step of their own writes, in the layout that it is given."""

    make: Callable[[ActivationLayout], Buffer]


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


@dataclass(eq=False)
class ExpertSum(Value):
    """The weighted sum of experts' rows."""

    y: Buffer
    weights: Buffer
    places: Buffer | None  # of each slot the row; None: its own number
    n_used: int
    shared: list[Buffer]  # what is added beside them, and the score that its sigmoid gates this by
    mean: bool  # of both, in place of their sum


def of_outputs(x: Rows) -> bool:
    """Whether there is a row for each output, not each token."""
    assert isinstance(x, Value)
    return x.outputs


class HeadTransforms(NamedTuple):
    """What is done to queries or keys on their way to attention."""

    source: Rows
    norm: NormOf | None
    table: int | None  # of the rope
    norm_last: bool

    def alike(self, other: HeadTransforms) -> bool:
        """Whether the same is done to both, each by weights and a table of its own."""
        mine, its = ((way.table is None, way.norm is None, way.norm_last) for way in (self, other))
        return mine == its


def unwrap(x: Rows) -> HeadTransforms:
    """A norm and a rope taken off, in whatever order they are there."""
    norm, table, norm_last = None, None, False
    while isinstance(x, (NormOf, RopeOf)):
        if isinstance(x, NormOf):
            if norm is not None:
                break
            norm = x
        else:
            if table is not None:
                break
            table, norm_last = x.table, norm is not None
        x = x.x
    return HeadTransforms(x, norm, table, norm_last)


class ExpertMatrix(NamedTuple):
    """A matrix of each expert."""

    name: str  # of the tensor, or of its rows from the first one's on (``models.ops.part``)
    height: int
    pitch: int  # rows from one expert's to the next one's


@dataclass(frozen=True)
class Branch:
    """How the rows lie that meet their experts in one way: they are those of ``tiles``, made of the
    tokens in ``rows``, which has ``block`` of them together. Without that rows are slots, and
    ``tiles`` their experts.

    Results begin at row ``first``; ``met``: so many rows of an expert go this way.
    """

    label: str
    tiles: Buffer
    n_rows: int
    rows: Buffer | None = None
    block: int = 1
    first: int = 0
    met: range = ANY
