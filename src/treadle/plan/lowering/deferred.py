"""Deferred values: an op's result before its code exists, so that the consumer chooses layout and
fusion.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from treadle.base.fast_dataclass import dataclass
from treadle.models.ops import Rows
from treadle.plan.plan import ANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.models.ops import TensorName
    from treadle.plan.plan import Buffer


@dataclass(eq=False)
class Value(Rows):
    """Rows that are materialised on use: as f32 in columns of a buffer, or as activations."""

    outputs: bool = field(default=False, kw_only=True)  # one row per output, not per token
    acts: dict[ActivationLayout, Buffer] = field(default_factory=dict, kw_only=True)  # written


@dataclass(eq=False)
class Floats(Value):
    """Materialised f32 rows, from a column of a buffer on."""

    buffer: Buffer
    column: int = 0


@dataclass(eq=False)
class Chosen(Value):
    """The keys that an indexer has chosen for each token; without ``bits`` all of them."""

    bits: Buffer | None


@dataclass(eq=False)
class OutputRows(Value):
    """The rows of ``x`` for which outputs are requested."""

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
    own: bool = field(default=False, kw_only=True)  # weights differ between heads
    wide: Buffer | None = field(default=None, kw_only=True)  # as f32 rows padded like a product's


@dataclass(eq=False)
class RopeOf(Value):
    """``x`` with its pairs rotated."""

    x: Rows
    table: int


@dataclass(eq=False)
class GateUp(Value):
    """The deferred result of ``fn(gate) * up``."""

    gate: Rows
    up: Rows
    fn: str


@dataclass(eq=False)
class ActivationOf(Value):
    """The deferred result of ``fn(x)``, an activation."""

    x: Rows
    fn: str


@dataclass(eq=False)
class StepOutput(Value):
    """Rows written by a separate step, in the layout passed to ``make``."""

    make: Callable[[ActivationLayout], Buffer]


@dataclass(eq=False)
class Products:
    """Products of one input, side by side in one buffer once they are computed."""

    label: str
    x: Rows
    stems: list[TensorName]
    heights: list[int]
    y: Buffer | None = None
    columns: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Product(Value):
    """One of several ``Products``."""

    of: Products
    index: int


@dataclass(eq=False)
class ExpertSum(Value):
    """The weighted sum of experts' rows."""

    y: Buffer
    weights: Buffer
    places: Buffer | None  # the row of each choice; None: the choice's number
    n_used: int
    shared: list[Buffer]  # the shared expert's rows, and the score whose sigmoid gates them
    mean: bool  # the mean of routed and shared experts, instead of their sum


def of_outputs(x: Rows) -> bool:
    """Return whether ``x`` has one row per output, not per token."""
    assert isinstance(x, Value)
    return x.outputs


class HeadTransforms(NamedTuple):
    """Transforms of queries or keys before attention: norm, rope, and their order."""

    source: Rows
    norm: NormOf | None
    table: int | None  # rope table
    norm_last: bool

    def alike(self, other: HeadTransforms) -> bool:
        """Return whether both have the same transforms, weights and tables aside."""
        mine, its = ((way.table is None, way.norm is None, way.norm_last) for way in (self, other))
        return mine == its


def unwrap(x: Rows) -> HeadTransforms:
    """Strip a norm and a rope, in either order, from ``x``."""
    norm = None
    table = None
    norm_last = False
    while isinstance(x, (NormOf, RopeOf)):
        if isinstance(x, NormOf):
            if norm is not None:
                break
            norm = x
        else:
            if table is not None:
                break
            table = x.table
            norm_last = norm is not None
        x = x.x
    return HeadTransforms(x, norm, table, norm_last)


class ExpertMatrix(NamedTuple):
    """One matrix of every expert."""

    stem: TensorName  # of the tensor, or of its rows from the first expert's on
    height: int
    pitch: int  # rows between consecutive experts


@dataclass(frozen=True)
class Branch:
    """Layout of the expert rows that take one path (gemv or tiles).

    ``tiles`` lists the tiles; ``rows`` the token of each row, in groups of ``block``. Without
    ``rows``, rows are choices and ``tiles`` holds each choice's expert.

    Results begin at row ``first``; ``met``: the numbers of rows of an expert that take this path.
    """

    label: str
    tiles: Buffer
    n_rows: int
    rows: Buffer | None = None
    block: int = 1
    first: int = 0
    met: range = ANY
