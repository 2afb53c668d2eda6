"""Tensors of drafters' folders that are not as in other folders: tables of tokens, and the name of
EAGLE's only layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.models.drafters.beside_model import D2T
from treadle.models.graphs.assistant import ORDERING

if TYPE_CHECKING:
    from treadle.files.safetensors import SafeTensor

ONLY_LAYER = "midlayer."
PLAIN = {"masked_embedding.token_ordering": ORDERING}  # tables as GGUF has them
UNUSED = frozenset({"t2d"})  # the inverse of the table
Tables = dict[str, npt.NDArray[np.int64]]


def with_usual_names(tensors: Mapping[str, SafeTensor]) -> tuple[dict[str, SafeTensor], Tables]:
    """Return the tensors of a drafter with the names of other folders, and its tables by GGUF's
    name: ``d2t`` has how much larger a drafted token is than its row's number. Raises FileError for
    a table that holds no integers.
    """
    found: dict[str, SafeTensor] = {}
    tables: Tables = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain in UNUSED:
            continue
        if plain == D2T:
            more = _integers(tensor)
            tables[D2T] = np.arange(more.size, dtype=np.int64) + more
        elif plain in PLAIN:
            tables[PLAIN[plain]] = _integers(tensor)
        elif name.startswith(ONLY_LAYER):
            name = f"layers.0.{name.removeprefix(ONLY_LAYER)}"
            found[name] = replace(tensor, name=name)
        else:
            found[name] = tensor
    return found, tables


INTEGERS = {"I64": "<i8", "I32": "<i4"}  # numpy's names of safetensors' types


def _integers(tensor: SafeTensor) -> npt.NDArray[np.int64]:
    kind = INTEGERS.get(tensor.dtype)
    if kind is None:
        raise tensor.error(f"is in {tensor.dtype}", "64-bit integers (I64)")
    return np.frombuffer(tensor.data.tobytes(), kind).astype(np.int64)
