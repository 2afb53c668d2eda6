"""Single-number tensors, in each layer or outside layers, which are metadata keys in GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensors import GGML_TYPE
from treadle.errors import FileError
from treadle.files.metadata import ValueType, number_array
from treadle.formats import by_name

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig
    from treadle.files.safetensors import SafeTensor, SafeTensors

OUTSIDE = "/"  # before the last two words of a name outside layers
_IN_LAYER = re.compile(r".*\blayers\.(?P<layer>\d+)\.(?P<rest>.+)")


def take_numbers(weights: SafeTensors, hyper: HfConfig) -> dict[str, Any]:
    """Remove the tensors of ``Family.numbers`` from ``weights`` and return their values by GGUF
    key: one number, or f32 [n_layer]. Raises FileError if one is missing, or is not a single
    number.
    """
    names: Mapping[str, str] = hyper.family.numbers
    result: dict[str, Any] = {}
    found: dict[str, dict[int, float]] = {
        name: {} for name in names if not name.startswith(OUTSIDE)
    }
    for name, tensor in list(weights.tensors.items()) if names else ():
        match = _IN_LAYER.fullmatch(name)
        last = OUTSIDE + ".".join(name.split(".")[-2:])
        if match is None and last in names:
            result[names[last]] = f32(_number(tensor))
            del weights.tensors[name]
        if match is None or match["rest"] not in names:
            continue
        found[match["rest"]][int(match["layer"])] = _number(tensor)
        del weights.tensors[name]
    for name, key in names.items():
        if name.startswith(OUTSIDE) and key not in result:
            what = "the tensor is missing"
            raise FileError(what, path=weights.path, where=name.removeprefix(OUTSIDE))
    for name, numbers in found.items():
        layers = range(hyper.n_layer)
        if missing := [i for i in layers if i not in numbers]:
            where = f"layers.{missing[0]}.{name}"
            raise FileError("the tensor is missing", path=weights.path, where=where)
        each = [numbers[i] for i in layers]
        result[names[name]] = number_array(ValueType.FLOAT32, each)
    return result


def _number(tensor: SafeTensor) -> float:
    """Return the value of a tensor of one element. Raises FileError for other sizes and types."""
    kind = tensor.dtype
    values = by_name(kind).dequantize_rows(tensor.data).tolist() if kind in GGML_TYPE else []
    if len(values) != 1:
        raise tensor.error(f"shape {list(tensor.shape)} in {kind}", "one number")
    return float(values[0])
