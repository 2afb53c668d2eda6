"""Single-number tensors of each layer, which are keys in GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.convert.hf.tensors import GGML_TYPE
from treadle.errors import FileError
from treadle.files.gguf_array import ValueType, number_array
from treadle.formats import by_name

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig
    from treadle.files.safetensors import SafeTensors

_IN_LAYER = re.compile(r".*\blayers\.(?P<layer>\d+)\.(?P<rest>.+)")


def take_numbers(weights: SafeTensors, hyper: HfConfig) -> dict[str, Any]:
    """Remove them from ``weights`` and return the full keys. Raises FileError if one is missing, or
    is not a single number.
    """
    names: Mapping[str, str] = hyper.family.numbers
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    for name, tensor in list(weights.tensors.items()) if names else ():
        match = _IN_LAYER.fullmatch(name)
        if match is None or match["rest"] not in names:
            continue
        kind = tensor.dtype
        values = by_name(kind).dequantize_rows(tensor.data).tolist() if kind in GGML_TYPE else []
        if len(values) != 1:
            raise tensor.error(f"shape {list(tensor.shape)} in {kind}", "one number")
        found[match["rest"]][int(match["layer"])] = values[0]
        del weights.tensors[name]
    result: dict[str, Any] = {}
    for name, numbers in found.items():
        layers = range(hyper.n_layer)
        if missing := [i for i in layers if i not in numbers]:
            where = f"layers.{missing[0]}.{name}"
            raise FileError("the tensor is missing", path=weights.path, where=where)
        each = [numbers[i] for i in layers]
        result[names[name]] = number_array(ValueType.FLOAT32, each)
    return result
