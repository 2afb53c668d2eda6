"""The ops that graphs are built of: an interface that each device implements.

A graph states what is computed from what. Memory layout, kernels and the number of steps are chosen
by the device's *lowering* (``plan/lowering/``), which may defer an op until its result is used, and
fuse it with others. ``docs/graph-vocabulary.md`` lists the ops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass

if TYPE_CHECKING:
    from treadle.models.config import Config


@dataclass(eq=False)
class Rows:
    """The result of an op, a matrix of ``width`` columns: one row for each token of the batch, each
    requested output or each input. ``label``: of the op that made it.
    """

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
    """Return the name of the tensor ``stem.kind``; ``kind``: "weight" or "bias". If ``stem`` is a
    slice, return the slice of the same rows of that tensor.
    """
    if isinstance(stem, TensorSlice):
        return TensorSlice(f"{stem.whole}.{kind}", stem.first, stem.n)
    return f"{stem}.{kind}"


class Ops(ABC):
    """The ops of one plan, which a graph calls and a device implements.

    ``label`` names an op's steps. Matrices are named by their stem in the file, such as
    ``blk.0.attn_q``; their bias, if any, is added. A ``TensorSlice`` stands for some rows of a
    matrix.
    """

    config: Config

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the file has the tensor ``name`` (with its suffix: ``blk.0.attn_q.bias``)
        and the configuration does not ignore it.
        """

    @abstractmethod
    def embed(self, label: str, weight: str, scale: float) -> Rows:
        """Return for each token of the batch the row of the matrix ``weight`` with the number of
        its id, times ``scale``.
        """

    @abstractmethod
    def given(self, label: str, width: int) -> Rows:
        """Return the input ``label``: rows of ``width`` values, f32, one for each token, that the
        host writes before each run, such as states computed by another model.
        """

    @abstractmethod
    def add_rows(self, label: str, x: Rows, weight: str, *, by: str) -> Rows:
        """Return ``x`` plus a row of the matrix ``weight`` for each token: that of its position, of
        its token type, or the first, as ``by`` says ("position", "type" or "first"). Overwrites
        ``x``.
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
        ``weight`` ("" for none) and ``scale``.

        centred: LayerNorm instead. eps: None for the model's. own: ``weight`` has a row for each
        part; else all parts share one.

        With several heads ``x`` is overwritten.
        """

    @abstractmethod
    def linears(self, label: str, x: Rows, weights: Sequence[TensorName]) -> list[Rows]:
        """Return ``x W^T (+ bias)`` for each of several matrices. If ``config.bounds`` names
        bounds of a matrix, the input and the result of its product are clamped to these.
        """

    def linear(self, label: str, x: Rows, weight: TensorName) -> Rows:
        """Return ``x W^T (+ bias)`` for one matrix; see ``linears``."""
        return self.linears(label, x, [weight])[0]

    @abstractmethod
    def gated(self, label: str, gate: Rows, up: Rows, fn: str) -> Rows:
        """Return ``fn(gate) * up``, elementwise; ``fn``: a name in ``kernels/activations.py``."""

    @abstractmethod
    def activate(self, label: str, x: Rows, fn: str) -> Rows:
        """Return ``fn(x)``, elementwise; ``fn``: a name in ``kernels/activations.py``."""

    @abstractmethod
    def rope(self, label: str, x: Rows, table: int) -> Rows:
        """Return ``x``, queries or keys, with the pairs of each head rotated by the token's
        position, according to ``config.ropes[table]``.
        """

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
        rel_logits: Rows | None = None,
    ) -> Rows:
        """Return the attention of each token over its sequence's cached keys and values.

        ``k`` and ``v`` of the batch's tokens are first stored in the pool of ``layer``; a layer
        that reads another layer's keys and values (``Layer.kv_from``) has only ``q``. ``q`` and
        ``k`` may have norms, a rope, or both in either order, but both the same ones; they are
        overwritten. Heads, window and causality are the layer's; scale and softcap of scores are
        the model's.

        sinks: name of a vector with one more score for each head, of a key without a value; or "".
        distances: name of a matrix of biases of scores, by bucket of the key's distance (one of
            ``config.n_buckets``) and by head; or "".
        chosen: the keys that each token sees, as the op ``chosen`` returns them; None: all.
        rel_logits: biases of each query's scores by distance, of the op ``relative_logits``.
        """

    @abstractmethod
    def halves(self, label: str, x: Rows, heads: int) -> tuple[Rows, Rows]:
        """Split each of the ``heads`` equal parts of a row in two; return the first halves of all
        parts, side by side, and the second halves. Overwrites ``x``.
        """

    @abstractmethod
    def columns(self, x: Rows, first: int, n: int) -> Rows:
        """Return columns ``first`` to ``first + n - 1`` of ``x``."""

    @abstractmethod
    def add(self, x: Rows, h: Rows, *, gain: str = "") -> Rows:
        """Return ``x + h``; with ``gain``, the name of a tensor with one value,
        ``(x + h) * gain``.
        """

    def layer(self, i: int, x: Rows) -> Rows:
        """Return ``x``, the states before layer ``i``, or after the last one. A graph calls it so
        that plans can make these states an output (``tapped``), or keep them in f32 for hooks.
        """
        return x

    def tapped(self, i: int) -> bool:
        """Return whether the states before layer ``i`` are an output of the plan, for a drafter."""
        return False

    @abstractmethod
    def steer(self, label: str, x: Rows, *, layer: int) -> Rows:
        """Return ``x``, the states after ``layer``, with the control vectors of each row's sequence
        added. May overwrite ``x``.
        """

    @abstractmethod
    def once(self, label: str, make: Callable[[Ops], Rows]) -> Rows:
        """Return ``make(ops)``, rows that several layers use. ``make`` is called only the first
        time for a ``label``; later calls return the same rows.
        """

    @abstractmethod
    def outputs(self, x: Rows) -> Rows:
        """Return the rows of ``x`` for which outputs are requested."""

    @abstractmethod
    def pool(self, label: str, x: Rows, how: str, *, unit: bool = False) -> Rows:
        """Return one row per input of the batch: the "mean", the "first" or the "last" of its rows,
        as ``how`` says; with ``unit`` scaled to length 1.
        """

    @abstractmethod
    def call(self, word: str, label: str, *rows: Rows, **given: Any) -> Rows:
        """Return the result of an op that only some sublayers use. ``word``: its name in the
        lowering's table; ``rows`` and ``given``: the arguments of that op
        (``docs/graph-vocabulary.md``).
        """

    @abstractmethod
    def result(self, name: str, x: Rows) -> None:
        """Make ``x``, as f32, the plan's output ``name``."""
