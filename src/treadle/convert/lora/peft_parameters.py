"""LoRA adapters of all experts in one parameter, as in transformers 5 (PEFT's
``target_parameters``): A ``[E rank, k]`` expert by expert, and B ``[m, rank E]``, in which an
expert's columns are E apart.

A tensor name gives the module but not its parameter, which follows from shapes. PEFT before 0.19
took the parameter's last axis as its output, whichever it is. Later PEFT asks the module, which
does not say for Llama 4, and says for gpt-oss only in transformers 5. If PEFT is wrong, A and B are
swapped. A square matrix does not show this, but others of the file do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.convert.hf.families.experts import PACKED_EXPERTS
from treadle.convert.hf.tensor_names import NAME
from treadle.convert.lora.peft_modules import gguf_name, stem_of
from treadle.errors import UnsupportedError
from treadle.models.lora import LowRank

if TYPE_CHECKING:
    from treadle.convert.hf.family import Family
    from treadle.convert.lora.peft_modules import Modules
    from treadle.convert.sources.derived_tensors import DerivationRule, Make
    from treadle.files.gguf import GGUF
    from treadle.files.safetensors import SafeTensor

Floats = npt.NDArray[np.float32]
Read = Callable[["SafeTensor"], Floats]
# An adapted parameter wraps another one as its base layer.
_MODULE = re.compile(r"(?P<module>.+\bexperts)(?:\.base_layer)*")
_STEMS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_BOTH = "gate_up_proj"


class Parameters(NamedTuple):
    """The ``n`` experts of one layer, which ``module`` names. ``n_ff`` and ``n_embd``: outputs and
    inputs of the gate and up matrices.
    """

    module: str
    layer: str  # its number
    n: int
    n_ff: int
    n_embd: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each parameter that an adapter may target."""
        one = self.n_ff, self.n_embd
        each = {_BOTH: (2 * self.n_ff, self.n_embd), "gate_proj": one, "up_proj": one}
        return {**each, "down_proj": (self.n_embd, self.n_ff)}


def find_parameters(module: str, gguf: GGUF) -> Parameters | None:
    """Return the experts that ``module`` names; None if it does not name all experts of a layer, or
    if the model has no such experts.
    """
    match = _MODULE.fullmatch(module)
    name = NAME.fullmatch(f"{match['module']}.weight") if match else None
    if match is None or name is None or name["layer"] is None:
        return None
    down = gguf.tensors.get(f"blk.{name['layer']}.{_STEMS['down_proj']}.weight")
    if down is None or len(down.shape) != 3:
        return None
    n, n_embd, n_ff = down.shape
    return Parameters(match["module"], name["layer"], n, n_ff, n_embd)


class ParameterPair(NamedTuple):
    """A and B of one parameter; ``targets``: the parameters that adapter_config.json names."""

    of: Parameters
    a: SafeTensor
    b: SafeTensor
    targets: Sequence[str]

    def fits(self) -> tuple[list[str], list[str]]:
        """Return the parameters that A [.., inputs] and B [outputs, ..] fit, and those that they
        fit with A and B swapped.
        """
        given = self.a.shape[-1:]
        gives = self.b.shape[:1]
        shapes = {name: shape for name, shape in self.of.shapes.items() if name in self.targets}
        return (
            [name for name, shape in shapes.items() if shape == (*gives, *given)],
            [name for name, shape in shapes.items() if shape == (*given, *gives)],
        )


def is_straight(pairs: Sequence[ParameterPair], modules: Modules, version: object) -> bool:
    """Return whether A takes the parameter's inputs, as it should, in this file; false if PEFT
    swapped A and B.

    ``version``: PEFT's, recorded since 0.18. Raises UnsupportedError if neither shapes nor the
    version decide.
    """
    fits = [tuple(map(bool, pair.fits())) for pair in pairs]
    told = {straight for straight, turned in fits if straight != turned}
    if len(told) == 1:
        return told.pop()
    first = next((pair for pair, each in zip(pairs, fits, strict=True) if all(each)), None)
    if first is None:  # each pair decides for itself, or fits nothing
        return True
    match = re.match(r"(\d+)\.(\d+)", str(version))
    is_old = match is None or (int(match[1]), int(match[2])) < (0, 19)
    (parameter, *_), _ = first.fits()
    is_turned = _is_transposed(parameter, modules)
    if is_turned and not is_old:
        why = f"a square matrix: A and B cannot be told apart (peft_version {version})"
        raise UnsupportedError(f"{first.a.path}: {first.a.name}: {why}")
    return is_turned if is_old else True


