"""A model's tensors as the constants of its plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import UnsupportedError
from treadle.kernels.matmul import COLUMNS
from treadle.kernels.spec import round_up
from treadle.plan import Const

if TYPE_CHECKING:
    from treadle.device import Device
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.formats import Format


@dataclass
class Weights:
    """A model's tensors as constants of a plan; shared by all of its plans."""

    gguf: GGUF
    device: Device
    consts: dict[str, tuple[Const, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> tuple[Const, ...]:
        """A constant for each array that the tensor has."""
        if name not in self.consts:
            arrays = self.gguf.tensors[name].arrays
            self.consts[name] = tuple(self.device.weights(name, array) for array in arrays)
        return self.consts[name]

    def floats(self, name: str) -> Const:
        """A vector (norm, bias) as f32, padded: kernels read whole vectors of a bias."""
        key = f"{name}:f32"
        if key not in self.consts:
            values = self.gguf.tensors[name].dequantize().ravel()
            padded = np.zeros(round_up(values.size, COLUMNS) + COLUMNS, np.float32)
            padded[: values.size] = values
            self.consts[key] = (self.device.weights(name, padded),)
        (made,) = self.consts[key]
        return made

    def tensor(self, name: str) -> Tensor:
        return self.gguf.tensors[name]

    def format(self, name: str) -> Format:
        tensor = self.tensor(name)
        if tensor.format is None:
            raise UnsupportedError(
                f"{self.gguf.path}: {name} is {tensor.type_name}, "
                "a format treadle has no kernels for yet"
            )
        return tensor.format
