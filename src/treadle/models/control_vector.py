"""Control vectors: directions that are added to the residual stream after layers (representation
engineering; Zou and others, 2023).

The files are llama.cpp's: a GGUF with ``general.architecture`` "controlvector",
``controlvector.model_hint`` (the model's architecture), ``controlvector.layer_count``, and a tensor
``direction.N``, f32 ``[n_embd]``, for each layer N that has one. It is added to the states after
layer N, counted from 0. Layer 0 never has one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.base.validate import as_integer, file_name, number_between
from treadle.errors import FileError, TreadleError
from treadle.models.archs import ARCHS

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.models.config import Config

Floats = npt.NDArray[np.float32]
ARCHITECTURE = "controlvector"
HINT = f"{ARCHITECTURE}.model_hint"
LAYER_COUNT = f"{ARCHITECTURE}.layer_count"
STEM = "direction."
STRENGTH_MAX = 1e6


@dataclass(frozen=True, eq=False)
class ControlVector:
    """A direction f32 ``[n_embd]`` for some of a model's layers, by the layer's number.

    name: the name by which requests choose it.
    model_hint: the architecture that it was made for, "" if unknown.
    path: the file that it was read from; None if it was made in memory.
    """

    name: str
    directions: Mapping[int, Floats]
    model_hint: str = ""
    path: Path | None = None

    @classmethod
    def open(cls, path: str | bytes | os.PathLike[str]) -> ControlVector:
        """Return the control vector in a GGUF file, named by the file's stem. Raises FileError if
        the file is damaged or no control vector.
        """
        from treadle.files.gguf import open_gguf

        where = file_name(path).expanduser()
        with open_gguf(where) as file:
            return cls(where.stem, _directions(file), _hint(file), where)

    @property
    def mark(self) -> bytes:
        """A digest (sha256) of all directions and their layers, to tell vectors apart."""
        state = hashlib.sha256(ARCHITECTURE.encode())
        for layer in sorted(self.directions):
            state.update(repr((layer, len(self.directions[layer]))).encode())
            state.update(np.ascontiguousarray(self.directions[layer], np.float32).tobytes())
        return state.digest()

    def for_layers(self, first: int, last: int) -> ControlVector:
        """Return a copy with only the directions of layers ``first`` to ``last``, both included."""
        kept = {layer: row for layer, row in self.directions.items() if first <= layer <= last}
        return replace(self, directions=kept)

    def scaled(self, strength: float | Mapping[int, float]) -> ControlVector:
        """Return the vector with its directions times ``strength``, or times a strength for each
        layer; layers that the mapping lacks lose their direction.

        Raises TreadleError for a strength that is no number from -1e6 to 1e6, and for a layer
        without a direction.
        """
        each = (
            strength if isinstance(strength, Mapping) else dict.fromkeys(self.directions, strength)
        )
        made: dict[int, Floats] = {}
        for layer, given in each.items():
            if layer not in self.directions:
                raise TreadleError(
                    f"control vector {self.name!r:.80}: no direction of layer {layer!r:.20}"
                )
            made[layer] = self.directions[layer] * np.float32(checked_strength(self.name, given))
        return replace(self, directions=made)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write a GGUF file as llama.cpp does, whole or not at all. Raises FileError if the file
        exists and ``force`` is not set, or if it cannot be written; TreadleError for a vector
        without directions.
        """
        from treadle.files.gguf import GGUFWriter, ValueType
        from treadle.files.target import check_target

        rows = checked_directions(f"control vector {self.name!r:.80}", self.directions)
        target = file_name(path).expanduser()
        check_target(target, force=force)
        writer = GGUFWriter(target)
        writer.add("general.architecture", ARCHITECTURE)
        writer.add(HINT, self.model_hint)
        writer.add(LAYER_COUNT, len(rows), ValueType.INT32)
        for layer in sorted(rows):
            writer.add_tensor(f"{STEM}{layer}", rows[layer].shape, "F32", rows[layer])
        writer.write()

    def check(self, config: Config) -> None:
        """Raise FileError unless the vector fits a model: its architecture, width and number of
        layers.
        """
        where = self.path or Path(self.name)
        name = config.arch.name
        if self.model_hint in ARCHS and self.model_hint != name:
            raise FileError(
                f"is for a {self.model_hint} model",
                path=where,
                where=HINT,
                expected=f"a {name} model",
            )
        for layer, row in self.directions.items():
            if len(row) != config.n_embd:
                found = f"has {len(row)} values"
            elif not 1 <= layer < config.n_layer:
                found = f"is of a layer that the model does not have: it has {config.n_layer}"
            else:
                continue
            expected = f"{config.n_embd} values, for a layer from 1 to {config.n_layer - 1}"
            raise FileError(found, path=where, where=f"{STEM}{layer}", expected=expected)


