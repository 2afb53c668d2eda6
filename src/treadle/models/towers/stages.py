"""Stages of a tower's stem and tail: each maps rows to rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import TYPE_CHECKING

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.ops import Ops, Rows

POSITIONS = "positions"  # name of the given rows of learned positions


class TowerStage(ABC):
    """One stage of a stem or a tail. Its tensors are named by their stems, without ``.weight``."""

    @property
    @abstractmethod
    def weights(self) -> tuple[str, ...]:
        """The stems of the stage's tensors."""

    @abstractmethod
    def build(self, g: Ops, x: Rows) -> Rows:
        """Add the stage's steps to the plan of ``g``; return its result for the rows ``x``."""

    def check(self, gguf: GGUF, width: int) -> int:
        """Return the width of the stage's result for rows of ``width`` values. Raises FileError for
        a tensor that is missing or has another shape.
        """
        return width


@dataclass(frozen=True)
class NormStage(TowerStage):
    """A norm of each row: LayerNorm if ``centred``, else RMS norm. ``weight``: stem of its weights,
    "" for none; ``eps``: None for the tower's; ``scale``: a factor of the result.
    """

    weight: str
    centred: bool = True
    eps: float | None = None
    scale: float = 1.0

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.weight,) if self.weight else ()

    def build(self, g: Ops, x: Rows) -> Rows:
        label = self.weight or f"{x.label}.norm"
        return g.norm(label, x, self.weight, centred=self.centred, eps=self.eps, scale=self.scale)

    def check(self, gguf: GGUF, width: int) -> int:
        if self.weight:
            _check_vector(gguf, f"{self.weight}.weight", width)
            _check_bias(gguf, self.weight, width)
        return width


@dataclass(frozen=True)
class LinearStage(TowerStage):
    """A product with the matrix ``weight`` (a stem), ``[n, width]``, plus its bias if the file has
    one.
    """

    weight: str

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.weight,)

    def build(self, g: Ops, x: Rows) -> Rows:
        return g.linear(self.weight, x, self.weight)

    def check(self, gguf: GGUF, width: int) -> int:
        return _check_matrix(gguf, self.weight, width)


@dataclass(frozen=True)
class ActivationStage(TowerStage):
    """An activation of each value. ``fn``: its name in ``kernels/activations.py``."""

    fn: str

    @property
    def weights(self) -> tuple[str, ...]:
        return ()

    def build(self, g: Ops, x: Rows) -> Rows:
        return g.activate(f"{x.label}.{self.fn}", x, self.fn)


@dataclass(frozen=True)
class GatedStage(TowerStage):
    """The gated product ``fn(gate(x)) * up(x)``. ``gate``, ``up``: stems of two matrices of equal
    shape; ``fn``: an activation's name in ``kernels/activations.py``.
    """

    gate: str
    up: str
    fn: str

    @property
    def weights(self) -> tuple[str, ...]:
        return self.gate, self.up

    def build(self, g: Ops, x: Rows) -> Rows:
        gate, up = g.linears(f"{self.gate}_up", x, self.weights)
        return g.gated(f"{self.gate}.{self.fn}", gate, up, self.fn)

    def check(self, gguf: GGUF, width: int) -> int:
        n = _check_matrix(gguf, self.gate, width)
        if _check_matrix(gguf, self.up, width) != n:
            tensor = gguf.tensors[f"{self.up}.weight"]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[{n}, {width}]")
        return n


@dataclass(frozen=True)
class AddGivenStage(TowerStage):
    """The sum with the rows that the host writes to the input ``name`` before each run, such as
    learned positions.
    """

    name: str

    @property
    def weights(self) -> tuple[str, ...]:
        return ()

    def build(self, g: Ops, x: Rows) -> Rows:
        return g.add(g.given(self.name, x.width), x)


def _check_vector(gguf: GGUF, name: str, width: int) -> None:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise _missing(gguf, name, f"[{width}]")
    if prod(tensor.shape) != width:
        raise tensor.error(f"shape {list(tensor.shape)}", f"[{width}]")


def _check_bias(gguf: GGUF, weight: str, width: int) -> None:
    if f"{weight}.bias" in gguf.tensors:
        _check_vector(gguf, f"{weight}.bias", width)


def _check_matrix(gguf: GGUF, weight: str, width: int) -> int:
    """Return the number of rows of the matrix with the stem ``weight``. Raises FileError if it is
    missing, does not have ``width`` columns, or if its bias has another length than its rows.
    """
    tensor = gguf.tensors.get(f"{weight}.weight")
    if tensor is None:
        raise _missing(gguf, f"{weight}.weight", f"[n, {width}]")
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        raise tensor.error(f"shape {list(tensor.shape)}", f"[n, {width}]")
    _check_bias(gguf, weight, tensor.shape[0])
    return tensor.shape[0]


def _missing(gguf: GGUF, name: str, shape: str) -> FileError:
    return FileError("the tensor is missing", path=gguf.path, where=name, expected=f"shape {shape}")
