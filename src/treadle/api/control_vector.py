"""Control vectors of a model: loading, and making them from pairs of texts.

A vector is made as llama.cpp's cvector-generator and repeng do it: texts of one kind and of the
opposite kind go through the model in pairs, and the differences of their hidden states behind a
layer are reduced to one direction of length 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.validate import listed, one_of, token_ids
from treadle.errors import TreadleError, UnsupportedError
from treadle.models.control_vector import ControlVector, checked_directions, checked_strength

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.engine.engine import Engine

METHODS = ("pca", "mean")
TOKENS = ("last", "all")
STAGE = "states"
Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]
Vector = str | bytes | os.PathLike[str] | ControlVector
Strong = Vector | tuple[Vector, float]
ControlVectors = Vector | Sequence[Strong] | Mapping[Any, float]


def load_control_vectors(
    given: Iterable[Strong], layers: tuple[int, int] | None, engine: Engine
) -> None:
    """Load control vectors into an engine, which new requests use by default. ``given``: each a
    vector, or a vector and its strength, by default 1. ``layers``: the first and the last layer
    that they change, None for all. A duplicate name gets a number appended.

    Raises FileError for a file that is damaged or does not fit the model, TreadleError for other
    values and for a vector without a direction in ``layers``.
    """
    span = None if layers is None else checked_layers(layers)
    vectors: list[ControlVector] = []
    strengths: list[float] = []
    for one in given:
        vector, strength = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        strength = checked_strength(_name_of(vector), strength)
        made = _opened(vector)
        made.check(engine.config)
        if span is not None:
            made = made.for_layers(*span)
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


def checked_layers(layers: object) -> tuple[int, int]:
    """Return ``layers`` as (first, last). Raises TreadleError unless these are whole numbers, 1 or
    more, in order.
    """
    pair = tuple(layers) if isinstance(layers, (tuple, list)) else ()
    if len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        first, last = pair
        if 1 <= first <= last:
            return first, last
    expected = "the first and the last layer, from 1 on"
    raise TreadleError(f"control_vector_layers={layers!r:.40}: expected {expected}")


def make_control_vector(
    model: Model,
    positive: Iterable[str | Sequence[int]],
    negative: Iterable[str | Sequence[int]],
    *,
    method: str = "pca",
    tokens: str = "last",
    name: str = "control",
    progress: Progress | None = None,
) -> ControlVector:
    """Make a control vector from pairs of texts, or of token ids: ``positive[i]`` shows what is
    wanted, ``negative[i]`` its opposite.

    ``method``: "pca" for the first principal direction of the differences (about zero, so that
    their common part counts), pointing to the positive texts; "mean" for the direction of their
    mean. ``tokens``: "last" for the states of the last token of each text, "all" for those of all
    tokens, the two texts aligned at their ends. ``name``: the vector's, for requests and files.
    ``progress(stage, done, total)``, unless None, counts texts.

    The states are the model's with its default adapters, without control vectors. Raises
    TreadleError for lists that are empty, of different lengths or whose texts do not differ, and
    for states that are not finite; ContextFullError for a text that does not fit; UnsupportedError
    for an encoder, and for a model whose states ``Model.states`` cannot read by layer.
    """
    from treadle.api.hooks import states_of_texts

    config = model.config
    if not config.causal:
        raise UnsupportedError("making a control vector of an encoder is not supported")
    for setting, value, known in (("method", method, METHODS), ("tokens", tokens, TOKENS)):
        if one_of(value, known) is None:
            raise TreadleError(f"{setting}={value!r:.40}: expected {' or '.join(known)}")
    pairs = _pairs(model, positive, negative)
    # A vector's layer N changes the states after N + 1 layers, and layer 0 has no direction.
    layers = range(1, config.n_layer)
    if not layers:
        raise TreadleError("a model of one layer has no layer for a control vector")
    numbers = [layer + 1 for layer in layers]
    n_adapters = len(model.engine.adapters)
    lora = tuple(each for each in model.engine.cache.lora if each[0] < n_adapters)
    rows: dict[int, list[Floats]] = {layer: [] for layer in layers}
    per_run = max(1, model.engine.max_tokens // max(len(ids) for pair in pairs for ids in pair))
    step = max(1, per_run // 2)
    for at in range(0, len(pairs), step):
        if progress is not None:
            progress(STAGE, 2 * at, 2 * len(pairs))
        here = pairs[at : at + step]
        texts = [ids for pair in here for ids in pair]
        read = states_of_texts(model, texts, numbers, lora=lora)
        for first, second in zip(read[::2], read[1::2], strict=True):
            n = 1 if tokens == "last" else min(first.shape[1], second.shape[1])
            with np.errstate(invalid="ignore"):
                differences = first[:, -n:] - second[:, -n:]
            for layer, difference in zip(layers, differences, strict=True):
                if not np.isfinite(difference).all():
                    raise TreadleError(f"the states after layer {layer} are not finite")
                rows[layer].append(difference)
    if progress is not None:
        progress(STAGE, 2 * len(pairs), 2 * len(pairs))
    reduce = _principal if method == "pca" else _mean
    directions = {layer: reduce(np.concatenate(found)) for layer, found in rows.items()}
    if not all(row.any() for row in directions.values()):
        raise TreadleError(
            "control vector: the texts of the pairs do not differ in the model's states"
        )
    return ControlVector(name, directions, config.arch.name)


def _pairs(model: Model, positive: Any, negative: Any) -> list[tuple[list[int], list[int]]]:
    """Return pairs (positive, negative) of token ids, from two lists of texts or ids. Raises
    TreadleError for empty texts and lists of different lengths, ContextFullError for a text that
    does not fit.
    """
    sides: list[list[list[int]]] = []
    for side, given in (("positive", positive), ("negative", negative)):
        texts = listed(side, given)
        if not texts:
            raise TreadleError(f"{side}: no texts: expected at least one")
        each = [model.tokenize(one) if isinstance(one, str) else token_ids(one) for one in texts]
        for i, ids in enumerate(each):
            if not ids:
                raise TreadleError(f"{side}: text {i} is empty")
            model.engine.check_ids(ids)
            model.engine.cache.check_context(len(ids))
        sides.append(each)
    if len(sides[0]) != len(sides[1]):
        found = f"{len(sides[0])} positive and {len(sides[1])} negative texts"
        raise TreadleError(f"{found}: expected as many of each, as they are compared in pairs")
    return list(zip(*sides, strict=True))


def _mean(rows: Floats) -> Floats:
    """Return the unit vector, float32 ``[n_embd]``, along the mean of ``rows`` ``[n, n_embd]``;
    zeros if the mean is zero.
    """
    return _normalized(rows.astype(np.float64).mean(0))


def _principal(rows: Floats) -> Floats:
    """Return the first right singular vector of ``rows`` ``[n, n_embd]``, float32 ``[n_embd]``: the
    principal direction without centring. Its sign is that of the rows' mean; zeros if all rows are
    zero.
    """
    wide = rows.astype(np.float64)
    n, n_embd = wide.shape
    # The smaller of the two products has the same eigenvalues.
    if n <= n_embd:
        direction = wide.T @ np.linalg.eigh(wide @ wide.T)[1][:, -1]
    else:
        direction = np.linalg.eigh(wide.T @ wide)[1][:, -1] * bool(wide.any())
    return _normalized(direction * (-1.0 if wide.sum(0) @ direction < 0 else 1.0))


def _normalized(row: npt.NDArray[np.float64]) -> Floats:
    length = float(np.linalg.norm(row))
    return np.asarray(row / (length or 1.0), np.float32)


def _name_of(given: object) -> object:
    return given.name if isinstance(given, ControlVector) else given


def _opened(given: object) -> ControlVector:
    """Return a control vector with checked directions, read from a file if ``given`` is a path.
    Raises FileError for a damaged file, TreadleError for another type or invalid directions.
    """
    if isinstance(given, str | bytes | os.PathLike):
        return ControlVector.open(given)
    if not isinstance(given, ControlVector):
        what = f"control_vectors: {given!r:.80}"
        raise TreadleError(f"{what}: expected a path or a ControlVector, alone or with a strength")
    rows = checked_directions(f"control vector {given.name!r:.80}", given.directions)
    return replace(given, directions=rows)
