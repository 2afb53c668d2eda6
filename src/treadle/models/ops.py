"""The vocabulary that graphs are written in: what is computed, in the field's words.

A graph says which rows become which; how they lie in memory, which kernels make them and in how
many steps is the device's choice, its *lowering* (``plan/lowering/``). An op may be put off until
its result is used, and become one step with others. ``docs/graph-vocabulary.md`` lists them.
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
    """A matrix that an op makes: one row for each token of the batch, each output or each text."""

    label: str
    width: int


def part(weight: str, first: int, n: int) -> str:
    """``n`` rows of a matrix, and of its bias, as a matrix of its own, by name."""
    return f"{weight}[{first}:{first + n}]"


class Ops(ABC):
    """The ops of one plan. ``label`` names the steps that an op becomes; matrices are named by
    their stem in the file, as in ``blk.0.attn_q``, and a bias that is there is added. Of a matrix
    ``part`` names some rows.
    """

    config: Config

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""

    @abstractmethod
    def embed(self, label: str, weight: str, scale: float) -> Rows:
        """The matrix' rows of the batch's tokens, times ``scale``."""

    @abstractmethod
    def given(self, label: str, width: int) -> Rows:
        """Rows of all tokens that each run is given, f32: states that were computed elsewhere."""

    @abstractmethod
    def add_rows(self, label: str, x: Rows, weight: str, *, by: str) -> Rows:
        """``x`` plus, for each token, a row of the matrix: that of its ``position``, of its
        ``type``, or the ``first``. ``x`` is used up.
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
        """RMS norm of each row, or of each of ``heads`` equal parts of it, times ``weight`` ("":
        there is none; ``own``: it has a row for each part) and ``scale``; ``centred``: LayerNorm;
        ``eps``: the model's, if not given. With several heads ``x`` is used up.
        """

    @abstractmethod
    def linears(self, label: str, x: Rows, weights: Sequence[str]) -> list[Rows]:
        """``x W^T (+ bias)`` with several matrices."""

    def linear(self, label: str, x: Rows, weight: str) -> Rows:
        """``x W^T (+ bias)``."""
        return self.linears(label, x, [weight])[0]

    @abstractmethod
    def gated(self, label: str, gate: Rows, up: Rows, fn: str) -> Rows:
        """``fn(gate) * up``, value by value; ``fn``: a name in ``kernels.activation``."""

    @abstractmethod
    def activate(self, label: str, x: Rows, fn: str) -> Rows:
        """``fn(x)``, value by value."""

    @abstractmethod
    def rope(self, label: str, x: Rows, table: int) -> Rows:
        """Turn the pairs of each head by their position, as ``config.ropes[table]`` says."""

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
    ) -> Rows:
        """Attention of each token over what its sequence holds, its own ``k`` and ``v`` included,
        which are kept in the layer's pool. Heads and window are the layer's, and whether tokens
        see those behind them; the scale of scores and their softcap the model's. ``q`` and ``k``
        are used up. They may be turned, normed, both in either order, or neither, both alike. A
        layer that reads another one's keys and values (``Layer.kv_from``) has ``q`` alone.
        ``sinks`` names a vector with one more score for each head, of a key that has no value,
        ``distances`` a matrix with a number of each head that scores get added, by the bucket that
        the key's distance is in (``config.n_buckets`` of them).
        """

    @abstractmethod
    def halves(self, label: str, x: Rows, heads: int) -> tuple[Rows, Rows]:
        """The first halves of each of ``heads`` equal parts of each row, side by side, and the
        second ones. ``x`` is used up.
        """

    @abstractmethod
    def columns(self, x: Rows, first: int, n: int) -> Rows:
        """``n`` values of each row of ``x`` from ``first`` on."""

    @abstractmethod
    def add(self, x: Rows, h: Rows, *, gain: str = "") -> Rows:
        """``x + h``, times the one value of ``gain``."""

    @abstractmethod
    def once(self, label: str, make: Callable[[Ops], Rows]) -> Rows:
        """Rows that several layers use, made for the first."""

    @abstractmethod
    def outputs(self, x: Rows) -> Rows:
        """Of the batch's rows those that outputs are wanted of."""

    @abstractmethod
    def pool(self, label: str, x: Rows, how: str, *, unit: bool = False) -> Rows:
        """One row for each text of the batch: the "mean" of its rows, the "first" or the "last" of
        them; with ``unit`` scaled to length 1.
        """

    @abstractmethod
    def call(self, word: str, label: str, *rows: Rows, **given: Any) -> Rows:
        """An op that one sublayer alone has, by its name in the lowering's own table."""

    @abstractmethod
    def result(self, name: str, x: Rows) -> None:
        """Make ``x`` an output of the plan, f32."""
