"""Weight format: name, block layout, numpy (de)quantisers, and kernel unpacking functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.errors import UnsupportedError
from treadle.jit.language import Builder as Builder
from treadle.jit.language import Isa as Isa
from treadle.jit.language import Val as Val

F32Array = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

Emit = Callable[..., Any]  # a function of the kernel language: takes the builder first
# float32 [n, block], importances of that shape or None -> scales and codes, not yet packed.
Search = Callable[[F32Array, "F32Array | None"], Any]
Field = Callable[..., Val]  # returns a field's bytes by its name

NO_GGML = -1  # the ``ggml_id`` of formats that ggml does not have
CACHED_WEIGHTS = 1 << 18  # processed at once: float32 temporaries of the numpy code stay in cache


@dataclass(frozen=True)
class Codes:
    """Kernel code that reads blocks as integer codes: ``w = d * (code - offset) [+ m]``.

    ``unpack(k, field)`` returns the codes, at most ``top``, as vectors of ``u8``. ``order`` lists
    the contents of each vector: numbers of runs of ``run`` neighbouring codes. ``field(name)``
    returns a field's bytes. Kernels pass as many small blocks as fill a register, side by side in
    every field and vector; ``unpack`` and ``scales`` work for any number of blocks.

    ``d`` and ``m`` name the fields of scale and minimum if each is one f16. Otherwise
    ``scales(k, isa, field)`` returns for every ``sub`` codes, in order, f32 scales of at most 21
    significant bits (so that products with 1.5 * 2**23 are exact; more with ``long_scales``), and
    f32 minimums or None.

    If these are integers times one ``d`` (and ``dmin``) of a block of 256, ``steps(k, isa, field)``
    returns the factors: integers ``sc``, f32 ``d``, integers ``m``, f32 ``dmin`` (the last two may
    be None): ``w = d * sc * (code - offset) - dmin * m``. All fit into i16. ``in_halves(k, field)``
    then returns a block's codes as ``u8 * 32`` vectors: the i-th 16 of the block's first half, then
    the i-th 16 of its second half.

    ``folded`` reads the same blocks with integer scales multiplied into the codes, which remain
    bytes, so that more codes share a scale. Minimums may remain per ``m_sub`` codes. It serves
    weights that are packed once for many tokens, which amortises the multiplications.

    If codes have few values, every ``sub`` weights have few distinct values: ``levels`` are the
    values of the codes (2 to 32, a power of two), and ``words(k, field)`` returns the codes of
    every 32 weights in order, as ``u16 * 32`` with undefined upper bits.

    ``in_order(k, field)`` returns a block's codes in order, as vectors of ``u8``, if that is
    cheaper than reordering the result of ``unpack``.
    """

    unpack: Emit
    offset: int
    top: int
    d: str = "d"
    m: str = ""
    run: int = 32
    order: tuple[tuple[int, ...], ...] = ((0,),)
    sub: int = 32  # 16 or 32
    m_sub: int = 0  # codes that share a minimum; 0: ``sub``
    scales: Emit | None = None
    steps: Emit | None = None
    in_halves: Emit | None = None
    minimums: bool = False  # whether ``scales`` returns minimums
    long_scales: bool = False  # scales may use all bits of f32
    gathers: bool = False  # codes are looked up in a table in memory
    folded: Codes | None = None
    levels: tuple[float, ...] = ()
    words: Emit | None = None
    in_order: Emit | None = None

    @property
    def has_m(self) -> bool:
        """Whether weights have a minimum."""
        return bool(self.m) or self.minimums

    @property
    def most(self) -> int:
        """The largest magnitude of ``code - offset``."""
        return max(self.top - self.offset, self.offset)

    @property
    def sum_sub(self) -> int:
        """Codes that share both scale and minimum: kernels sum activations over this many
        values.
        """
        return self.m_sub or self.sub

    def groups(self, block: int, n: int = 1) -> list[list[int]]:
        """Return, for each vector of ``unpack``, the indices of the groups of four codes that it
        holds. Groups are counted over ``n`` blocks of ``block`` codes side by side, ``block / 4``
        to a block.
        """
        fours = self.run // 4
        return [
            [i * (block // 4) + r * fours + j for i in range(n) for r in runs for j in range(fours)]
            for runs in self.order
        ]


@dataclass(frozen=True)
class Format:
    """A weight format: one row of FORMATS.

    ``dtype`` defines the block layout; its fields have ggml's names (``d``, ``m``, ``qs``).
    An unquantised format has ``block`` 1 and a plain scalar dtype.

    A file may store each field of all blocks in an array of its own: ``parts`` names these fields,
    in the order of ``dtype``. A tensor then consists of as many arrays, and ``join`` and ``split``
    convert between them and whole blocks of ``dtype``.

    A row may begin with scales that all its blocks share: ``head`` is their layout. Blocks of
    ``quantize`` and ``dequantize`` then have the head's fields before their own (``whole``), and
    ``quantize`` takes whole rows: float32 [..., k] -> blocks [..., k / block].
    """

    name: str
    ggml_id: int
    block: int  # weights in a block
    dtype: np.dtype[Any]
    dequantize: Callable[[Blocks], F32Array]  # blocks [...] -> float32 [..., block]
    quantize: Callable[..., Blocks]  # float32 [..., block], importance or None -> blocks [...]
    act: str = "f32"  # type of the activations in products: "q8", "bf16" or "f32"
    codes: Codes | None = None  # formats with integer codes
    load: Emit | None = None  # float formats: load(k, isa, p, lanes, n read, align) -> f32 * lanes
    search: Any = None  # the scale search of ``quantize``, if any; kernels implement it too
    rounds: bool = False  # without importances no search is done, and the bytes equal ggml's
    aware: bool = False  # whether ``quantize`` uses importances
    parts: tuple[str, ...] = ()  # fields in arrays of their own; (): whole blocks in one array
    head: np.dtype[Any] | None = None  # scales at the start of every row
    # Blocks [...] -> float32 [..., block / codes.sub]: the scales of codes, for formats where they
    # cannot be told from blocks with the lowest code everywhere.
    sub_scales: Callable[[Blocks], F32Array] | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of one block in each of the tensor's arrays."""
        return tuple(self.dtype[name].itemsize for name in self.parts) or (self.dtype.itemsize,)

    @property
    def head_bytes(self) -> int:
        """Bytes of a row before its first block."""
        return self.head.itemsize if self.head else 0

    @property
    def whole(self) -> np.dtype[Any]:
        """The layout of a block with its row's scales before it: ``dtype`` if there are none."""
        return np.dtype([*self.head.descr, *self.dtype.descr]) if self.head else self.dtype

    def row_strides(self, k: int) -> tuple[int, ...]:
        """Bytes of a row of ``k`` weights in each of the tensor's arrays."""
        return tuple(k // self.block * stride + self.head_bytes for stride in self.strides)

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of ``k`` weights over all parts. Raises UnsupportedError if
        ``k`` is not a multiple of the block.
        """
        if k % self.block:
            raise UnsupportedError(
                f"{self.name} needs rows that are multiples of {self.block}; these have {k} weights"
            )
        return k // self.block * self.dtype.itemsize + self.head_bytes

    def place(self, field: str) -> tuple[int, int]:
        """Return where the block field ``field`` is: the index of its array, and its byte offset in
        a block of this array.
        """
        if self.parts:
            return self.parts.index(field), 0
        assert self.dtype.fields is not None
        return 0, int(self.dtype.fields[field][1])

    def join(self, arrays: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """Join the arrays of a tensor in ``parts`` into whole blocks, uint8 bytes: a copy, unless
        the format has no parts.
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
        """Split whole blocks, uint8 [..., row bytes], into an array uint8 [..., bytes] for each of
        ``parts``; the inverse of ``join``.
        """
        if not self.parts:
            return [data]
        blocks = np.ascontiguousarray(data).reshape(-1).view(self.dtype)
        made = (np.ascontiguousarray(blocks[name]).view(np.uint8) for name in self.parts)
        return [array.reshape(*data.shape[:-1], -1) for array in made]

    def blocks_of(self, data: npt.NDArray[np.uint8]) -> Blocks:
        """Convert rows uint8 [..., row bytes] to blocks [..., k / block] of layout ``whole``, each
        with its row's scales. A view if rows have no head.
        """
        data = np.ascontiguousarray(data)
        n = self.head_bytes
        shape = (*data.shape[:-1], (data.shape[-1] - n) // self.dtype.itemsize)
        if self.head is None:
            return data.reshape(-1).view(self.dtype).reshape(shape)
        rows = data.reshape(-1, data.shape[-1])
        each = np.dtype((np.void, self.dtype.itemsize))
        parts = np.ascontiguousarray(rows[:, n:]).view(each).reshape(len(rows), shape[-1])
        blocks = np.empty((len(rows), shape[-1], self.whole.itemsize), np.uint8)
        blocks[..., :n] = rows[:, None, :n]
        blocks[..., n:] = parts.view(np.uint8).reshape(len(rows), shape[-1], -1)
        return blocks.reshape(-1).view(self.whole).reshape(shape)

    def bytes_of(self, blocks: Blocks) -> npt.NDArray[np.uint8]:
        """Convert blocks [..., k / block] of layout ``whole`` to rows uint8 [..., row bytes]; the
        inverse of ``blocks_of``.
        """
        n = self.head_bytes
        *rows, per_row = blocks.shape
        whole = np.ascontiguousarray(blocks).reshape(-1).view(np.uint8)
        whole = whole.reshape(*blocks.shape, self.whole.itemsize)
        made = whole[..., n:].reshape(*rows, per_row * self.dtype.itemsize)
        return np.concatenate([whole[..., 0, :n], made], axis=-1) if n else made

    def quantize_rows(
        self, x: F32Array, weights: F32Array | None = None, search: Search | None = None
    ) -> npt.NDArray[np.uint8]:
        """Quantise float32 [..., k] to the format's bytes, uint8 [..., row_bytes(k)].

        ``weights``: importance of each weight's squared error, broadcast to x's shape; formats that
        are not ``aware`` ignore them. ``search`` replaces the format's own scale search. Works in
        strips, so that temporaries stay small. Raises UnsupportedError if blocks do not divide
        ``k``.
        """
        k = x.shape[-1]
        n_bytes = self.row_bytes(k)
        unit = k if self.head else self.block  # weights that are searched together
        pieces = np.ascontiguousarray(x, np.float32).reshape(-1, unit)
        out = np.empty((len(pieces), unit // self.block), self.whole)
        step = max(1, CACHED_WEIGHTS // max(1, unit))
        importance = None
        if weights is not None:
            importance = np.broadcast_to(weights, x.shape).reshape(-1, unit)
        for i in range(0, len(out), step):
            part = None
            if importance is not None:
                part = np.ascontiguousarray(importance[i : i + step], np.float32)
            given = (pieces[i : i + step], part)
            made = self.quantize(*given, *([search] if search else []))
            out[i : i + step] = made.reshape(len(made), -1)
        return self.bytes_of(out).reshape(*x.shape[:-1], n_bytes)

    def dequantize_rows(self, data: npt.NDArray[np.uint8]) -> F32Array:
        """Dequantise the format's bytes, uint8 [..., n_bytes], to float32 [..., k]."""
        k = (data.shape[-1] - self.head_bytes) // self.dtype.itemsize * self.block
        blocks = self.blocks_of(data).reshape(-1)
        out = np.empty((len(blocks), self.block), np.float32)
        step = CACHED_WEIGHTS // self.block
        for i in range(0, len(blocks), step):
            out[i : i + step] = self.dequantize(blocks[i : i + step])
        return out.reshape(*data.shape[:-1], k)
