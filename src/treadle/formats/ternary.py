"""TQ1_0, TQ2_0 and Q2_0: ternary weights with one scale, ``w = d * (q - 1)``; Q1_0: signs only.

They are for models trained with weights of -1, 0 and 1, or of -1 and 1: other weights lose most of
their precision. The quantisers ignore importances.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, F32Array, Field, Val
from treadle.formats.kernel_bits import bit_spread
from treadle.formats.kernel_scales import TWO_BITS, shared, two_bits
from treadle.formats.numbers import in_bits, one_scale
from treadle.formats.rounding import RoundedBlocks, half_away, inverse, to_int
from treadle.jit.types import u8, u32

TQ1_0_LAYOUT = np.dtype([("qs", "u1", (48,)), ("qh", "u1", (4,)), ("d", "<f2")])
TQ2_0_LAYOUT = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])
Q_LAYOUT = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])  # of Q1_0 and Q2_0


def ternary(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Quantise float32 [n, block] with the largest magnitude as scale ``d``, and codes ``round(x /
    d) + 1``; ``weights`` are ignored.

    A NaN makes the scale NaN; an infinity, or more than 65519, makes it infinite.
    """
    d = np.abs(x).max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        q = to_int(half_away(x * inverse(d)[..., None]), -1, 1) + np.int8(1)
    return RoundedBlocks(d, q.view(np.uint8))


# -- TQ1_0 -------------------------------------------------------------------------------------
#
# A byte has five weights: the five base-3 digits of the fraction ``byte / 256``, the first weight's
# being the most significant. Multiplying by powers of 3 modulo 256 extracts the digits without a
# division. Weights j, j + 32 ... share byte j of a group of 32 bytes; a group of 16 bytes follows,
# then ``qh``, four bytes of four digits.

# Each group's place in qs or qh, and the digits per byte.
GROUPS = (("qs", slice(0, 32), 5), ("qs", slice(32, 48), 5), ("qh", slice(0, 4), 4))


def powers(n: int) -> npt.NDArray[np.uint8]:
    """Return [n, 1]: 1, 3, 9 ..., the factors that make each of ``n`` base-3 digits of a byte the
    first.
    """
    return np.array([3**i for i in range(n)], np.uint8)[:, None]


def read_thirds(blocks: Blocks) -> Any:
    """Unpack TQ1_0 blocks [...] to codes 0..2, [..., 256]."""
    digits = []
    for field, part, n in GROUPS:
        rest = blocks[field][..., None, part] * powers(n)  # modulo 256
        front = rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
        digits.append(front.reshape(*blocks.shape, n * rest.shape[-1]))
    return np.concatenate(digits, axis=-1)


def write_thirds(out: Blocks, found: RoundedBlocks) -> None:
    """Pack codes 0..2, ``found.q`` [n, 256], into ``qs`` and ``qh`` of TQ1_0 blocks [n]."""
    first = 0
    for field, part, n in GROUPS:
        width = part.stop - part.start
        digits = found.q[:, first : first + n * width].reshape(-1, n, width)
        first += n * width
        number = (digits * powers(5)[::-1][:n].astype(np.uint16)).sum(axis=-2)
        # Rounded up, so that multiplying by 3^i never falls just short of a digit.
        out[field][..., part] = (number * 256 + 242) // 243


def front(k: Builder, v: Val) -> Val:
    """Emit the first base-3 digit, 0..2, of each byte of ``v``: ``v * 3 >> 8``, by two comparisons,
    since the product does not fit a byte.
    """
    one = k.const(1, v.ty)
    two = k.const(2, v.ty)
    return k.select(v > 170, two, k.select(v > 85, one, k.zero(v.ty)))


def unpack_thirds(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack`` of TQ1_0: emit codes 0..2, in order."""
    qs = field("qs")
    qh = field("qh")
    large, small = (k.shuffle(qs, qs, range(*at)) for at in ((0, 32), (32, 48)))
    large, small = (k.concat(v, v * 3) for v in (large, small))
    large_9 = large * 9
    small_9 = small * 9
    large_81, small_81 = (k.split(v, v.ty.lanes // 2)[0] * 9 for v in (large_9, small_9))
    of_four = k.const([3**i for i in range(4) for _ in range(4)], u8 * 16)
    rest = k.shuffle(qh, qh, [0, 1, 2, 3] * 4) * of_four
    vectors = (
        large,
        large_9,
        k.concat(large_81, small),
        k.concat(small_9, k.concat(small_81, rest)),
    )
    return [front(k, v) for v in vectors]


TQ1_0_CODES = Codes(unpack_thirds, 1, 2, run=64, order=((0,), (1,), (2,), (3,)), scales=shared(8))
TQ1_0 = one_scale(
    "TQ1_0", 34, 256, TQ1_0_LAYOUT, read_thirds, write_thirds, ternary, TQ1_0_CODES, offset=1
)


# -- TQ2_0: two bits, weights 32 apart in a byte; code 3 is never written, and read as 2 -------

read_apart, write_apart = in_bits(2, 32)


def unpack_apart(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack`` of TQ2_0: emit codes 0..3, in the order TWO_BITS."""
    return two_bits(k, field("qs"))


TQ2_0_CODES = Codes(unpack_apart, 1, 3, run=8, order=TWO_BITS, scales=shared(8))
TQ2_0 = one_scale(
    "TQ2_0", 35, 256, TQ2_0_LAYOUT, read_apart, write_apart, ternary, TQ2_0_CODES, offset=1
)


# -- Q2_0: two bits, neighbours in a byte; ggml's quantiser never writes code 3, which means 2 d

read_beside, write_beside = in_bits(2, 1)


def unpack_beside(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack`` of Q2_0: emit codes 0..3 in order. Each byte is copied, shifted,
    into four bytes, then masked to two bits.
    """
    qs = field("qs").to(u32)
    qs = qs | (qs << 6)
    qs = (qs | (qs << 12)) & 0x03030303
    return [qs.bits(u8 * (4 * qs.ty.lanes))]


Q2_0_CODES = Codes(unpack_beside, 1, 3, scales=shared(2), run=64)
Q2_0 = one_scale("Q2_0", 42, 64, Q_LAYOUT, read_beside, write_beside, ternary, Q2_0_CODES, offset=1)


# -- Q1_0: signs, and ``w = d`` where the bit is set, else -d ----------------------------------

read_signs, write_signs = in_bits(1, 1)


def binary(x: F32Array, weights: F32Array | None) -> RoundedBlocks:
    """Quantise float32 [n, 128] with the mean magnitude as scale, summed in order like ggml, and
    code 1 for x >= 0; ``weights`` are ignored.

    A NaN makes the scale NaN; an infinity, or a mean beyond 65519, makes it infinite.
    """
    with np.errstate(over="ignore"):
        total: F32Array = np.add.accumulate(np.abs(x), axis=-1)[..., -1]
    return RoundedBlocks(total / np.float32(x.shape[-1]), (x >= 0).view(np.uint8))


def zero_and_two(blocks: Blocks) -> Any:
    """Unpack Q1_0 blocks [...] to codes 0 and 2, [..., 128]: less the offset 1 they are the
    signs.
    """
    return read_signs(blocks) << np.uint8(1)


def unpack_signs(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack`` of Q1_0: emit codes 0 and 2, in order."""
    return [bit_spread(k, k.each(field("qs"), 8, 8), range(64), 1)]


Q1_0_CODES = Codes(unpack_signs, 1, 2, scales=shared(4), run=128)
Q1_0 = one_scale("Q1_0", 41, 128, Q_LAYOUT, zero_and_two, write_signs, binary, Q1_0_CODES, offset=1)
