"""Layout of activations as a matrix product reads them: rows of one ``kind``, ``group`` tokens
interleaved.

The unit along K is a *dword*: 4 bytes holding 4 int8 (``q8``), 2 bf16 or 1 f32. In ``bf16x2`` a
value is two bf16, ``high = bf16(x)`` and ``low = bf16(x - high)``, 16 bits together: every 32
values are the 16 dwords of their high parts, then those of their low parts. ``bf16x3`` adds a third
part, the bf16 of the remainder, and keeps all 24 bits of an f32. A group of g tokens is stored as
``[KD, g]`` dwords, so that the tile loop reads one dword of each token from adjacent addresses; g =
1 is plain row-major. KD, KB and KS are a row's numbers of dwords, scales and compensations. For
products of two tokens by eight values each (``Isa.pairs``), ``unit`` is 8: two dwords of a token
are adjacent.

``q8`` quantises every 32 values to -127..127 with an f32 scale ``d``, stored as ``[KB, g]`` after
the dwords. Then for every ``sub`` values comes the compensation of the weights' zero point, ``comp
= MAGIC_BITS - 128 * sum of the quants`` as i32 ``[KS, g]``. If a weight's code is its value + 128,
an accumulator that starts at ``comp`` ends as MAGIC_BITS + the true dot product, which are the bits
of the float MAGIC + dot.

``q8x2`` has two int8 a value, ``x = d * (128 * high + low)``, 15 bits together, for products of
bytes with a hundredth of the rounding error of ``q8``. A row is the dwords of all high parts, then
those of all low parts; scales and compensations are as those of ``q8``.

``q16`` quantises every 256 values (a *span*) to -2895..2895, two i16 (*words*) a dword, with an f32
scale, stored as ``[KB, g]`` after the dwords. Panels of weights have a scale for each span, too.
``q16n`` has the same layout, but the 256 values are a vector of Euclidean length 46320 at most, so
that (Cauchy and Schwarz) a sum of products with another such vector is below 2**31 whatever the
values. Words are then two to sixteen times as large, in most rows three to four times, and as
precise as f16.

``q16x2`` quantises every 256 values to -32512..32512, with an f32 scale, as two int8 each, ``x = d
* (256 * high + low)``, for matrix registers that multiply bytes. Every 64 values are the 16 dwords
of their high parts, then those of their low parts; the scales are stored as those of ``q16``.
Products of two low parts are left out: the error is as large as that of f16 activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i8, i16, i32, i64, u16, u32
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Grid
from treadle.kernels.transpose import transpose

DWORD = 4  # bytes, or codes, in a dword
BLOCK = 32  # values that share a q8 scale
BYTES = {"q8": 1, "q8x2": 2}  # int8 parts of a value
LOW_BITS = 7  # of a q8x2 value: low is -64..63, so that high is -127..127
BYTE_TOP = {"q8": 127, "q8x2": 127 << LOW_BITS}  # the largest value of a block
SPAN = 256  # values that share a q16 scale; a row's last span may be shorter
# Dwords of a block.
DWORDS = {
    "q8": 8,
    "q8x2": 16,
    "q16": 16,
    "q16n": 16,
    "q16x2": 16,
    "bf16": 16,
    "bf16x2": 32,
    "bf16x3": 48,
    "f32": 32,
}
NARROW = {"bf16": 1, "bf16x2": 2, "bf16x3": 3}  # bf16 parts of a value
N_PRODUCTS = {"bf16x2": 3, "bf16x3": 6}  # products of parts for one product of values
TOGETHER = 16  # tokens of an unscaled group that are written at once
# 1.5 * 2**23. Floats of this size are whole numbers, so adding an integer of up to 22 bits to the
# bits adds it to the value. MAGIC times a scale of up to 22 bits is exact.
MAGIC = 12582912.0
MAGIC_BITS = 0x4B400000
OFFSET = 128  # zero point of the codes that ``comp`` is for
# The largest q16 value of activations and of weights: SPAN products of two such values always sum
# to less than 2**31.
WORD_TOP = 2895
# The same for q16n: the Euclidean length of SPAN values. Rounding adds half to each value, 8 to the
# length, and 46328**2 < 2**31. No value exceeds WORD_MOST.
WORD_LENGTH = 46320
WORD_MOST = 32767
WORDS = ("q16", "q16n")
SPANNED = (*WORDS, "q16x2")  # kinds with a scale for each span
# The largest q16x2 value: its high part is at most 127, its low part -128..127.
BYTES_TOP = 127 << 8
PAIR = 64  # values of q16x2 whose high parts are together, and their low parts
STEP_BITS = 10  # fraction bits of the words for one step of a weight's code
LEAST = 1e-34  # lower bound of a span's largest value: below it all count as zero
LEAST_LENGTH = 1e-15  # lower bound of its length: squares of smaller numbers lose their bits


@dataclass(frozen=True)
class ActivationLayout:
    """Layout of an activation buffer for rows of ``k`` values; ``group`` tokens are interleaved."""

    kind: str  # one of DWORDS
    k: int
    group: int = 1  # tokens that are interleaved; 1: rows one after another
    sub: int = BLOCK  # values that share a compensation: 16 or 32
    unit: int = DWORD  # bytes of a token that are adjacent in a group: 4, or 8 for some q8

    @property
    def kd(self) -> int:
        """Dwords of a row; rows are padded with zeros to whole blocks of 32 values (``q16x2``: of
        64).
        """
        if self.kind == "q16x2":
            return -(-self.k // PAIR) * (2 * DWORDS[self.kind])
        return -(-self.k // BLOCK) * DWORDS[self.kind]

    @property
    def kb(self) -> int:
        """Scales of a row: one for each block of 32 values (``q8``, ``q8x2``), one for each span of
        256 (``q16``, ``q16n``, ``q16x2``), else 0.
        """
        share = BLOCK if self.kind in BYTES else SPAN if self.kind in SPANNED else 0
        return -(-self.k // share) if share else 0

    @property
    def ks(self) -> int:
        """Compensations of a row (``comp``), for ``q8`` and ``q8x2``; else 0."""
        return self.kb * (BLOCK // self.sub) if self.kind in BYTES else 0

    @property
    def row_bytes(self) -> int:
        return round_up(4 * (self.kd + self.kb + self.ks), 64)

    @property
    def group_bytes(self) -> int:
        return self.row_bytes * self.group

    @property
    def d_off(self) -> int:
        """Byte offset of the scales in a group."""
        return 4 * self.kd * self.group

    @property
    def low_off(self) -> int:
        """Byte offset of the low parts of q8x2 in a group."""
        return self.d_off // BYTES["q8x2"]

    @property
    def comp_off(self) -> int:
        return self.d_off + 4 * self.kb * self.group

    @property
    def together(self) -> int:
        """Tokens of a group that ``emit_store`` writes at once, so that stores are
        whole vectors.
        """
        scaled = self.kind in (*BYTES, *WORDS)  # one token's rows are written at a time
        return TOGETHER if not scaled and self.group % TOGETHER == 0 else 1

    @property
    def store_scratch(self) -> int:
        """Bytes of scratch that ``emit_store`` needs."""
        if self.kind in SPANNED:  # values, their largest magnitude, and sum of squares
            return 4 * (SPAN + BLOCK) * self.together
        return 4 * DWORDS[self.kind] * self.together if self.together > 1 else 0

    def n_bytes(self, n_tokens: int) -> int:
        return round_up(n_tokens, self.group) * self.row_bytes

    def grid(self, base: int, count: str) -> Grid:
        """Return the grid of a step that writes this layout: ``base`` items for each ``together``
        tokens, over whole groups. ``count`` names the number of rows, as in ``Grid``.

        The padding tokens of a group are multiplied too, so they must hold ordinary numbers:
        leftovers of another buffer, read as floats, can be denormal and a hundred times slower.
        """
        each = self.group // self.together
        return Grid(base * each, count, self.group, each)

    # -- numpy's view ---------------------------------------------------------------------------

    def write_ref(self, out: np.ndarray, x: np.ndarray) -> None:
        """Write f32 ``x [N, k]`` into the bytes ``out`` in this layout."""
        n = x.shape[0]
        g = self.group
        if not n:
            return
        groups = out[: self.n_bytes(n)].reshape(-1, self.group_bytes)
        values: np.ndarray
        if self.kind in BYTES:
            whole, d = quantize_ref(x, self.kind)
            values = whole.astype(np.int8)
            if self.kind == "q8x2":
                values = np.concatenate(halves_ref(whole), axis=1)
        elif self.kind in WORDS:
            values, d = words_ref(x, self.kind)
            values = values[:, : 2 * self.kd]
        elif self.kind == "q16x2":
            whole, d = words_ref(x, self.kind)
            pairs = np.stack(bytes_ref(whole), axis=1).reshape(n, 2, -1, PAIR).swapaxes(1, 2)
            values = pairs.reshape(n, -1)[:, : 4 * self.kd]
        elif self.kind in NARROW:
            blocks = np.zeros((n, -(-self.k // BLOCK), BLOCK), np.float32)
            blocks.reshape(n, -1)[:, : self.k] = x
            values = np.concatenate(bf16_bits(blocks, NARROW[self.kind]), axis=-1)
        else:
            values = x.astype(np.float32)
        row = np.zeros((groups.shape[0] * g, 4 * self.kd), np.uint8)
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(n, -1)
        row[:n, : raw.shape[1]] = raw
        per = self.unit // DWORD
        dwords = row.view(np.int32).reshape(-1, g, self.kd // per, per).transpose(0, 2, 1, 3)
        groups[:, : self.d_off].view(np.int32)[:] = dwords.reshape(len(groups), -1)
        if self.kb:
            scale = np.zeros((groups.shape[0] * g, self.kb), np.float32)
            total = np.zeros((len(scale), self.ks), np.int32)
            scale[:n] = d
            if self.ks:
                sums = whole.reshape(n, -1, self.sub).sum(-1, dtype=np.int32)
                total[:n] = MAGIC_BITS - OFFSET * sums
            for off, part in ((self.d_off, scale), (self.comp_off, total)):
                part = part.reshape(len(groups), g, -1).transpose(0, 2, 1).reshape(len(groups), -1)
                groups[:, off : off + part.shape[1] * 4] = np.ascontiguousarray(part).view(np.uint8)

    def dwords_ref(self, buffer: np.ndarray, n: int) -> np.ndarray:
        """Return the dwords of the first ``n`` tokens in ``buffer``, i32 ``[n, KD]``."""
        groups = buffer[: self.n_bytes(n)].reshape(-1, self.group_bytes)
        per = self.unit // DWORD
        dwords = np.ascontiguousarray(groups[:, : self.d_off]).view(np.int32)
        dwords = dwords.reshape(-1, self.kd // per, self.group, per).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(dwords).reshape(-1, self.kd)[:n]

    def read_ref(self, buffer: np.ndarray, n: int) -> np.ndarray:
        """Return the values of the first ``n`` tokens in ``buffer``, float64 ``[n, k]``."""
        if not n:
            return np.zeros((0, self.k))
        g = self.group
        groups = buffer[: self.n_bytes(n)].reshape(-1, self.group_bytes)
        rows = self.dwords_ref(buffer, n)
        if self.kind == "f32":
            return rows.view(np.float32)[:, : self.k].astype(np.float64)
        if self.kind in NARROW:
            shape = n, self.kd // DWORDS[self.kind], NARROW[self.kind], BLOCK
            values = from_bf16_bits(rows.view(np.uint16)).reshape(shape).sum(-2)
            return np.asarray(values.reshape(n, shape[1] * BLOCK)[:, : self.k])
        raw = np.ascontiguousarray(groups[:, self.d_off : self.comp_off]).view(np.float32)
        d = raw.reshape(-1, self.kb, g).transpose(0, 2, 1).reshape(-1, self.kb)[:n]
        each, q = (SPAN, np.int16) if self.kind in WORDS else (BLOCK, np.int8)
        codes: np.ndarray = rows.view(q)
        if self.kind == "q16x2":
            each = SPAN
            high, low = codes.reshape(n, -1, 2, PAIR).astype(np.int32).swapaxes(0, 2).swapaxes(1, 2)
            codes = ((high << 8) + low).reshape(n, -1)
        if self.kind == "q8x2":
            high, low = np.split(codes.astype(np.int32), 2, axis=1)
            codes = (high << LOW_BITS) + low
        scales = d.repeat(each, 1)[:, : self.k].astype(np.float64)
        return np.asarray(codes[:, : self.k] * scales)

    def low_ref(self, buffer: np.ndarray, n: int) -> np.ndarray:
        """Return, for ``q16x2``, the part of the values of the first ``n`` tokens in ``buffer``
        that their low bytes make, float64 ``[n, k]``.
        """
        assert self.kind == "q16x2", self.kind
        low = self.dwords_ref(buffer, n).view(np.int8).reshape(n, -1, 2, PAIR)[:, :, 1]
        groups = buffer[: self.n_bytes(n)].reshape(-1, self.group_bytes)
        d = np.ascontiguousarray(groups[:, self.d_off : self.comp_off]).view(np.float32)
        d = d.reshape(-1, self.kb, self.group).transpose(0, 2, 1).reshape(-1, self.kb)[:n]
        scales = d.repeat(SPAN, 1)[:, : self.k].astype(np.float64)
        return np.asarray(low.reshape(n, -1)[:, : self.k] * scales)


def quantize_ref(x: np.ndarray, kind: str = "q8") -> tuple[np.ndarray, np.ndarray]:
    """Quantise f32 ``[N, K]`` as ``q8`` or ``q8x2``: i32 ``[N, K]`` and scales f32 ``[N, K/32]``,
    ``d = max|x| / BYTE_TOP[kind]``, ``q = round(x / d)``.
    """
    most = BYTE_TOP[kind]
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, BLOCK)
    top = np.abs(blocks).max(-1)
    d = top * np.float32(1 / most)
    inverse = np.divide(np.float32(most), top, out=np.zeros_like(top), where=top > 0)
    # float64: the kernel fuses this product with rounding to whole numbers.
    q = np.rint(blocks * inverse[:, :, None].astype(np.float64)).astype(np.int32)
    return q.reshape(x.shape), d


def halves_ref(q: np.ndarray) -> list[np.ndarray]:
    """Split ``q``, integers of ``q8x2`` (``128 * high + low``), into two int8 arrays: high and low
    parts.
    """
    high = (q + (1 << (LOW_BITS - 1))) >> LOW_BITS
    return [high.astype(np.int8), (q - (high << LOW_BITS)).astype(np.int8)]


def words_ref(x: np.ndarray, kind: str = "q16") -> tuple[np.ndarray, np.ndarray]:
    """Quantise f32 ``[N, K]`` to int16 ``[N, K]`` and scales f32 ``[N, K/256]``, ``q = round(x /
    d)``; K is padded with zeros to whole spans. ``d`` is ``max|x| / 2895`` for ``q16``, ``max|x| /
    32512`` for ``q16x2``, and for ``q16n`` the larger of ``length / 46320`` (of the span's
    Euclidean length) and ``max|x| / 32767``.
    """
    spans = np.zeros((x.shape[0], -(-x.shape[1] // SPAN), SPAN), np.float32)
    spans.reshape(len(x), -1)[:, : x.shape[1]] = x
    top = np.abs(spans).max(-1)
    if kind == "q16n":
        squares = np.square(spans.astype(np.float64)).sum(-1)
        length = np.maximum(np.sqrt(squares), top * (WORD_LENGTH / WORD_MOST))
        length = np.maximum(length, LEAST_LENGTH).astype(np.float32)
        inverse, d = np.float32(WORD_LENGTH) / length, length * np.float32(1 / WORD_LENGTH)
    else:
        inverse, d = word_scales_ref(top, BYTES_TOP if kind == "q16x2" else WORD_TOP)
    # float64: the kernel fuses this product with rounding to whole numbers.
    q = np.rint(spans * inverse[:, :, None].astype(np.float64)).astype(np.int16)
    return q.reshape(len(x), -1), d


def bytes_ref(q: np.ndarray) -> list[np.ndarray]:
    """Split ``q``, integers of ``q16x2`` (``256 * high + low``), into two int8 arrays: high and low
    parts.
    """
    high = (q.astype(np.int32) + 128) >> 8
    return [high.astype(np.int8), (q - (high << 8)).astype(np.int8)]


def word_scales_ref(top: np.ndarray, most: int = WORD_TOP) -> tuple[np.ndarray, np.ndarray]:
    """Return two f32 arrays for spans of largest magnitude ``top``: the factors that turn values
    into words of at most ``most``, and the scales of these words.
    """
    top = np.maximum(top, np.float32(LEAST))
    return np.float32(most) / top, top * np.float32(1 / most)


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """Convert f32 to the 16 bits of bf16, rounding to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """Convert the 16 bits of bf16 to float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_bits(x: np.ndarray, n_parts: int) -> list[np.ndarray]:
    """Split f32 values into ``n_parts`` bf16, as uint16 bits, the highest first. Each part is the
    bf16 of the value minus the parts before it.
    """
    parts = [to_bf16_bits(x)]
    for _ in range(1, n_parts):
        x = x - from_bf16_bits(parts[-1]).astype(np.float32)
        parts.append(to_bf16_bits(x))
    return parts


def in_bf16(k: Builder, x: Val, n_parts: int) -> list[Val]:
    """Split a vector of f32 into ``n_parts`` vectors of bf16 bits, i16, the highest part first:
    ``bf16_bits`` in a kernel.
    """
    parts = [k.isa.narrow_bf16(k, x)]
    for _ in range(1, n_parts):
        last = parts[-1]
        x = x - (last.bits(u16.like(last.ty)).to(u32) << 16).bits(x.ty)
        parts.append(k.isa.narrow_bf16(k, x))
    return parts


def narrowed(k: Builder, kind: str, x: Val) -> list[Val]:
    """Return a block's 32 f32 values ``x`` as ``kind``, one of NARROW: for each bf16 part its
    dwords, ``i32 * 16``.
    """
    return [part.bits(i32 * DWORDS["bf16"]) for part in in_bf16(k, x, NARROW[kind])]


def scaled_comp(offset: int, comp: Val) -> Val:
    """Return ``-offset * (sum of the quants)``, i32, from a compensation ``comp``. ``offset``: zero
    point of the weights' codes, 0 or a power of two up to OFFSET.
    """
    if not offset:
        return comp & 0
    assert offset.bit_count() == 1, offset
    return (comp - MAGIC_BITS) >> (OFFSET.bit_length() - offset.bit_length())


def block_sums(k: Builder, comp: Val, d: Val) -> Val:
    """Return the sum of each block's values, f32, a block in each lane. ``comp``: the blocks'
    compensations, i32, ``MAGIC_BITS - 128 * sum of the quants``; ``d``: their scales, f32.
    """
    return (comp - MAGIC_BITS).to(f32) * (d * (-1 / OFFSET))


def emit_store(
    k: Builder,
    act: ActivationLayout,
    out: Val,
    n: Val,
    block: Val,
    values_of: Callable[[Val], list[Val]],
    scratch: Val,
) -> None:
    """Write block number ``block`` (32 values) of the ``together`` tokens from token ``n`` on into
    the buffer at ``out``. ``values_of(n)`` returns token n's f32 values of this block (vectors, in
    order), with zeros past ``act.k``. ``scratch``: ``act.store_scratch`` bytes. Other tokens are
    not changed. The blocks of a span must be written in order: the last one writes the span.
    """
    group = out + n // act.group * act.group_bytes
    place = n % act.group
    if act.kind in WORDS:
        _store_span(k, act, group, place, block, values_of(n), scratch)
        return
    if act.kind == "q16x2":
        _store_spans(k, act, group, place, block, lambda t: values_of(n + t), scratch)
        return
    if act.together == 1:
        _store_one(k, act, group, place, block, values_of(n))
        return
    pitch = 4 * DWORDS[act.kind]
    ty = i32 * DWORDS["bf16"]
    with k.loop(act.together) as t:
        for part, dwords in enumerate(_dwords(k, act.kind, values_of(n + t))):
            k.store(scratch + t * pitch, dwords, offset=part * ty.n_bytes)
    at = group + (block * (pitch * act.group) + place * 4)
    for part in range(pitch // ty.n_bytes):
        first = part * ty.lanes
        rows = [k.load(scratch, ty, offset=t * pitch + 4 * first) for t in range(act.together)]
        for c, column in enumerate(transpose(k, rows, k.isa.lanes)):
            for i, v in enumerate(column):
                k.store(at, v, offset=4 * ((first + c) * act.group + i * v.ty.lanes))


def _dwords(k: Builder, kind: str, values: list[Val]) -> list[Val]:
    """Return a block's 32 f32 values in ``kind`` as dwords, vectors of ``i32 * 16``."""
    whole = k.concat(*values)
    if kind in NARROW:
        return narrowed(k, kind, whole)
    return list(k.split(whole.bits(i32.like(whole.ty)), DWORDS["bf16"]))


