"""Deferred values: the result of an op whose steps are emitted on first use, so that the consumer
chooses layout and fusion.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from treadle.base.fast_classes import dataclass
from treadle.models.ops import Rows
from treadle.plan.plan import ANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.models.ops import TensorName
    from treadle.plan.plan import Buffer


@dataclass(eq=False)
class Value(Rows):
    """The deferred result of an op. Once emitted it is f32 in columns of a buffer, or rows in the
    layout of a product. ``acts``: the buffers by layout, as far as they are emitted.
    """

    outputs: bool = field(default=False, kw_only=True)  # one row per output, not per token
    acts: dict[ActivationLayout, Buffer] = field(default_factory=dict, kw_only=True)  # written


@dataclass(eq=False)
class Floats(Value):
    """f32 rows that a step has already written: the columns of ``buffer`` from ``column`` on."""

    buffer: Buffer
    column: int = 0


@dataclass(eq=False)
class Chosen(Value):
    """The keys or units that an indexer has chosen for each token; ``bits`` None: all of them."""

    bits: Buffer | None


@dataclass(eq=False)
class OutputRows(Value):
    """The rows of ``x`` for which outputs are requested."""

    x: Rows


@dataclass(eq=False)
class NormOf(Value):
    """A deferred norm of ``x``, or of each of its ``heads`` equal parts, with weights from the
    tensor ``weight`` times ``scale``. ``centred``: LayerNorm, else RMS norm.
    """

    x: Rows
    weight: str
    heads: int
    centred: bool
    scale: float
    eps: float
    own: bool = field(default=False, kw_only=True)  # each head has weights of its own
    wide: Buffer | None = field(default=None, kw_only=True)  # as f32 rows padded like a product's


@dataclass(eq=False)
class RopeOf(Value):
    """A deferred rotation of the pairs of ``x`` by rope table ``table``."""

    x: Rows
    table: int


@dataclass(eq=False)
class GateUp(Value):
    """A deferred ``fn(gate) * up``."""

    gate: Rows
    up: Rows
    fn: str


@dataclass(eq=False)
class ActivationOf(Value):
    """A deferred activation ``fn(x)``."""

    x: Rows
    fn: str


@dataclass(eq=False)
class StepOutput(Value):
    """Rows of an op with a step of its own; ``make(layout)`` emits it and returns a buffer in that
    layout.
    """

    make: Callable[[ActivationLayout], Buffer]


@dataclass(eq=False)
class Products:
    """Deferred products of one input ``x`` with several matrices. ``heights``: rows of each matrix;
    once emitted, ``y`` has all products side by side, from ``columns`` on.
    """

    label: str
    x: Rows
    stems: list[TensorName]
    heights: list[int]
    y: Buffer | None = None
    columns: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Product(Value):
    """The product with one matrix of ``Products``, by its index."""

    of: Products
    index: int


@dataclass(eq=False)
class ExpertSum(Value):
    """The deferred weighted sum of the rows ``y`` of each token's ``n_used`` experts, with
    ``weights``, one per choice (an expert of a token).
    """

    y: Buffer
    weights: Buffer
    places: Buffer | None  # the row of each choice; None: the choice's number
    n_used: int
    shared: list[Buffer]  # the shared expert's rows, and the score whose sigmoid gates them
    mean: bool  # the mean of routed and shared experts, instead of their sum


def is_per_output(x: Rows) -> bool:
    """Return whether ``x`` has one row per output, not per token."""
    assert isinstance(x, Value)
    return x.outputs


class HeadTransforms(NamedTuple):
    """The norm and the rope that are applied to queries or keys (``source``) before attention, and
    their order: ``norm_last`` means rope first. None: no norm, no rope.
    """

    source: Rows
    norm: NormOf | None
    table: int | None  # rope table
    norm_last: bool

    def has_same_kinds(self, other: HeadTransforms) -> bool:
        """Return whether ``other`` has the same kinds of transforms in the same order; weights and
        tables may differ.
        """
        mine, its = ((way.table is None, way.norm is None, way.norm_last) for way in (self, other))
        return mine == its


def unwrap(x: Rows) -> HeadTransforms:
    """Remove a norm and a rope, in either order, from the deferred value ``x``; return the value
    below them with these transforms.
    """
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
    """A tensor with one matrix of ``height`` rows per expert, such as all ``up`` matrices of a
    layer.
    """

    stem: TensorName  # of the tensor, or of its rows from the first expert's on
    height: int  # rows of one expert's matrix
    pitch: int  # rows between consecutive experts


@dataclass(frozen=True)
class Branch:
    """The part of a mixture of experts that is computed by one kind of product: gemv or tiles. A
    choice is one expert of one token.

    tiles: the tiles, each with rows of one expert; if ``rows`` is None, the expert of each choice.
    n_rows: the largest number of rows.
    rows: the token of each row; an expert's rows are padded to blocks of ``block``. None: one row
        per choice.
    first: index in the mixture's result of the branch's first row.
    rows_per_expert: the branch computes the experts whose number of rows is in this range.
    """

    label: str
    tiles: Buffer
    n_rows: int
    rows: Buffer | None = None
    block: int = 1
    first: int = 0
    rows_per_expert: range = ANY
