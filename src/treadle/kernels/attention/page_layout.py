"""KV-cache pages: their layout, and the formats of keys and values.

A page has room for PAGE tokens in every layer of its pool. For each layer and each key/value head
it keeps the keys transposed, ``[head_dim, PAGE]``, so that attention multiplies a vector of keys by
one value of the query without sums across lanes; then the values ``[PAGE, head_dim_v]``. Keys and
values may have different formats.

A quantised side has its codes first, then an f32 scale for every 32 dims of a token; ``q5_1`` has
minimums after the scales. ``q4_0``, ``iq4_nl``, ``q5_0`` and ``q5_1`` pack two dims, 16 apart, into
a byte; for 5 bits, words with the fifth bits of 32 dims follow the codes. Sides of these four
formats are first rotated by a Hadamard matrix (``hadamard.py``), queries as well as keys: scores do
not change, and outliers are spread over the head. Latent attention stores no values: they are the
keys' first dims, which are rotated separately from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import cached_property, dataclass
from treadle.jit.types import f16, f32, i8, i32, u8, u16, u32
from treadle.kernels.page_sizes import BLOCK, KV_SIZES, KVSizes, PageSizes, kv_sizes
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Spec, widest

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Isa, Val

HALF = BLOCK // 2


@dataclass(frozen=True, kw_only=True)
class KVFormat(KVSizes):
    """A storage format of keys or values, with the code that reads and writes it.

    ``load(k, isa, p, n)`` returns ``f32 * n`` from address ``p``: values, or codes if ``scaled``.
    Of ``packed`` formats it also takes ``shift``, the bit position in each byte, and with ``fifth``
    the fifth bits, ``u32 * n``. ``narrow(k, isa, x)`` is the inverse: it returns the stored form of
    ``x``; packed formats return a block's codes, ``i32 * BLOCK``. ``rotated``: heads are rotated by
    a Hadamard matrix before they are stored.
    """

    load: Callable[..., Val]
    narrow: Callable[[Builder, Isa, Val], Val]
    # Bytes, or a packed format's codes, to float64, and back.
    to_numpy: Callable[[np.ndarray], np.ndarray]
    from_numpy: Callable[[np.ndarray], np.ndarray]
    rotated: bool = False
    most: float = 127.0  # the scale is the block's extreme over this; negative: it keeps its sign

    @property
    def halves(self) -> range:
        """Bit positions in a byte at which a packed dim begins: 0 and 4, or only 0."""
        return range(0, 8, 4) if self.packed else range(1)

    @property
    def run(self) -> int:
        """Consecutive dims of a block whose codes are consecutive bytes: half a block if packed,
        else all of it.
        """
        return HALF if self.packed else BLOCK

    def scale_ref(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the scale and the minimum (0 if the format has none), f32 ``[n]`` each, of blocks
        f32 ``[n, BLOCK]``.
        """
        top = blocks.max(-1)
        low = blocks.min(-1)
        if self.minimum:
            return (top - low) * np.float32(1 / self.most), low
        extreme = np.abs(blocks).max(-1)
        if self.most < 0:
            extreme = np.where(top > -low, top, low)
        return extreme * np.float32(1 / self.most), np.zeros_like(low)


def _bf16_bytes(x: np.ndarray) -> np.ndarray:
    from treadle.kernels.activation_layout import to_bf16_bits  # rarely needed

    return to_bf16_bits(x).view(np.uint8)


def _format(
    name: str,
    load: Callable[..., Val],
    narrow: Callable[[Builder, Isa, Val], Val],
    to_numpy: Callable[[np.ndarray], np.ndarray],
    from_numpy: Callable[[np.ndarray], np.ndarray],
    *,
    rotated: bool = False,
    most: float = 127.0,
) -> KVFormat:
    """Return the format with the sizes of ``name`` and these other fields."""
    return KVFormat(
        **vars(KV_SIZES[name]),
        load=load,
        narrow=narrow,
        to_numpy=to_numpy,
        from_numpy=from_numpy,
        rotated=rotated,
        most=most,
    )


