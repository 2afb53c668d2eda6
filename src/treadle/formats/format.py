"""One weight format: its name, its layout, and numpy's reading and writing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_dataclass import dataclass
from treadle.errors import UnsupportedError
from treadle.jit.language import Builder as Builder
from treadle.jit.language import Isa as Isa
from treadle.jit.language import Val as Val

F32Array = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

Emit = Callable[..., Any]  # a function of the kernel language: takes the builder first
# float32 [n, block], importance as that or None -> the blocks' numbers.
Search = Callable[[F32Array, "F32Array | None"], Any]
Field = Callable[..., Val]  # gives a field's bytes by its name

NO_GGML = -1  # the ``ggml_id`` of formats that ggml does not have
CACHED_WEIGHTS = 1 << 18  # at once: the float32 temporaries of the numpy code stay in cache


@dataclass(frozen=True)
class Codes:
    """How a kernel reads blocks as bytes: ``w = d * (code - offset) [+ m]``.

    ``unpack(k, field)`` gives the codes, none above ``top``, as vectors of ``u8``. ``order`` says
    what each holds: runs of ``run`` neighbouring codes, by their number. ``field(name)`` is a
    field's bytes. Kernels hand over as many small blocks as fill a register, side by side in every
    field and every vector: neither ``unpack`` nor ``scales`` need to know.

    ``d`` and ``m`` name the fields that hold scale and minimum where they are one f16 each. Else
    ``scales(k, isa, field)`` gives what every ``sub`` codes share, in order: f32 scales of at most
    21 significant bits (their products with 1.5 * 2**23 are exact) or with ``long_scales`` of any,
    and f32 minimums or None.

    Where those are whole numbers times one ``d`` (and ``dmin``) of a block of 256, ``steps(k, isa,
    field)`` gives them so: integers ``sc`` and f32 ``d``, then integers ``m`` and f32 ``dmin``, or
    None twice: ``w = d * sc * (code - offset) - dmin * m``. All fit into i16. And ``in_halves(k,
    field)`` gives a block's codes, ``u8 * 32`` each: the i-th 16 of its first half, then the i-th
    16 of its second.

    ``folded`` reads the same blocks with whole-numbered scales multiplied into the codes, which are
    bytes still: more codes then share a scale. Minimums may stay as they are, one for ``m_sub``
    codes. What is packed once for many tokens can afford the multiplications.

    Where a code is one of few, of each ``sub`` there are few different weights: ``levels`` is what
    codes stand for, 2 to 32 numbers, a power of two of them, and ``words(k, field)`` gives the
    codes of every 32 weights in order, ``u16 * 32``, whose upper bits may be anything.

    ``in_order(k, field)`` gives a block's codes as they follow each other, vectors of ``u8``, where
    that takes less than putting ``unpack``'s in order.
    """

    unpack: Emit
    offset: int
    top: int
    d: str = "d"
    m: str = ""
    run: int = 32
    order: tuple[tuple[int, ...], ...] = ((0,),)
    sub: int = 32  # 16 or 32
    m_sub: int = 0  # codes that share a minimum; 0: as many as share a scale
    scales: Emit | None = None
    steps: Emit | None = None
    in_halves: Emit | None = None
    minimums: bool = False  # whether ``scales`` gives them
    long_scales: bool = False  # scales have all of f32's bits
    gathers: bool = False  # codes are looked up in memory
    folded: Codes | None = None
    levels: tuple[float, ...] = ()
    words: Emit | None = None
    in_order: Emit | None = None

    @property
    def has_m(self) -> bool:
        """Whether there is a minimum."""
        return bool(self.m) or self.minimums

    @property
    def most(self) -> int:
        """The largest size of what is left of a code when the offset is taken away."""
        return max(self.top - self.offset, self.offset)

    @property
    def sum_sub(self) -> int:
        """Codes that share both scale and minimum: activations are summed up over as many."""
        return self.m_sub or self.sub

    def groups(self, block: int, n: int = 1) -> list[list[int]]:
        """Which fours of codes, counted over ``n`` blocks side by side, each vector holds."""
        fours = self.run // 4
        return [
            [i * (block // 4) + r * fours + j for i in range(n) for r in runs for j in range(fours)]
            for runs in self.order
        ]


@dataclass(frozen=True)
class Format:
    """A row of the table of formats.

    ``dtype`` is the only statement of a block's layout; its fields are named as ggml's
    (``d``, ``m``, ``qs``). An unquantised format has ``block`` 1 and a plain scalar dtype.

    A file may keep the fields of all blocks apart, each in an array of its own: ``parts`` names
    them, in ``dtype``'s order. A tensor is then as many arrays, ``dtype`` what they would be put
    together, and ``join`` and ``split`` go from one to the other.
    """

    name: str
    ggml_id: int
    block: int  # weights in a block
    dtype: np.dtype[Any]
    dequantize: Callable[[Blocks], F32Array]  # blocks [...] -> float32 [..., block]
    quantize: Callable[..., Blocks]  # float32 [..., block], importance or None -> blocks [...]
    act: str = "f32"  # what activations become to meet these weights: "q8", "bf16" or "f32"
    codes: Codes | None = None  # int8 formats
    load: Emit | None = None  # float formats: load(k, isa, p, lanes, n read, align) -> f32 * lanes
    search: Any = None  # how scales are searched for, where ``quantize`` does; kernels have it too
    rounds: bool = False  # without importances nothing is searched for: the bytes are ggml's
    aware: bool = False  # importances count
    parts: tuple[str, ...] = ()  # fields in arrays of their own; none: whole blocks in one array

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one block to the next, in each of the arrays."""
        return tuple(self.dtype[name].itemsize for name in self.parts) or (self.dtype.itemsize,)

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of ``k`` weights, of all its parts; UnsupportedError when blocks do not
        fill it.
        """
        if k % self.block:
            raise UnsupportedError(
                f"{self.name} needs rows that are multiples of {self.block}; these have {k} weights"
            )
        return k // self.block * self.dtype.itemsize

    def place(self, field: str) -> tuple[int, int]:
        """Which array a field lies in, and its byte offset in what a block has there."""
        if self.parts:
            return self.parts.index(field), 0
        assert self.dtype.fields is not None
        return 0, int(self.dtype.fields[field][1])

    def join(self, arrays: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """A tensor's arrays, bytes of one each, as the bytes of its blocks: a copy, unless blocks
        are whole anyway.
        """
        if not self.parts:
            (whole,) = arrays
            return whole
        blocks = np.empty(arrays[0].size // self.strides[0], self.dtype)
        for name, array in zip(self.parts, arrays, strict=True):
            field = self.dtype[name]
            blocks[name] = array.reshape(-1).view(field.base).reshape(-1, *field.shape)
        return blocks.view(np.uint8)

    def split(self, data: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        """What ``join`` undoes: uint8 [..., row bytes] to arrays of uint8 [..., bytes]."""
        if not self.parts:
            return [data]
        blocks = np.ascontiguousarray(data).reshape(-1).view(self.dtype)
        made = (np.ascontiguousarray(blocks[name]).view(np.uint8) for name in self.parts)
        return [array.reshape(*data.shape[:-1], -1) for array in made]

    def quantize_rows(
        self, x: F32Array, weights: F32Array | None = None, search: Search | None = None
    ) -> npt.NDArray[np.uint8]:
        """float32 [..., k] to the format's bytes, uint8 [..., row_bytes(k)].

        ``weights``: how much each error counts, broadcast to x's shape; formats that are not
        ``aware`` take no notice. Works in strips, so that a large tensor needs no large
        temporaries.
        """
        n_bytes = self.row_bytes(x.shape[-1])
        blocks = np.ascontiguousarray(x, np.float32).reshape(-1, self.block)
        out = np.empty(blocks.shape[0], self.dtype)
        step = max(1, CACHED_WEIGHTS // self.block)
        importance = None
        if weights is not None:
            importance = np.broadcast_to(weights, x.shape).reshape(-1, self.block)
        for i in range(0, len(out), step):
            part = None
            if importance is not None:
                part = np.ascontiguousarray(importance[i : i + step], np.float32)
            given = (blocks[i : i + step], part)
            out[i : i + step] = self.quantize(*given, *([search] if search else []))
        return out.view(np.uint8).reshape(*x.shape[:-1], n_bytes)

    def dequantize_rows(self, data: npt.NDArray[np.uint8]) -> F32Array:
        """The format's bytes, uint8 [..., n_bytes], to float32 [..., k]."""
        blocks = np.ascontiguousarray(data).reshape(-1).view(self.dtype)
        out = np.empty((len(blocks), self.block), np.float32)
        step = CACHED_WEIGHTS // self.block
        for i in range(0, len(blocks), step):
            out[i : i + step] = self.dequantize(blocks[i : i + step])
        k = data.shape[-1] // self.dtype.itemsize * self.block
        return out.reshape(*data.shape[:-1], k)
