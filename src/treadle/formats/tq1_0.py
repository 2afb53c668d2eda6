"""TQ1_0: 256 ternary weights, five to a byte, with one scale; ``w = d * (q - 1)``.

A byte is a fraction in base 3: its five digits are those of ``byte / 256``, the first weight's
the most significant. So the digits are read off by multiplying with powers of 3 modulo 256, and
no division is needed. Weight j, j + 32 ... share byte j of a group of 32 bytes; then come a group
of 16 bytes, and ``qh``, four bytes of four digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, Field, Format, Val
from treadle.formats.kernel_scales import shared
from treadle.formats.numbers import searched, with_scale
from treadle.formats.rounding import Rounded
from treadle.formats.tq2_0 import ternary
from treadle.jit.types import u8

LAYOUT = np.dtype([("qs", "u1", (48,)), ("qh", "u1", (4,)), ("d", "<f2")])

# Where in qs and qh each group lies, and how many digits its bytes carry.
GROUPS = (("qs", slice(0, 32), 5), ("qs", slice(32, 48), 5), ("qh", slice(0, 4), 4))


def powers(n: int) -> npt.NDArray[np.uint8]:
    """[n, 1]: 1, 3, 9 ..., what brings each digit to the front."""
    return np.array([3**i for i in range(n)], np.uint8)[:, None]


def read(blocks: Blocks) -> Any:
    """Codes."""
    digits = []
    for field, part, n in GROUPS:
        rest = blocks[field][..., None, part] * powers(n)  # modulo 256
        front = rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
        digits.append(front.reshape(*blocks.shape, n * rest.shape[-1]))
    return np.concatenate(digits, axis=-1)


def write(out: Blocks, found: Rounded) -> None:
    """The same, into blocks."""
    first = 0
    for field, part, n in GROUPS:
        width = part.stop - part.start
        digits = found.q[:, first : first + n * width].reshape(-1, n, width)
        first += n * width
        number = (digits * powers(5)[::-1][:n].astype(np.uint16)).sum(axis=-2)
        # Rounded up, so that multiplying with 3^i never falls just short of a digit.
        out[field][..., part] = (number * 256 + 242) // 243


def front(k: Builder, v: Val) -> Val:
    """The first digit of each byte: ``v * 3 >> 8``, which bytes cannot hold, by its two steps."""
    one, two = k.const(1, v.ty), k.const(2, v.ty)
    return k.select(v > 170, two, k.select(v > 85, one, k.zero(v.ty)))


def unpack(k: Builder, field: Field) -> list[Val]:
    """Codes 0..2, in order."""
    qs, qh = field("qs"), field("qh")
    large, small = (k.shuffle(qs, qs, range(*at)) for at in ((0, 32), (32, 48)))
    large, small = (k.concat(v, v * 3) for v in (large, small))
    large_9, small_9 = large * 9, small * 9
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


CODES = Codes(unpack, 1, 2, run=64, order=((0,), (1,), (2,), (3,)), scales=shared(8))
TQ1_0 = Format(
    "TQ1_0", 34, 256, LAYOUT, with_scale(read, 1), searched(LAYOUT, ternary, write), "q8", CODES
)