def read_parameter(
    pair: ParameterPair, modules: Modules, read: Read, *, straight: bool
) -> Iterator[tuple[str, str, LowRank]]:
    """Yield (parameter, GGUF name, pair with a factor of 1) for each matrix that a pair adds to.

    ``read`` returns a tensor's values as float32. ``straight``: the result of ``is_straight``, used
    if shapes fit either way. Raises FileError for shapes of no parameter, UnsupportedError if they
    fit two.
    """
    of, a, b, targets = pair
    (n_rows, given), (gives, n_columns) = (
        each.shape if len(each.shape) == 2 else (0, 0) for each in (a, b)
    )
    rank = n_rows // of.n
    shapes = {name: shape for name, shape in of.shapes.items() if name in targets}
    ways = pair.fits()
    straight = bool(ways[0]) and (straight or not ways[1])
    found = ways[0] if straight else ways[1]
    if not found or not rank or n_rows != n_columns or n_rows % of.n:
        expected = f"{of.n} experts' matrices for one of {', '.join(shapes) or 'no parameters'}"
        raise a.error(f"shapes {list(a.shape)} and {list(b.shape)}", expected)
    if len(found) > 1:
        why = f"{' and '.join(found)} have the same shape: cannot tell which one the adapter is for"
        raise UnsupportedError(f"{a.path}: {a.name}: {why}")
    (parameter,) = found
    shape = shapes[parameter]

    def by_expert() -> tuple[Floats, Floats]:
        """Return ``[E, rank, k]`` and ``[E, m, rank]``."""
        first = read(a).reshape(of.n, rank, given)
        second = read(b).reshape(gives, rank, of.n).transpose(2, 0, 1)
        return (first, second) if straight else (second.swapaxes(1, 2), first.swapaxes(1, 2))

    for name, rows in _matrices(of, parameter, shape, modules):
        shapes_of = (of.n, rank, shape[1]), (of.n, len(rows), rank)
        halves = partial(_half, by_expert, 0), partial(_half, by_expert, 1, rows)
        yield parameter, name, LowRank(rank, 1.0, *halves, *shapes_of)


def _half(read: Callable[[], tuple[Floats, Floats]], which: int, rows: Any = slice(None)) -> Floats:
    """Return A (``which`` = 0) or B (1) of all experts, as ``read`` returns them, with only
    ``rows`` of each expert.
    """
    return np.ascontiguousarray(read()[which][:, rows])


def _matrices(
    of: Parameters, parameter: str, shape: tuple[int, int], modules: Modules
) -> Iterator[tuple[str, npt.NDArray[np.intp]]]:
    """Yield the GGUF name of each matrix that conversion makes from ``parameter`` of the experts
    ``of``, of ``shape`` [m, k], and the parameter's rows that the matrix takes, int [n].
    """
    if own := _rule(parameter, modules):
        family, rule = own
        for to, make in rule.gives.items():
            yield gguf_name(stem_of(family, to), of.layer), _rows(make, shape)
        return
    for rule in PACKED_EXPERTS:
        if rule.of[0].endswith(f".{parameter}"):
            for to, make in rule.gives.items():
                stem = _STEMS[to.removesuffix(".weight").rpartition(".")[2]]
                yield gguf_name(stem, of.layer), _rows(make, shape)
            return
    yield gguf_name(_STEMS[parameter], of.layer), np.arange(shape[0])


def _rule(parameter: str, modules: Modules) -> tuple[Family, DerivationRule] | None:
    """Return the rule that makes matrices of ``parameter``, with its family; None if no family of
    the model has one.
    """
    for family, rule in modules.rules():
        if len(rule.of) == 1 and rule.of[0].endswith(f"experts.{parameter}"):
            return family, rule
    return None


def _is_transposed(parameter: str, modules: Modules) -> bool:
    """Return whether the checkpoint's model (transformers) stores ``parameter`` as ``[E, k, m]``,
    which conversion transposes.
    """
    own = _rule(parameter, modules)
    makes = own[1].gives.values() if own else ()
    return any(np.asarray(make(np.zeros((1, 2, 6), np.float32))).shape[-1] == 2 for make in makes)


def _rows(make: Make, shape: tuple[int, int]) -> npt.NDArray[np.intp]:
    """Return the numbers of the rows that ``make`` selects from a matrix of ``shape``, int [n], by
    passing it a matrix of row numbers.
    """
    numbers = np.repeat(np.arange(shape[0], dtype=np.float32)[:, None], shape[1], 1)[None]
    found = np.asarray(make(numbers))
    if (found != found[..., :1]).any():  # ``make`` transposes its input
        found = np.asarray(make(np.ascontiguousarray(numbers.swapaxes(1, 2))))
    return found[0, :, 0].astype(np.intp)
