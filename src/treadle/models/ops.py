"""The ops that graphs are built of: an interface that each device implements.

A graph states what is computed from what. Memory layout, kernels and the number of steps are chosen
by the device's *lowering* (``plan/lowering/``), which may defer an op until its result is used, and
fuse it with others. ``docs/graph-vocabulary.md`` lists the ops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_dataclass import dataclass

if TYPE_CHECKING:
    from treadle.models.config import Config


@dataclass(eq=False)
class Rows:
    """The result of an op: a matrix with a row per token of the batch, per output or per input."""

    label: str
    width: int


@dataclass(frozen=True)
class TensorSlice:
    """Rows ``first`` to ``first + n - 1`` of a tensor, used as a tensor of their own.

    ``whole``: the tensor's name in the file, or the stem of a matrix and its bias.
    """

    whole: str
    first: int
    n: int

    def __str__(self) -> str:
        return f"{self.whole}[{self.first}:{self.first + self.n}]"


TensorName = str | TensorSlice


def tensor_of(stem: TensorName, kind: str) -> TensorName:
    """Return the tensor of a stem: its "weight" or its "bias"; of a slice, the same rows."""
    if isinstance(stem, TensorSlice):
        return TensorSlice(f"{stem.whole}.{kind}", stem.first, stem.n)
    return f"{stem}.{kind}"


class Ops(ABC):
    """The ops of one plan. ``label`` names an op's steps; matrices are named by their stem in the
    file, such as ``blk.0.attn_q``, and their bias, if any, is added. A ``TensorSlice`` is some
    rows of a matrix.
    """

    config: Config

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the file has a tensor."""

    @abstractmethod
    def embed(self, label: str, weight: str, scale: float) -> Rows:
        """Return the matrix' rows of the batch's tokens, times ``scale``."""

    @abstractmethod
    def given(self, label: str, width: int) -> Rows:
        """Return an input of each run, f32: hidden states of all tokens, computed elsewhere."""

    @abstractmethod
    def add_rows(self, label: str, x: Rows, weight: str, *, by: str) -> Rows:
        """Add to ``x``, for each token, a row of the matrix: that of its ``position``, of its
        ``type``, or the ``first``. Overwrites ``x``.
        """

    @abstractmethod
    def norm(
        self,
        label: str,
        x: Rows,
        weight: str,
        *,
        heads: int = 1,
        centred: bool = False,
        scale: float = 1.0,
        eps: float | None = None,
        own: bool = False,
    ) -> Rows:
        """Return the RMS norm of each row, or of each of its ``heads`` equal parts, times
        ``weight`` ("": none; ``own``: it has a row for each part) and ``scale``; ``centred``:
        LayerNorm; ``eps``: by default the model's. With several heads ``x`` is overwritten.
        """

    @abstractmethod
    def linears(self, label: str, x: Rows, weights: Sequence[TensorName]) -> list[Rows]:
        """Return ``x W^T (+ bias)`` for each of several matrices, both ``x`` and result clamped to
        the matrix' bounds in ``config.bounds``, if any.
        """

    def linear(self, label: str, x: Rows, weight: TensorName) -> Rows:
        """Return ``x W^T (+ bias)``."""
        return self.linears(label, x, [weight])[0]

    @abstractmethod
    def gated(self, label: str, gate: Rows, up: Rows, fn: str) -> Rows:
        """Return ``fn(gate) * up``, elementwise; ``fn``: a name in ``kernels/activations.py``."""

    @abstractmethod
    def activate(self, label: str, x: Rows, fn: str) -> Rows:
        """Return ``fn(x)``, elementwise."""

    @abstractmethod
    def rope(self, label: str, x: Rows, table: int) -> Rows:
        """Rotate the pairs of each head by position, according to ``config.ropes[table]``."""

    @abstractmethod
    def attend(
        self,
        label: str,
        layer: int,
        q: Rows,
        k: Rows | None = None,
        v: Rows | None = None,
        *,
        sinks: str = "",
        distances: str = "",
        chosen: Rows | None = None,
        profiles: Rows | None = None,
    ) -> Rows:
        """Return the attention of each token over its sequence's cached keys and values.

        ``k`` and ``v`` of the batch's tokens are first stored in the layer's pool. Heads, window
        and causality are the layer's; scale and softcap of scores are the model's. ``q`` and ``k``
        are overwritten. Both may have rope, norms, both in either order, or neither, but alike. A
        layer that reads another layer's keys and values (``Layer.kv_from``) has only ``q``.

        ``sinks`` names a vector with an additional score for each head, of a key without a value.
        ``distances`` names a matrix of biases added to scores, by the bucket of the key's distance
        (one of ``config.n_buckets``) and by head. ``chosen``: the keys that each token sees, as the
        op ``chosen`` returns them; else all. ``profiles``: biases of each query's scores by
        distance, as the op ``profiles`` returns them.
        """

    @abstractmethod
    def halves(self, label: str, x: Rows, heads: int) -> tuple[Rows, Rows]:
        """Split each of ``heads`` equal parts of each row into halves; return the first halves side
        by side, and the second ones. Overwrites ``x``.
        """

    @abstractmethod
    def columns(self, x: Rows, first: int, n: int) -> Rows:
        """Return columns ``first`` to ``first + n - 1`` of ``x``."""

    @abstractmethod
    def add(self, x: Rows, h: Rows, *, gain: str = "") -> Rows:
        """Return ``x + h``, times the single value of the tensor ``gain``, if given."""

    def layer(self, i: int, x: Rows) -> Rows:
        """Return ``x``, the states before layer ``i``, or after the last one. A lowering for hooks
        keeps them in f32 (``plan/lowering/observed.py``).
        """
        return x

    def tapped(self, i: int) -> bool:
        """Return whether the states before layer ``i`` are an output of the plan."""
        return False

    @abstractmethod
    def steer(self, label: str, x: Rows, *, layer: int) -> Rows:
        """Return ``x``, the states behind a layer, with the control vectors of the rows' sequences
        added. May overwrite ``x``.
        """

    @abstractmethod
    def once(self, label: str, make: Callable[[Ops], Rows]) -> Rows:
        """Return rows that several layers use; ``make`` is called only the first time."""

    @abstractmethod
    def outputs(self, x: Rows) -> Rows:
        """Select the batch's rows whose outputs are requested."""

    @abstractmethod
    def pool(self, label: str, x: Rows, how: str, *, unit: bool = False) -> Rows:
        """Return one row per input of the batch: the "mean", the "first" or the "last" of its rows;
        with ``unit`` scaled to length 1.
        """

    @abstractmethod
    def call(self, word: str, label: str, *rows: Rows, **given: Any) -> Rows:
        """Call an op that is specific to one sublayer, by its name in the lowering's table."""

    @abstractmethod
    def result(self, name: str, x: Rows) -> None:
        """Declare ``x`` an output of the plan, f32."""
