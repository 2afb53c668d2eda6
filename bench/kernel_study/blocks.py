"""Studied kernels on blocks: the dot product of a row of Q8_0, Q4_0 or Q4_K with quantised
activations, as ggml lays both out.

``lanes`` codes are multiplied at a time (a block of 32 in one vector, or in parts), ``unroll``
blocks are taken in a round, and ``barrier`` keeps the compiler from mixing them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

import numpy as np

from bench.kernel_study.spec import F32_ROUND, Study, StudyCase, sum_of_bytes, unwritten
from treadle.base.fast_classes import dataclass
from treadle.formats import by_name
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f16, f32, i8, i16, i32, u8, u32

# Activations of blocks of 256: one scale, codes, and the sums of every 16 of these.
Q8_K = np.dtype([("d", "<f4"), ("qs", "i1", (256,)), ("bsums", "<i2", (16,))])
# of the bytes of a word
LOW_SIX = 0x3F3F3F3F
LOW_FOUR = 0x0F0F0F0F
LOW_TWO = 0x03030303


@dataclass(frozen=True)
class BlockDot(Study):
    """``out[0] = sum over blocks``: x holds the weights' blocks, y the activations'; f32 sums."""

    fmt: ClassVar[str]
    acts: ClassVar[np.dtype]
    lanes: int = 32
    unroll: int = 1
    barrier: bool = False

    def rounds(self, isa: Isa, size: int) -> int:
        """Every round takes ``unroll`` blocks."""
        return size // (by_name(self.fmt).block * self.unroll)

    def products(self, isa: Isa, size: int) -> int:
        """One for each value."""
        return size

    @property
    def setting(self) -> str:
        """``32 lanes x 2, barrier``."""
        return f"{self.lanes} lanes x {self.unroll}" + ", barrier" * self.barrier

    def lmul(self, isa: Isa) -> Fraction:
        """Number of registers that a vector of codes fills."""
        return Fraction(8 * self.lanes, isa.vector_bits)

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """``n`` blocks."""
        w_bytes = by_name(self.fmt).dtype.itemsize
        x_bytes = self.acts.itemsize
        sums = [k.var(k.zero(f32)) for _ in range(self.unroll)]
        with k.loop(n, step=self.unroll) as b:
            for u, total in enumerate(sums):
                w_at = x + (b + u) * w_bytes
                x_at = y + (b + u) * x_bytes
                total.v = self.block(k, isa, total.v, w_at, x_at)
                if self.barrier:
                    k.fence()
        whole = sums[0].v
        for total in sums[1:]:
            whole = whole + total.v
        k.store(out, whole, align=4)

    def block(self, k: Builder, isa: Isa, total: Val, w: Val, x: Val) -> Val:
        """``total`` and the dot product of one block."""
        raise NotImplementedError

    def quantised(self, x: np.ndarray) -> np.ndarray:
        """Activations f32 ``[n]`` in their blocks."""
        raise NotImplementedError

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Sums of a block are exact; errors: some roundings for each block that is added."""
        fmt = by_name(self.fmt)
        w = fmt.quantize_rows(rng.standard_normal(size).astype(np.float32))
        acts = self.quantised(rng.standard_normal(size).astype(np.float32))
        codes = acts["qs"].astype(np.float64) * acts["d"].astype(np.float64)[:, None]
        exact = fmt.dequantize_rows(w).astype(np.float64) * codes.reshape(-1)
        # A minimum's part is subtracted from a larger sum: count both as positive.
        size_of = np.abs(exact).reshape(-1, fmt.block).sum(-1) * 4
        bound = (len(acts) + 6) * F32_ROUND * size_of.sum()
        arrays = {"x": w, "y": acts.view(np.uint8), "out": unwritten(1)}
        expected = {"out": exact.sum()[None]}
        return StudyCase(arrays, len(acts), expected, {"out": np.array([bound])})

    def parts(self, k: Builder, at: Val, offset: int, n: int) -> list[Val]:
        """``n`` signed bytes, ``lanes`` at a time."""
        width = min(self.lanes, n)
        return [k.load(at, i8 * width, offset=offset + i) for i in range(0, n, width)]

    def nibbles(self, k: Builder, at: Val, offset: int, n: int, high: bool) -> list[Val]:
        """The lower or higher halves of ``n`` bytes, u8, ``lanes`` at a time."""
        width = min(self.lanes, n)
        held = [k.load(at, u8 * width, offset=offset + i) for i in range(0, n, width)]
        return [v >> 4 if high else v & 15 for v in held]


def sum_of_products(pairs: list[tuple[Val, Val]], at_once: int) -> list[Val]:
    """Products of bytes in i16, ``at_once`` of them added up there."""
    result: list[Val] = []
    for i, (a, b) in enumerate(pairs):
        product = a.to(i16) * b.to(i16)
        if i % at_once:
            result[-1] = result[-1] + product
        else:
            result.append(product)
    return result