def checked_strength(name: object, strength: Any) -> float:
    """Return ``strength`` rounded to float32. Raises TreadleError unless it is a number from -1e6
    to 1e6; ``name``: the vector's, for the message.
    """
    if number_between(strength, -STRENGTH_MAX, STRENGTH_MAX) is None:
        expected = f"a number from -{STRENGTH_MAX:g} to {STRENGTH_MAX:g}"
        what = f"control vector {name!r:.80}: the strength {strength!r:.40}"
        raise TreadleError(f"{what}: expected {expected}")
    return float(np.float32(strength))


def checked_directions(what: str, directions: Mapping[Any, Any]) -> dict[int, Floats]:
    """Return directions (any vectors of numbers, by layer) as f32 rows by layer. Raises
    TreadleError, whose message begins with ``what``, for layers that are no integers from 1 on,
    rows of different widths, values that are not finite numbers, and no direction at all.
    """
    rows: dict[int, Floats] = {}
    for key, given in directions.items():
        layer = as_integer(key)
        if layer is None or layer < 1:
            raise TreadleError(f"{what}: layer {key!r:.20}: expected whole numbers from 1 on")
        try:
            rows[layer] = np.ascontiguousarray(given, np.float32)
        except (TypeError, ValueError):
            raise TreadleError(f"{what}: layer {layer}: expected a vector of numbers") from None
        if rows[layer].ndim != 1 or not np.isfinite(rows[layer]).all():
            raise TreadleError(f"{what}: layer {layer}: expected a vector of finite numbers")
    if len({len(row) for row in rows.values()}) != 1:
        found = "its directions differ in width" if rows else "it has no direction"
        raise TreadleError(f"{what}: {found}")
    return rows


def _directions(file: GGUF) -> dict[int, Floats]:
    """Return the directions in a file, f32 ``[n_embd]``, by layer. Raises FileError if it is no
    control vector, or for a direction of layer 0, of another shape, or with values that are not
    finite.
    """
    found = file.metadata.get("general.architecture")
    if found != ARCHITECTURE:
        where = "general.architecture"
        raise FileError(f"is {found!r:.40}", path=file.path, where=where, expected=ARCHITECTURE)
    rows: dict[int, Floats] = {}
    for name, tensor in file.tensors.items():
        number = name.removeprefix(STEM)
        if number == name or not (number.isascii() and number.isdecimal() and len(number) < 6):
            raise tensor.error("is no tensor of a control vector", f"{STEM}N, for layer N")
        if int(number) == 0:
            raise tensor.error("is of layer 0", "layers from 1 on")
        rows[int(number)] = _row(tensor)
    if not rows:
        raise FileError("has no tensors", path=file.path, expected=f"{STEM}N, for layer N")
    return rows


def _row(tensor: Tensor) -> Floats:
    if len(tensor.shape) != 1:
        raise tensor.error(f"has the shape {list(tensor.shape)}", "one dimension")
    row: Floats = np.array(tensor.dequantize(), np.float32)
    if not np.isfinite(row).all():
        raise tensor.error("holds a value that is not a finite number")
    return row


def _hint(file: GGUF) -> str:
    hint = file.metadata.get(HINT, "")
    return hint if isinstance(hint, str) else ""
