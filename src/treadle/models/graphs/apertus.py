"""Apertus: a decoder whose activation (xIELU) has parameters per layer, which files store as
keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.files.metadata import MetadataReader
from treadle.models.graphs.decoder import DECODER
from treadle.models.graphs.reading import read

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata

POSITIVE, NEGATIVE, BETA, EPS = (f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
NUMBERS = (POSITIVE, NEGATIVE, BETA, EPS)
_MOST = 1e4  # bound on each of them, far above learned values
_FFN = "xielu"


def _read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config, with xIELU's four parameters in each layer (``Layer.curve``). The first
    two pass through softplus, so that one is above 0 and the other above beta, the third.
    """
    config = read(keys, arch)
    # Their names have no architecture prefix.
    whole = MetadataReader(keys.gguf.metadata, keys.path, missing="the key is missing")
    numbers = [_per_layer(whole, key, config.n_layer) for key in NUMBERS]
    layers = []
    for layer, positive, negative, beta, eps in zip(config.layers, *numbers, strict=True):
        curve = _softplus(positive), beta + _softplus(negative), beta, eps
        layers.append(replace(layer, ffn=_FFN, curve=curve))
    return replace(config, layers=tuple(layers))


def _softplus(x: float) -> float:
    return float(np.logaddexp(0.0, x))


def _per_layer(keys: MetadataReader, key: str, n_layer: int) -> list[float]:
    """Return a key's number for each of ``n_layer`` layers; files store an array, or one number for
    all. Raises FileError for another length or numbers beyond ``_MOST``.
    """
    value = keys.get(key)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return [keys.number(key, lo=-_MOST, hi=_MOST)] * n_layer
    if len(value) != n_layer:
        keys.fail(key, f"has {len(value)} entries", f"{n_layer}, one per layer")
    kinds = int, float, np.floating
    found = [float(number) if isinstance(number, kinds) else math.nan for number in value]
    for number in found:
        if not -_MOST <= number <= _MOST:
            keys.fail(key, f"holds {number}", f"numbers from {-_MOST:g} to {_MOST:g}")
    return found


APERTUS = replace(DECODER, read=_read)