def _total(k: Builder, sums: list[Val]) -> Val:
    found = [sum_of_bytes(k, s) for s in sums]
    whole = found[0]
    for each in found[1:]:
        whole = whole + each
    return whole


@dataclass(frozen=True)
class BlockDot32(BlockDot):
    """Blocks of 32 against blocks of 32: an f16 scale each."""

    acts: ClassVar[np.dtype] = by_name("Q8_0").dtype

    def block(self, k: Builder, isa: Isa, total: Val, w: Val, x: Val) -> Val:
        """Codes follow the scale in either."""
        scales = [isa.widen_f16(k, k.load(at, f16 * 1, align=2)) for at in (w, x)]
        dot = self.dot(k, w, x).to(f32)
        return k.fma(dot, k.extract(scales[0] * scales[1], 0), total)

    def dot(self, k: Builder, w: Val, x: Val) -> Val:
        """Return the dot product of two blocks' codes, i32."""
        raise NotImplementedError

    def quantised(self, x: np.ndarray) -> np.ndarray:
        """Return activations as blocks of Q8_0."""
        return by_name("Q8_0").quantize_rows(x).view(self.acts)


@dataclass(frozen=True)
class DotQ8_0(BlockDot32):
    """Codes of -127..127 in either: two products fit into i16."""

    op: ClassVar[str] = "dot_q8_0"
    fmt: ClassVar[str] = "Q8_0"

    def dot(self, k: Builder, w: Val, x: Val) -> Val:
        """Parts are added in pairs."""
        pairs = zip(self.parts(k, w, 2, 32), self.parts(k, x, 2, 32), strict=True)
        return _total(k, sum_of_products(list(pairs), 2))


@dataclass(frozen=True)
class DotQ4_0(BlockDot32):
    """Codes of -8..7: 32 products fit into i16 (8 x 127 x 32 = 32,512)."""

    op: ClassVar[str] = "dot_q4_0"
    fmt: ClassVar[str] = "Q4_0"
    lanes: int = 16

    def dot(self, k: Builder, w: Val, x: Val) -> Val:
        """The lower halves of 16 bytes are the block's first 16 codes."""
        codes = [
            v.bits(i8.like(v.ty)) - 8
            for high in (False, True)
            for v in self.nibbles(k, w, 2, 16, high)
        ]
        acts = [v for half in (0, 16) for v in self.parts(k, x, 2 + half, 16)]
        return _total(k, sum_of_products(list(zip(codes, acts, strict=True)), len(codes)))


@dataclass(frozen=True)
class DotQ4_K(BlockDot):
    """Blocks of 256: eight scales and minimums of six bits, packed into three words."""

    op: ClassVar[str] = "dot_q4_k"
    fmt: ClassVar[str] = "Q4_K"
    acts: ClassVar[np.dtype] = Q8_K

    def block(self, k: Builder, isa: Isa, total: Val, w: Val, x: Val) -> Val:
        """``d dx (sum of scale * dot) - dmin dx (sum of minimum * sum of activations)``."""
        place = by_name(self.fmt).place
        word = [k.load(w, u32, align=4, offset=place("scales")[1] + 4 * i) for i in range(3)]
        mixed = [(word[2] >> (4 * i) & LOW_FOUR) | ((word[i] >> 6 & LOW_TWO) << 4) for i in (0, 1)]
        scales, mins = ((word[i] & LOW_SIX, mixed[i]) for i in (0, 1))
        dots = k.const(0, i32)
        for j in range(8):
            codes = self.nibbles(k, w, place("qs")[1] + 32 * (j // 2), 32, bool(j % 2))
            acts = self.parts(k, x, 4 + 32 * j, 32)
            pairs = [(c.bits(i8.like(c.ty)), a) for c, a in zip(codes, acts, strict=True)]
            dot = _total(k, sum_of_products(pairs, len(pairs)))
            dots = dots + (scales[j // 4] >> (8 * (j % 4)) & 255).to(i32) * dot
        pair = k.load(x, i32 * 8, align=4, offset=4 + 256)  # two sums of 16 each
        sums = (pair << 16 >> 16) + (pair >> 16)
        least = k.concat(*(m.bits(u8 * 4) for m in mins)).to(i32)
        below = k.call("llvm.vector.reduce.add.v8i32", i32, [(sums * least).ir])
        d, dmin = (
            k.extract(isa.widen_f16(k, k.load(w, f16 * 1, align=2, offset=at)), 0)
            for at in (place("d")[1], place("dmin")[1])
        )
        dx = k.load(x, f32, align=4)
        total = k.fma(d * dx, dots.to(f32), total)
        return k.fma(-(dmin * dx), below.to(f32), total)

    def quantised(self, x: np.ndarray) -> np.ndarray:
        """The largest becomes 127."""
        rows = x.reshape(-1, 256)
        result = np.zeros(len(rows), Q8_K)
        result["d"] = np.abs(rows).max(-1) / 127
        result["qs"] = np.rint(rows / result["d"][:, None])
        result["bsums"] = result["qs"].reshape(-1, 16, 16).sum(-1)
        return result