F16_KV = _format(
    "f16",
    lambda k, isa, p, n: isa.widen_f16(k, k.load(p, f16 * n)),
    # Clamped: an infinity in the cache would turn every masked key (0 * inf) into NaN.
    lambda k, isa, x: isa.narrow_f16(k, k.max(k.min(x, 65504.0), -65504.0)),
    lambda b: b.view(np.float16).astype(np.float64),
    lambda x: np.clip(x, -65504, 65504).astype(np.float16).view(np.uint8),
)
BF16_KV = _format(
    "bf16",
    lambda k, isa, p, n: (k.load(p, u16 * n).to(u32) << 16).bits(f32 * n),
    lambda k, isa, x: isa.narrow_bf16(k, x),
    lambda b: (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    _bf16_bytes,
)
F32_KV = _format(
    "f32",
    lambda k, isa, p, n: k.load(p, f32 * n),
    lambda k, isa, x: x,
    lambda b: b.view(np.float32).astype(np.float64),
    lambda x: x.astype(np.float32).view(np.uint8),
)
Q8_0_KV = _format(
    "q8_0",
    lambda k, isa, p, n: k.load(p, i8 * n).to(f32),
    lambda k, isa, x: k.round(x).to(i32).to(i8),
    lambda b: b.view(np.int8).astype(np.float64),
    lambda x: np.rint(x).astype(np.int8).view(np.uint8),
)


def _nibbles(k: Builder, p: Val, n: int, shift: Val | int) -> Val:
    codes = k.load(p, u8 * n).to(u32)
    if not isinstance(shift, int) or shift:
        codes = codes >> (shift if isinstance(shift, int) else k.splat(shift.to(u32), codes.ty))
    return codes & 15


def _load_q4(k: Builder, isa: Isa, p: Val, n: int, shift: Val | int = 0) -> Val:
    return _nibbles(k, p, n, shift).to(i32).to(f32) - 8.0


def _load_q5(k: Builder, isa: Isa, p: Val, n: int, shift: Val | int, fifth: Val) -> Val:
    return (_nibbles(k, p, n, shift) | (fifth << 4)).to(i32).to(f32)


def _steps() -> np.ndarray:
    """Return the values of IQ4_NL's 16 codes, f32 [16]."""
    from treadle.formats.iq4 import STEPS  # rarely needed

    return STEPS


def _load_nl(k: Builder, isa: Isa, p: Val, n: int, shift: Val | int = 0) -> Val:
    table = [128 + int(v) for v in _steps()]
    codes = _nibbles(k, p, n, shift).to(u8)
    wide = codes if n >= 16 else k.shuffle(codes, codes, [i % n for i in range(16)])
    found = k.lookup(table, wide)
    found = found if n >= 16 else k.shuffle(found, found, range(n))
    return found.to(i32).to(f32) - 128.0


def _nearest_nl(k: Builder, isa: Isa, x: Val) -> Val:
    """Return the IQ4_NL code nearest to each ``x``, i32: the number of midpoints between values
    that ``x`` exceeds.
    """
    code = k.zero(i32.like(x.ty))
    one = k.const(1, code.ty)
    for middle in _middles():
        code = code + k.select(x > middle, one, k.zero(code.ty))
    return code


def _middles() -> list[float]:
    steps = _steps()
    return [float(middle) for middle in (steps[1:] + steps[:-1]) / 2]


Q4_0_KV = _format(
    "q4_0",
    _load_q4,
    lambda k, isa, x: k.min(k.round(x) + 8.0, 15.0).to(i32),
    lambda codes: codes - 8.0,
    lambda x: np.minimum(np.rint(x) + 8, 15),
    rotated=True,
    most=-8.0,  # the largest magnitude gets code -8: there is no +8
)
IQ4_NL_KV = _format(
    "iq4_nl",
    _load_nl,
    _nearest_nl,
    lambda codes: _steps().astype(np.float64)[codes],
    lambda x: np.searchsorted(_middles(), x),
    rotated=True,
    most=-127.0,
)
Q5_0_KV = _format(
    "q5_0",
    lambda *given: _load_q5(*given) - 16.0,
    lambda k, isa, x: k.min(k.round(x) + 16.0, 31.0).to(i32),
    lambda codes: codes - 16.0,
    lambda x: np.minimum(np.rint(x) + 16, 31),
    rotated=True,
    most=-16.0,
)
Q5_1_KV = _format(
    "q5_1",
    _load_q5,
    lambda k, isa, x: k.round(x).to(i32),
    lambda codes: codes.astype(np.float64),
    np.rint,
    rotated=True,
    most=31.0,
)
KV_FORMATS = {
    row.name: row
    for row in (
        F16_KV,
        BF16_KV,
        F32_KV,
        Q8_0_KV,
        Q5_1_KV,
        Q5_0_KV,
        IQ4_NL_KV,
        Q4_0_KV,
    )
}


def kv_formats(kv: str) -> tuple[KVFormat, KVFormat]:
    """Return the formats of keys and of values that ``kv`` names: one name, or ``KEYS-VALUES``.
    Raises UnsupportedError for an unknown name.
    """
    keys, values = kv_sizes(kv)
    return KV_FORMATS[keys.name], KV_FORMATS[values.name]


@dataclass(frozen=True)
class PageSide:
    """A head's keys or its values within a page: ``[dims, PAGE]`` if ``transposed``, else ``[rows,
    dims]``. Methods take ``home``, the address of this side in the page.
    """

    fmt: KVFormat
    dims: int
    transposed: bool
    rows: int = PAGE  # of a page; others than PAGE only where they are not transposed

    @property
    def codes_bytes(self) -> int:
        """Bytes of all codes, which come first in a side."""
        return self.offsets[1]

    @property
    def offsets(self) -> list[int]:
        """Byte offset of each of the side's arrays (``KVFormat.parts``), then that of the side's
        end.
        """
        return self.fmt.offsets(self.dims, self.rows)

    @property
    def n_bytes(self) -> int:
        return self.offsets[-1]

    @property
    def scales_at(self) -> int:
        """Byte offset of the scales in the side."""
        return self.offsets[2 if self.fmt.fifth else 1]

    @property
    def minimums_at(self) -> int:
        """Byte offset of the minimums in the side."""
        return self.offsets[-2]

    def scale_place(self, block: Val, token: Val) -> Val:
        """Return the byte offset, within the array of scales, of the scale of a token's
        ``block``-th 32 dims.
        """
        if self.transposed:
            return (block * PAGE + token) * 4
        return (token * (self.dims // BLOCK) + block) * 4

    def load_keys(
        self, k: Builder, home: Val, row: Val, c: int, n: int, half: Val | int = 0
    ) -> Val:
        """Return dim ``row`` of the ``n`` keys from key ``c`` on, f32, without their scales, of a
        transposed side. ``home``: the side's address in its page. With packed formats ``row`` is a
        row of bytes, and ``half`` the bit position of the dim.
        """
        fmt = self.fmt
        place = home + (row * PAGE + c) * fmt.n_bytes
        if not fmt.packed:
            return fmt.load(k, k.isa, place, n)
        if not fmt.fifth:
            return fmt.load(k, k.isa, place, n, half)
        within = row % HALF + half * (HALF // 4)  # 4 bits up: HALF dims further on
        byte = row // HALF * (BLOCK // 8) + within // 8
        bits = k.load(home + (byte * PAGE + c), u8 * n, offset=self.offsets[1]).to(u32)
        bits = (bits >> k.splat((within % 8).to(u32), bits.ty)) & 1
        return fmt.load(k, k.isa, place, n, half, bits)

    def load_values(self, k: Builder, home: Val, token: Val, start: Val, n: int) -> Val:
        """Return ``n`` dims of a token's value from dim ``start`` on, f32, scaled. With a scaled
        format they must lie in one ``KVFormat.run`` of a block.
        """
        fmt = self.fmt
        ty = f32 * n
        if not fmt.scaled:
            return fmt.load(k, k.isa, home + (token * self.dims + start) * fmt.n_bytes, n)
        block = start // BLOCK
        if fmt.packed:
            at = token * (self.dims // 2) + block * HALF + start % HALF
            more = [start % BLOCK // HALF * 4]
            if fmt.fifth:
                word = home + (token * (self.dims // 8) + block * 4)
                bits = k.splat(k.load(word, u32, offset=self.offsets[1], align=4), u32 * n)
                first = k.splat((start % BLOCK).to(u32), bits.ty)
                more.append((bits >> (first + k.const(range(n), bits.ty))) & 1)
            v = fmt.load(k, k.isa, home + at, n, *more)
        else:
            v = fmt.load(k, k.isa, home + (token * self.dims + start) * fmt.n_bytes, n)
        place = home + self.scale_place(block, token)
        v = v * k.splat(k.load(place, f32, offset=self.scales_at), ty)
        if fmt.minimum:
            v = v + k.splat(k.load(place, f32, offset=self.minimums_at), ty)
        return v

    def store(self, k: Builder, x: Val, home: Val, place: Val) -> None:
        """Quantise or narrow f32 ``[dims]`` at ``x``, and store it as the page's
        token ``place``.
        """
        fmt = self.fmt
        dims = self.dims
        width = BLOCK if fmt.scaled else widest(2 * k.isa.lanes, dims)
        with k.loop(dims // width) as b:
            v = k.load(x, f32 * width, offset=b * (4 * width))
            if fmt.scaled:
                d, inverse, m = self._scale(k, v)
                if m is not None:
                    v = v - k.splat(m, v.ty)
                    at = home + self.scale_place(b, place)
                    k.store(at, m, offset=self.minimums_at)
                v = v * k.splat(inverse, v.ty)
                k.store(home + self.scale_place(b, place), d, offset=self.scales_at)
            codes = fmt.narrow(k, k.isa, v)
            if fmt.packed:
                self._store_packed(k, home, place, b, codes)
            else:
                self._store_part(k, home, place, b, codes, fmt.n_bytes)

    def _store_packed(self, k: Builder, home: Val, place: Val, b: Val, codes: Val) -> None:
        """Store ``codes``, ``i32 * BLOCK``, as the packed ``b``-th block of token ``place``."""
        low, high = k.split(codes & 15, HALF)
        self._store_part(k, home, place, b, (low | (high << 4)).to(i8), 1)
        if self.fmt.fifth:
            bits = (codes >> 4) << k.const([i % 8 for i in range(BLOCK)], codes.ty)
            for _ in range(3):
                even, odd = k.evens(bits, 1)
                bits = even | odd
            self._store_part(k, home + self.offsets[1], place, b, bits.to(i8), 1)

    def _scale(self, k: Builder, v: Val) -> tuple[Val, Val, Val | None]:
        """Return the scale of a block ``v`` (``f32 * BLOCK``), its inverse (0 for a zero scale),
        and the minimum or None.
        """
        fmt = self.fmt
        none = k.const(0.0, f32)
        if fmt.minimum:
            low = k.reduce(v, k.min)
            d = (k.reduce(v, k.max) - low) * (1 / fmt.most)
            return d, k.select(d > 1e-38, 1.0 / d, none), low
        if fmt.most < 0:
            top = k.reduce(v, k.max)
            low = k.reduce(v, k.min)
            d = k.select(top > -low, top, low) * (1 / fmt.most)
            return d, k.select(k.abs(d) > 1e-38, 1.0 / d, none), None
        d = k.reduce(k.abs(v), k.max) * (1 / fmt.most)
        return d, k.select(d > 0.0, 1.0 / k.max(d, 1e-38), none), None

    def _store_part(
        self, k: Builder, home: Val, place: Val, b: Val, pieces: Val, n_bytes: int
    ) -> None:
        """Store the elements ``pieces`` (``n_bytes`` each) of the ``b``-th block of token ``place``
        in the side's array at ``home``.
        """
        n = pieces.ty.lanes
        if self.transposed:
            to = home + (b * (n * PAGE) + place) * n_bytes
            for lane in range(n):
                k.store(to, k.extract(pieces, lane), offset=lane * PAGE * n_bytes)
            return
        width = BLOCK if self.fmt.scaled else n
        row = self.dims // width * n
        k.store(home, pieces, offset=(place * row + b * n) * n_bytes)

    # -- numpy's view ---------------------------------------------------------------------------

    def by_token(self, side: np.ndarray) -> list[np.ndarray]:
        """Return a view ``[.., rows, n, bytes]`` of each array (``KVFormat.parts``) of ``side``,
        the side's bytes ``[.., n_bytes]``.
        """
        lead = side.shape[:-1]
        made = []
        sizes = [size for _, size in self.fmt.parts(self.dims)]
        for part, size in zip(np.split(side, self.offsets[1:-1], -1), sizes, strict=True):
            if self.transposed:
                made.append(part.reshape(*lead, -1, PAGE, size).swapaxes(-3, -2))
            else:
                made.append(part.reshape(*lead, self.rows, -1, size))
        return made

    def read_ref(self, side: np.ndarray) -> np.ndarray:
        """Return the values of one head's side, float64 ``[rows, dims]``."""
        fmt = self.fmt
        parts = [np.ascontiguousarray(part).reshape(-1) for part in self.by_token(side)]
        if not fmt.packed:
            x = fmt.to_numpy(parts[0])
        else:
            packed = parts[0].reshape(-1, HALF)
            codes = np.concatenate([packed & 15, packed >> 4], 1)
            if fmt.fifth:
                bits = np.unpackbits(parts[1], bitorder="little").reshape(codes.shape)
                codes = codes | bits << 4
            x = fmt.to_numpy(codes).reshape(-1)
        if fmt.scaled:
            scales, *m = (
                part.view(np.float32).astype(np.float64)[:, None] for part in parts[1 + fmt.fifth :]
            )
            x = x.reshape(-1, BLOCK) * scales
            x = x + m[0] if m else x
        return np.asarray(x.reshape(self.rows, -1))

    def write_ref(self, side: np.ndarray, place: int, given: np.ndarray) -> None:
        """Write one token's values ``given [dims]`` into ``side``, the side's bytes, as token
        ``place``.
        """
        fmt = self.fmt
        parts = [part[place] for part in self.by_token(side)]
        x = given.astype(np.float32)
        if fmt.scaled:
            blocks = x.reshape(-1, BLOCK)
            d, m = fmt.scale_ref(blocks)
            inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
            x = ((blocks - m[:, None]) * inverse[:, None]).reshape(-1)
            numbers = parts[1 + fmt.fifth :]
            for part, number in zip(numbers, (d, m), strict=False):
                part[:] = number.astype(np.float32)[:, None].view(np.uint8)
        made = fmt.from_numpy(x)
        if fmt.packed:
            codes = made.astype(np.uint8).reshape(-1, 2, HALF)
            if fmt.fifth:
                bits = np.packbits(codes.reshape(-1) >> 4, bitorder="little")
                parts[1][:] = bits.reshape(parts[1].shape)
            made = codes[:, 0] & 15 | (codes[:, 1] & 15) << 4
        parts[0][:] = made.reshape(parts[0].shape)


class PageLayout(PageSizes):
    """Layout of one layer's part of a page: byte offsets of its heads, and of their keys and
    values.
    """

    @cached_property
    def keys(self) -> PageSide:
        fmt = kv_formats(self.kv)[0]
        if self.rows:
            return PageSide(fmt, self.head_dim, transposed=False, rows=self.rows)
        return PageSide(fmt, self.head_dim, transposed=True)

    @cached_property
    def values(self) -> PageSide:
        """The side of the values; with ``latent`` that of the keys, whose first dims are the
        values.
        """
        if self.latent:
            return self.keys
        return PageSide(kv_formats(self.kv)[1], self.head_dim_v, transposed=False)

    def blank(self, page: np.ndarray, n: int) -> None:
        """Zero the tokens from place ``n`` on of one page ``[page_bytes]``, in all layers."""
        for side, given in self._sides(page.reshape(-1, self.head_bytes)):
            first = n // (PAGE // side.rows)
            for part in side.by_token(given):
                part[:, first:] = 0

    # -- numpy's view ---------------------------------------------------------------------------

    def head_ref(
        self, pool: np.ndarray, page: int, page_bytes: int, layer_off: int, head: int
    ) -> np.ndarray:
        """Return a view of the bytes of one head in page number ``page``, ``[head_bytes]``.
        ``pool``: the bytes of all pages; ``page_bytes``: of a page; ``layer_off``: byte offset of
        the layer in a page.
        """
        start = page * page_bytes + layer_off + head * self.head_bytes
        return pool[start : start + self.head_bytes]

    def _sides(self, heads: np.ndarray) -> list[tuple[PageSide, np.ndarray]]:
        """Return each side, keys and values (keys alone if ``latent``), with a view of its bytes in
        ``heads [.., head_bytes]``.
        """
        keys = self.keys, heads[..., : self.v_off]
        return [keys] if self.latent else [keys, (self.values, heads[..., self.v_off :])]

    def read_ref(self, head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys ``[rows, head_dim]`` and values ``[rows, head_dim_v]`` of one head's bytes,
        float64; rows are PAGE tokens unless the layout has ``rows``.
        """
        out = [side.read_ref(given) for side, given in self._sides(head)]
        return out[0], out[0][:, : self.head_dim_v] if self.latent else out[1]

    def write_ref(self, head: np.ndarray, place: int, key: np.ndarray, value: np.ndarray) -> None:
        """Write one token's key ``[head_dim]`` and value ``[head_dim_v]`` into ``head``, the bytes
        of one head in a page, as token ``place``. With ``latent`` the value is ignored.
        """
        for (side, given), x in zip(self._sides(head), (key, value), strict=False):
            side.write_ref(given, place, x)


class PagedKernel(Spec):
    """Base of kernels that read or write the KV cache's pages."""

    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    latent = False  # see PageLayout

    def __post_init__(self) -> None:
        """Set ``head_dim_v`` to 0 if it equals ``head_dim``, so that equal kernels have equal
        names.
        """
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