def _store_one(
    k: Builder, act: ActivationLayout, group: Val, place: Val, block: Val, values: list[Val]
) -> None:
    """Write block ``block`` of one token, the ``place``-th of the group at address ``group``, from
    its f32 ``values``.
    """
    stride = 4 * act.group
    apart = 0  # dwords of the row between one part of a block and the next
    if act.kind in BYTES:
        most = BYTE_TOP[act.kind]
        top = largest_magnitude_bits(k, values).bits(f32)
        inverse = k.select(top > 0.0, most / k.max(top, 1e-38), k.const(0.0, f32))
        scale = k.splat(inverse, values[0].ty)
        # After adding MAGIC the low bits are the nearest whole number. OFFSET times a block's sum
        # drops MAGIC's own bits.
        rounded = [(v * scale + MAGIC).bits(i32.like(v.ty)) for v in values]
        at = (block * act.group + place) * 4
        k.store(group + act.d_off, top * (1 / most), offset=at)
        per = BLOCK // act.sub
        for i in range(per):
            part = rounded[i * len(rounded) // per : (i + 1) * len(rounded) // per]
            at = ((block * per + i) * act.group + place) * 4
            k.store(group + act.comp_off, MAGIC_BITS - k.sum(reduce(add, part)) * OFFSET, offset=at)
        halves = [rounded]
        if act.kind == "q8x2":  # MAGIC_BITS ends in more zeros than LOW_BITS
            half = 1 << (LOW_BITS - 1)
            high = [(v + half) >> LOW_BITS for v in rounded]
            halves = [high, [((v + half) & (2 * half - 1)) - half for v in rounded]]
        parts = [k.concat(*(v.to(i8) for v in part)).bits(i32 * 8) for part in halves]
        apart = act.kd // len(parts)
    elif act.kind in NARROW:
        parts = narrowed(k, act.kind, k.concat(*values))
    else:
        parts = [k.concat(*values).bits(i32 * 32)]
    each = DWORDS[act.kind] // BYTES.get(act.kind, 1)
    at = group + (block * each * stride + place * act.unit)
    for i, dwords in enumerate(parts):
        to = at + i * (apart or dwords.ty.lanes) * stride
        if act.group == 1:
            k.store(to, dwords)
            continue
        units = dwords if act.unit == DWORD else dwords.bits(i64 * (dwords.ty.n_bytes // act.unit))
        for lane in range(units.ty.lanes):
            k.store(to, k.extract(units, lane), offset=lane * act.unit * act.group)


def _store_span(
    k: Builder,
    act: ActivationLayout,
    group: Val,
    place: Val,
    block: Val,
    values: list[Val],
    scratch: Val,
) -> None:
    """Store a block as ``q16`` or ``q16n``; arguments as in ``_store_one``. ``scratch`` keeps the
    span's f32 values, their largest magnitude and their sum of squares; the span's last block
    writes all of them.
    """
    per = SPAN // BLOCK
    last = -(-act.k // BLOCK) - 1
    ty = values[0].ty
    top_at = scratch + 4 * SPAN
    here = block % per
    for i, v in enumerate(values):
        k.store(scratch + here * (4 * BLOCK), v, offset=i * ty.n_bytes)
    top = largest_magnitude_bits(k, values)
    top = k.select(here.eq(0), top, k.max(top, k.load(top_at, i32)))
    k.store(top_at, top)
    squares: Val | None = None
    if act.kind == "q16n":
        squares = k.sum(reduce(add, (v * v for v in values)))
        squares = k.select(here.eq(0), squares, squares + k.load(top_at, f32, offset=4))
        k.store(top_at, squares, offset=4)
    with k.if_(here.eq(per - 1) | block.eq(last)):
        inverse, d = word_scale(k, top, squares=squares)
        k.store(group + act.d_off, d, offset=(block // per * act.group + place) * 4)
        with k.loop(here + 1) as b:
            at = scratch + b * (4 * BLOCK)
            some = [k.load(at, ty, offset=i * ty.n_bytes) for i in range(len(values))]
            dwords = in_words(k, some, inverse)
            to = group + ((block - here + b) * (DWORDS[act.kind] * act.group) + place) * 4
            if act.group == 1:
                k.store(to, dwords)
            else:
                for lane in range(dwords.ty.lanes):
                    k.store(to, k.extract(dwords, lane), offset=lane * 4 * act.group)


def _store_spans(
    k: Builder,
    act: ActivationLayout,
    group: Val,
    place: Val,
    block: Val,
    values_of: Callable[[Val], list[Val]],
    scratch: Val,
) -> None:
    """Store a block of ``together`` tokens, from the ``place``-th of the group on, as ``q16x2``.
    ``values_of(t)`` returns the ``t``-th of these tokens' values. ``scratch`` keeps for each token
    a span's f32 values, their largest magnitude, and the factor that turns them into words; the
    span's last block writes all of them.
    """
    per = SPAN // BLOCK
    last = -(-act.k // BLOCK) - 1
    tokens = act.together
    pitch = 4 * (SPAN + BLOCK)
    assert tokens > 1, act  # groups for matrix registers
    here = block % per
    tops = scratch + 4 * SPAN
    with k.loop(tokens) as t:
        values = values_of(t)
        ty = values[0].ty
        for i, v in enumerate(values):
            k.store(scratch + (t * pitch + here * (4 * BLOCK)), v, offset=i * ty.n_bytes)
        top = largest_magnitude_bits(k, values)
        at = tops + t * pitch
        k.store(at, k.select(here.eq(0), top, k.max(top, k.load(at, i32))))
    with k.if_(here.eq(per - 1) | block.eq(last)):
        with k.loop(tokens) as t:
            at = tops + t * pitch
            inverse, d = word_scale(k, k.load(at, i32), most=BYTES_TOP)
            k.store(at, inverse, offset=4)
            k.store(group + act.d_off, d, offset=(block // per * act.group + place + t) * 4)
        first = block - here
        half = DWORDS["q16x2"] // 2  # dwords of a block's high parts, or its low parts
        with k.loop(here + 1) as b:
            rows = []
            for token in range(tokens):
                at = scratch + (b * (4 * BLOCK) + token * pitch)
                x = k.concat(*(k.load(at, ty, offset=i) for i in range(0, 4 * BLOCK, ty.n_bytes)))
                inverse = k.load(scratch, f32, offset=token * pitch + 4 * SPAN + 4)
                rows.append(k.concat(*in_bytes(k, x, inverse)).bits(i32 * (2 * half)))
            at = group + (first + b) // 2 * (4 * act.group * 4 * half)
            at = at + (first + b) % 2 * (4 * act.group * half) + place * 4
            # The other half of the last pair, if K has none, is zeros.
            if act.k % PAIR and act.k % PAIR <= BLOCK:
                with k.if_((first + b).eq(last)):
                    zeros = k.zero(i32 * min(tokens, k.isa.lanes))
                    for row in range(2 * half):
                        to = row % half + half + row // half * (2 * half)
                        for i in range(0, tokens, zeros.ty.lanes):
                            k.store(at, zeros, offset=4 * (to * act.group + i))
            for c, column in enumerate(transpose(k, rows, k.isa.lanes)):
                to = c % half + c // half * (2 * half)
                for i, v in enumerate(column):
                    k.store(at, v, offset=4 * (to * act.group + i * v.ty.lanes))


def in_bytes(k: Builder, values: Val, inverse: Val) -> tuple[Val, Val]:
    """Return f32 values of a span as ``q16x2``: high parts and low parts, i8. ``inverse``: the
    factor that turns values into words.
    """
    # MAGIC_BITS ends in more zeros than a word has bits. 128 makes the high byte the nearest one,
    # and turns the low byte's sign.
    words = (values * k.splat(inverse, values.ty) + (MAGIC + 128.0)).bits(i32.like(values.ty))
    size = k.isa.vector_bits // 8
    high, low = [], []
    for part in k.split(words, min(size // 2, words.ty.lanes)):  # of two registers
        a, b = (half.bits(i8 * half.ty.n_bytes) for half in k.split(part, part.ty.lanes // 2))
        n = a.ty.lanes
        # One shuffle of two registers takes the low bytes, then the high ones.
        both = k.shuffle(a, b, [i + byte for byte in range(2) for i in range(0, 2 * n, 4)])
        lows, highs = k.split(both ^ k.const([-128] * (n // 2) + [0] * (n // 2), both.ty), n // 2)
        high.append(highs)
        low.append(lows)
    return k.concat(*high), k.concat(*low)


def largest_magnitude_bits(k: Builder, values: list[Val]) -> Val:
    """Return the largest magnitude of f32 values, as i32 bits. Bits have the order of the
    magnitudes, with NaN above all, so no NaN is lost.
    """
    bits = [k.abs(v).bits(i32.like(v.ty)) for v in values]
    return k.reduce(reduce(k.max, bits), k.max)


def word_scale(
    k: Builder, top: Val, *, squares: Val | None = None, most: int = WORD_TOP
) -> tuple[Val, Val]:
    """Return two f32: the factor that turns values of magnitude at most ``top`` (from
    ``largest_magnitude_bits``, one or several) into words of at most ``most``, and the scale of
    these words. ``squares``: the sum of the values' squares, for ``q16n``.
    """
    top = k.reduce(top, k.max) if top.ty.lanes > 1 else top
    if squares is not None:
        # As integers: a NaN of ``top`` is larger than all numbers.
        least = (top.bits(f32) * (WORD_LENGTH / WORD_MOST)).bits(i32)
        least = k.max(least, k.const(LEAST_LENGTH, f32).bits(i32))
        length = k.max(k.sqrt(squares).bits(i32), least).bits(f32)
        return WORD_LENGTH / length, length * (1 / WORD_LENGTH)
    top = k.max(top, k.const(LEAST, f32).bits(i32)).bits(f32)
    return most / top, top * (1 / most)


def in_words(k: Builder, values: list[Val], inverse: Val) -> Val:
    """Return f32 values of a span, times ``inverse`` and rounded to i16, as dwords of two words
    each.
    """
    whole = k.concat(*values)
    # After adding MAGIC the low bits are the nearest whole number.
    words = (whole * k.splat(inverse, whole.ty) + MAGIC).bits(i32.like(whole.ty)).to(i16)
    return words.bits(i32 * (words.ty.lanes // 2))
