"""KV-cache pages: their layout, and the formats of keys and values.

A page has room for PAGE tokens in every layer of its pool. For each layer and each key/value head
it keeps the keys transposed, ``[head_dim, PAGE]``, so that attention multiplies a vector of keys by
one value of the query without sums across lanes; then the values ``[PAGE, head_dim_v]``. ``q8_0``
and ``q4_0`` have f32 scales per token and 32 dims after each. A byte of ``q4_0`` has two of these
dims, 16 apart. Its keys, values and queries are first rotated by a Hadamard matrix
(``hadamard.py``): scores do not change, and no dim is an outlier. Latent attention stores no
values: they are the keys' first dims, which are rotated separately from the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.errors import UnsupportedError
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f16, f32, i8, i32, u8, u16, u32
from treadle.kernels.activation_layout import BLOCK, to_bf16_bits
from treadle.kernels.attention.records import PAGE
from treadle.kernels.spec import Spec

HALF = BLOCK // 2


@dataclass(frozen=True)
class KVFormat:
    """A storage format of keys and values. ``load(k, isa, p, n)`` returns ``f32 * n`` (codes, if
    scaled); for ``packed`` formats it takes those ``shift`` bits up in each byte. ``narrow`` is the
    inverse.
    """

    name: str
    n_bytes: int  # bytes of a value, or of two if packed
    scaled: bool
    load: Callable[..., Val]
    narrow: Callable[[Builder, Isa, Val], Val]
    to_numpy: Callable[[np.ndarray], np.ndarray]  # bytes to float64 values or codes
    from_numpy: Callable[[np.ndarray], np.ndarray]
    packed: bool = False  # a byte has the dims i and i + HALF of a block
    rotated: bool = False

    @property
    def halves(self) -> range:
        """Bit positions of the dims in a byte."""
        return range(0, 8, 4) if self.packed else range(1)

    @property
    def run(self) -> int:
        """Dims of a block that are contiguous in memory."""
        return HALF if self.packed else BLOCK


F16_KV = KVFormat(
    "f16",
    2,
    False,
    lambda k, isa, p, n: isa.widen_f16(k, k.load(p, f16 * n)),
    # Clamped: an infinity in the cache would turn every masked key (0 * inf) into NaN.
    lambda k, isa, x: isa.narrow_f16(k, k.max(k.min(x, 65504.0), -65504.0)),
    lambda b: b.view(np.float16).astype(np.float64),
    lambda x: np.clip(x, -65504, 65504).astype(np.float16).view(np.uint8),
)
BF16_KV = KVFormat(
    "bf16",
    2,
    False,
    lambda k, isa, p, n: (k.load(p, u16 * n).to(u32) << 16).bits(f32 * n),
    lambda k, isa, x: isa.narrow_bf16(k, x),
    lambda b: (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    lambda x: to_bf16_bits(x).view(np.uint8),
)
F32_KV = KVFormat(
    "f32",
    4,
    False,
    lambda k, isa, p, n: k.load(p, f32 * n),
    lambda k, isa, x: x,
    lambda b: b.view(np.float32).astype(np.float64),
    lambda x: x.astype(np.float32).view(np.uint8),
)
Q8_0_KV = KVFormat(
    "q8_0",
    1,
    True,
    lambda k, isa, p, n: k.load(p, i8 * n).to(f32),
    lambda k, isa, x: k.round(x).to(i32).to(i8),
    lambda b: b.view(np.int8).astype(np.float64),
    lambda x: np.rint(x).astype(np.int8).view(np.uint8),
)


def _load_q4(k: Builder, isa: Isa, p: Val, n: int, shift: Val | int = 0) -> Val:
    codes = k.load(p, u8 * n).to(u32)
    if not isinstance(shift, int) or shift:
        codes = codes >> (shift if isinstance(shift, int) else k.splat(shift.to(u32), codes.ty))
    return (codes & 15).to(i32).to(f32) - 8.0


def _narrow_q4(k: Builder, isa: Isa, x: Val) -> Val:
    low, high = k.split(k.min(k.round(x) + 8.0, 15.0).to(i32), HALF)
    return (low | (high << 4)).to(i8)


def _codes_q4(x: np.ndarray) -> np.ndarray:
    codes = np.minimum(np.rint(x) + 8, 15).astype(np.uint8).reshape(-1, 2, HALF)
    return np.asarray((codes[:, 0] | (codes[:, 1] << 4)).reshape(-1))


Q4_0_KV = KVFormat(
    "q4_0",
    1,
    True,
    _load_q4,
    _narrow_q4,
    lambda b: np.stack([b.reshape(-1, HALF) & 15, b.reshape(-1, HALF) >> 4], 1).ravel() - 8.0,
    _codes_q4,
    packed=True,
    rotated=True,
)
KV_FORMATS = {row.name: row for row in (F16_KV, BF16_KV, F32_KV, Q8_0_KV, Q4_0_KV)}


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets inside one layer's part of a page."""

    kv: str
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    latent: bool = False  # a value is its key's first dims, not stored separately

    def __post_init__(self) -> None:
        if self.kv not in KV_FORMATS:
            raise UnsupportedError(
                f"unknown KV format {self.kv!r}; choose one of {', '.join(KV_FORMATS)}"
            )
        for dims in (self.head_dim, self.head_dim_v):
            if self.fmt.scaled and dims % BLOCK:
                *others, last = (row.name for row in KV_FORMATS.values() if not row.scaled)
                raise UnsupportedError(
                    f"KV format {self.kv} needs head dims that are a multiple of {BLOCK}, but this "
                    f"model has {dims}; use {', '.join(others)} or {last}"
                )

    @property
    def fmt(self) -> KVFormat:
        return KV_FORMATS[self.kv]

    def codes_bytes(self, dims: int) -> int:
        """Return the bytes of a page's keys or values of ``dims`` dims, without the scales after
        them.
        """
        return PAGE * dims * self.fmt.n_bytes // len(self.fmt.halves)

    def part_bytes(self, dims: int) -> int:
        """Return the same with scales."""
        return self.codes_bytes(dims) + (PAGE * dims // BLOCK * 4 if self.fmt.scaled else 0)

    @property
    def v_off(self) -> int:
        """Byte offset of a head's values."""
        return self.part_bytes(self.head_dim)

    @property
    def head_bytes(self) -> int:
        return self.v_off + (0 if self.latent else self.part_bytes(self.head_dim_v))

    @property
    def layer_bytes(self) -> int:
        return self.n_head_kv * self.head_bytes

    def blank(self, page: np.ndarray, n: int) -> None:
        """Zero the tokens from ``n`` on of one page ``[page_bytes]``, in every layer."""
        for part in self._by_token(page.reshape(-1, self.head_bytes)):
            part[:, n:] = 0

    # -- numpy's view ---------------------------------------------------------------------------

    def head_ref(
        self, pool: np.ndarray, page: int, page_bytes: int, layer_off: int, head: int
    ) -> np.ndarray:
        """Return the bytes of one head in one page."""
        start = page * page_bytes + layer_off + head * self.head_bytes
        return pool[start : start + self.head_bytes]

    def _by_token(self, heads: np.ndarray) -> list[np.ndarray]:
        """Return views ``[.., PAGE, n, bytes]`` of heads' bytes ``[.., head_bytes]``: codes and
        scales of keys, then of values.
        """
        codes = self.codes_bytes
        size = self.fmt.n_bytes
        lead = heads.shape[:-1]
        ends = codes(self.head_dim), self.v_off, self.v_off + codes(self.head_dim_v)
        parts = list(zip(np.split(heads, ends, -1), (size, 4, size, 4), strict=True))
        made = [part.reshape(*lead, -1, PAGE, n).swapaxes(-3, -2) for part, n in parts[:2]]
        return made + [part.reshape(*lead, PAGE, -1, n) for part, n in parts[2:]]

    def read_ref(self, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of one head, float64 ``[PAGE, dims]`` each."""
        out = []
        parts = [np.ascontiguousarray(part).reshape(-1) for part in self._by_token(head)]
        for codes, scales in (parts[:2], parts[2:]):
            x = self.fmt.to_numpy(codes)
            if self.fmt.scaled:
                x = x.reshape(-1, BLOCK) * scales.view(np.float32).astype(np.float64)[:, None]
            out.append(x.reshape(PAGE, -1))
        return out[0], out[0][:, : self.head_dim_v] if self.latent else out[1]

    def write_ref(self, head: np.ndarray, place: int, key: np.ndarray, value: np.ndarray) -> None:
        """Write one token's key ``[head_dim]`` and value ``[head_dim_v]``. The value is ignored for
        latent attention.
        """
        parts = [part[place] for part in self._by_token(head)]
        both = ((key, *parts[:2]), (value, *parts[2:]))
        for given, codes, scales in both[: 1 if self.latent else 2]:
            x = given.astype(np.float32)
            if self.fmt.scaled:
                blocks = x.reshape(-1, BLOCK)
                d = np.abs(blocks).max(-1) * np.float32(1 / 127)
                if self.fmt.packed:  # the largest gets code -8: there is no +8
                    top = blocks.max(-1)
                    low = blocks.min(-1)
                    d = np.where(top > -low, top, low) * np.float32(-1 / 8)
                inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
                x = (blocks * inverse[:, None]).reshape(-1)
                scales[:] = d[:, None].view(np.uint8)
            codes[:] = self.fmt.from_numpy(x).reshape(codes.shape)


class PagedKernel(Spec):
    """Base of kernels that read or write pages."""

    kv: str
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    latent = False  # see PageLayout

    def __post_init__(self) -> None:
        """Set ``head_dim_v`` to 0 if it equals ``head_dim``, so that one kernel has one name."""
        super().__post_init__()
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", 0)

    @property
    def dims_v(self) -> int:
        """Dims of a value."""
        return self.head_dim_v or self.head_dim

    @property
    def page(self) -> PageLayout:
        return PageLayout(self.kv, self.n_head_kv, self.head_dim, self.dims_v, self.latent)
