"""One weight format: its name, its layout, and numpy's reading and writing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.errors import UnsupportedError

F32Array = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

Emit = Callable[..., Any]  # a function of the kernel language: takes the builder first

STRIP = 1 << 18  # weights a strip: the float32 temporaries of the numpy code stay in cache


@dataclass(frozen=True)
class Codes:
    """How a kernel reads a block of 32 weights as bytes: ``w = d * (code - offset) [+ m]``.

    ``unpack(k, field)`` gives the codes, none above ``top``, as ``parts`` vectors of ``u8``: part j
    holds the codes from ``32 / parts * j`` on. ``field(name)`` is a field's bytes. Kernels hand
    over as many blocks as fill a register, side by side in every vector: ``unpack`` need not know.
    """

    unpack: Emit
    offset: int
    top: int
    d: str = "d"  # the field that holds the scale, f16
    m: str = ""  # the field that holds the minimum, f16; empty where there is none
    parts: int = 1


@dataclass(frozen=True)
class Format:
    """A row of the table of formats.

    ``dtype`` is the only statement of a block's layout; its fields are named as ggml's
    (``d``, ``m``, ``qs``). An unquantised format has ``block`` 1 and a plain scalar dtype.
    """

    name: str
    ggml_id: int
    block: int  # weights in a block
    dtype: np.dtype[Any]
    dequantize: Callable[[Blocks], F32Array]  # blocks [...] -> float32 [..., block]
    quantize: Callable[[F32Array], Blocks]  # float32 [..., block] -> blocks [...]
    act: str = "f32"  # what activations become to meet these weights: "q8", "bf16" or "f32"
    codes: Codes | None = None  # int8 formats
    load: Emit | None = None  # float formats: load(k, isa, p, lanes, n read) -> f32 * lanes

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of ``k`` weights; UnsupportedError when blocks do not fill it."""
        if k % self.block:
            raise UnsupportedError(
                f"{self.name} cannot hold rows of {k} weights: not a multiple of {self.block}"
            )
        return k // self.block * self.dtype.itemsize

    def field_offset(self, field: str) -> int:
        """Byte offset of a field in a block."""
        assert self.dtype.fields is not None
        return int(self.dtype.fields[field][1])

    def quantize_rows(self, x: F32Array) -> npt.NDArray[np.uint8]:
        """float32 [..., k] to the format's bytes, uint8 [..., row_bytes(k)].

        Works in strips, so that a large tensor needs no large temporaries.
        """
        n_bytes = self.row_bytes(x.shape[-1])
        blocks = np.ascontiguousarray(x, np.float32).reshape(-1, self.block)
        out = np.empty(blocks.shape[0], self.dtype)
        step = STRIP // self.block
        for i in range(0, len(out), step):
            out[i : i + step] = self.quantize(blocks[i : i + step])
        return out.view(np.uint8).reshape(*x.shape[:-1], n_bytes)

    def dequantize_rows(self, data: npt.NDArray[np.uint8]) -> F32Array:
        """The format's bytes, uint8 [..., n_bytes], to float32 [..., k]."""
        blocks = np.ascontiguousarray(data).reshape(-1).view(self.dtype)
        out = np.empty((len(blocks), self.block), np.float32)
        step = STRIP // self.block
        for i in range(0, len(blocks), step):
            out[i : i + step] = self.dequantize(blocks[i : i + step])
        k = data.shape[-1] // self.dtype.itemsize * self.block
        return out.reshape(*data.shape[:-1], k)
