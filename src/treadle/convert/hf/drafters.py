"""Tensors of drafters' folders that differ from other folders: integer tables of token ids, and the
name of EAGLE's only layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.models.drafters.target import D2T
from treadle.models.graphs.assistant import ORDERING

if TYPE_CHECKING:
    from treadle.files.safetensors import SafeTensor

ONLY_LAYER = "midlayer."
PLAIN = {"masked_embedding.token_ordering": ORDERING}  # tables as GGUF has them
UNUSED = frozenset({"t2d"})  # the inverse of the table
Tables = dict[str, npt.NDArray[np.int64]]


def with_usual_names(tensors: Mapping[str, SafeTensor]) -> tuple[dict[str, SafeTensor], Tables]:
    """Return a drafter's tensors under the names of ordinary folders, and its integer tables, i64,
    by GGUF name.

    A file's ``d2t`` has the offset from each draft row to the target model's token id; the returned
    table has the ids. Raises FileError for a table that holds no integers.
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
