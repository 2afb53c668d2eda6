"""PyTorch's checkpoints without PyTorch: the pickle of a dict of tensors, written by hand."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

KINDS = {"float32": "FloatStorage", "float16": "HalfStorage", "float64": "DoubleStorage"}
KINDS |= {"uint16": "BFloat16Storage", "int64": "LongStorage"}  # bf16 as its bits


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def pickled(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The program that torch.save writes: a storage for each tensor."""
    made = b"\x80\x02}("
    for i, (name, array) in enumerate(tensors.items()):
        kind = KINDS[array.dtype.name]
        strides = [n // array.itemsize for n in array.strides]
        storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(str(i))
        storage += text("cpu") + number(array.size) + b"tQ"
        rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0)
        rebuilt += numbers(*array.shape) + numbers(*strides) + b"\x89"
        made += text(name) + rebuilt + b"ccollections\nOrderedDict\n)RtR"
    return made + b"u."


def write_pth(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(arrays))
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{i}", array.tobytes())
