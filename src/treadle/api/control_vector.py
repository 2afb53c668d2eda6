"""Control vectors of a model: loading, and making them from pairs of texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from treadle.errors import TreadleError
from treadle.models.control_vector import ControlVector, checked_directions, checked_strength

if TYPE_CHECKING:
    from treadle.engine.engine import Engine

Vector = str | bytes | os.PathLike[str] | ControlVector
Strong = Vector | tuple[Vector, float]
ControlVectors = Vector | Sequence[Strong] | Mapping[Any, float]


def load_control_vectors(
    given: Iterable[Strong], layers: tuple[int, int] | None, engine: Engine
) -> None:
    """Load control vectors for an engine, each alone or with a strength, default 1: new requests
    use them. ``layers``: the first and the last layer that they change, None for all. A duplicate
    name gets a number appended.

    Raises FileError for a file that is damaged or does not fit the model, TreadleError for other
    values and for a vector without a direction in ``layers``.
    """
    span = None if layers is None else checked_layers(layers, engine.config.n_layer)
    vectors: list[ControlVector] = []
    strengths: list[float] = []
    for one in given:
        vector, strength = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        strength = checked_strength(_name_of(vector), strength)
        made = _opened(vector)
        made.check(engine.config)
        if span is not None:
            made = made.within(*span)
            if not made.directions:
                what = f"no direction in layers {span[0]} to {span[1]}"
                raise TreadleError(f"control vector {made.name!r:.80}: {what}")
        names = {each.name for each in vectors}
        others = (name for i in count(2) if (name := f"{made.name}-{i}") not in names)
        vectors.append(replace(made, name=next(others)) if made.name in names else made)
        strengths.append(strength)
    n_adapters = len(engine.adapters)
    engine.steer(vectors)
    own = tuple((n_adapters + i, strength) for i, strength in enumerate(strengths) if strength)
    engine.cache.lora += own


def checked_layers(layers: object, n_layer: int) -> tuple[int, int]:
    """Return the first and the last layer of a range. Raises TreadleError unless these are whole
    numbers from 1 to the model's last layer, in order.
    """
    pair = tuple(layers) if isinstance(layers, (tuple, list)) else ()
    if len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        first, last = pair
        if 1 <= first <= last < n_layer:
            return first, last
    expected = f"the first and the last layer, from 1 to {n_layer - 1}"
    raise TreadleError(f"control_vector_layers={layers!r:.40}: expected {expected}")


def _name_of(given: object) -> object:
    return given.name if isinstance(given, ControlVector) else given


def _opened(given: object) -> ControlVector:
    """Return a vector with checked directions, from a file or as it is."""
    if isinstance(given, str | bytes | os.PathLike):
        return ControlVector.open(given)
    if not isinstance(given, ControlVector):
        what = f"control_vectors: {given!r:.80}"
        raise TreadleError(f"{what}: expected a path or a ControlVector, alone or with a strength")
    rows = checked_directions(f"control vector {given.name!r:.80}", given.directions)
    return replace(given, directions=rows)
