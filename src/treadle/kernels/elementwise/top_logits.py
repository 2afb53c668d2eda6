"""The N_TOP largest logits of a row, and its softmax denominator: all that most samplers need.

A row is cut into slices of SLICE values, so that a long one has work for several threads.
``TopLogitsKernel`` finds the largest of each slice, ``JoinTop`` those of the row. Slices have one
size and are joined in order, so results do not depend bitwise on the number of threads.

Floats are compared as integers, their *keys*: keys have the order of the floats, both zeros are one
key, and every NaN is above infinity. So a row with a NaN, or else +infinity, has it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import boolean, f32, f64, i32, i64, ptr, u32
from treadle.kernels.run_state import N_TOP, RESULT, SAMPLED, TOTAL
from treadle.kernels.spec import Args, Frame, Spec

WORD_KEYS = 32  # keys that are compared at once: the bits of a mask's word
SLICE_ROWS = 256  # a slice is this many rows of N_TOP values
SLICE = SLICE_ROWS * N_TOP  # shorter slices cost more to join than parallelism saves
N_VOCAB_MAX = SLICE_ROWS * SLICE  # the candidates of this many slices fill one slice
FLUSH = 16  # rows summed in f32 before the sums are added in f64


# A slice's result: keys and ids of the largest, in the order of ids; the sum of exp(x - max); max.
PARTIAL = np.dtype(
    {
        "names": ["keys", "ids", "total", "max"],
        "formats": [("i4", N_TOP), ("i4", N_TOP), "f8", "f4"],
        "offsets": [0, 4 * N_TOP, 8 * N_TOP, 8 * N_TOP + 8],
        "itemsize": 8 * N_TOP + 64,
    }
)
IDS = 4 * N_TOP
MAX = 8 * N_TOP + 8
LEAST_KEY = -(1 << 31)  # the key of -infinity, the smallest
SHIFT = 1 << 23
KEY_INF = 0x7F800000 - SHIFT
PADDING_ID = -1  # the id of padding
LOWEST = -3.0e38  # lower bound of a maximum: -infinity minus -infinity is NaN
CANDIDATES = 8 * (SLICE + WORD_KEYS)  # bytes of keys and ids: WORD_KEYS keys, then their ids


def slices(n: int) -> int:
    """Return the number of slices of a row of ``n`` values."""
    return -(-n // SLICE)


@dataclass(frozen=True)
class TopLogitsKernel(Spec):
    """Find the N_TOP largest logits of each slice of the rows that SAMPLED records name, and write
    them to ``out`` as a PARTIAL record. ``x``: f32 ``[n_outputs, stride]``, with ``n`` values a
    row; ``stride`` is a multiple of WORD_KEYS. Masked values count as -infinity, except NaN and
    infinity, which must stay visible as errors. Items: SAMPLED records x slices.
    """

    op: ClassVar[str] = "top"
    compile_ms: ClassVar[float] = 90.0
    args = Args("x:in out:out stride n")
    reads_masks: ClassVar[bool] = True

    def scratch(self, lanes: int) -> int:
        return 4 * SLICE + CANDIDATES

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        sampled = frame.run("sampled", ptr)
        length = frame.n
        keys = frame.scratch
        n_slices = (length + (SLICE - 1)) // SLICE
        with k.loop(frame.end, start=frame.begin) as item:
            record = sampled + item // n_slices * SAMPLED.itemsize
            first = item % n_slices * SLICE
            row = frame.x + (k.load(record, i64) * frame.stride + first) * 4
            n = k.min(k.i64(SLICE), length - first)
            mask = k.load(record, i64, offset=8)
            with k.if_else(mask.eq(0)) as (free, bound):
                with free:
                    emit_keys(k, row, n, keys)
                with bound:
                    emit_keys(k, row, n, keys, frame.block + mask + first // 8)
            rest = (n + (WORD_KEYS - 1)) // WORD_KEYS
            with k.loop((n + (N_TOP - 1)) // N_TOP * (N_TOP // WORD_KEYS), start=rest) as b:
                k.store(keys + b * (4 * WORD_KEYS), k.const(LEAST_KEY, i32 * WORD_KEYS))

            def id_at(i: Val, column: Val, first: Val = first) -> Val:
                return (first + i * N_TOP + column).to(i32)

            out = frame.out + item * PARTIAL.itemsize
            n_rows = (n + (N_TOP - 1)) // N_TOP
            only = k.load(record, i64, offset=16) > 0
            found = TopBuffers(lambda i: keys + i * (4 * N_TOP), id_at, keys + 4 * SLICE)
            highest = k.max(to_float(k, emit_largest(k, n_rows, found, only, out)), LOWEST)
            k.store(out, highest, offset=MAX)
            with k.if_(k.load(record, i64, offset=24) > 0):
                k.store(out, emit_total(k, isa, keys, n_rows, highest), offset=TOTAL)

    def run_ref(self, args: Any, run: Any) -> None:
        n_slices = slices(args.n)
        x = args.x.view(np.float32).reshape(-1, args.stride)
        out = args.out[: run["n_sampled"] * n_slices * PARTIAL.itemsize].view(PARTIAL)
        queries = run.sampled(args.n)
        for made, (row, allowed, first, total) in zip(
            out.reshape(-1, n_slices), queries, strict=True
        ):
            whole = np.full(n_slices * SLICE, -np.inf, np.float32)
            values = x[row, : args.n]
            whole[: args.n] = np.where(allowed | ~(values < np.inf), values, -np.inf)
            for i, part in enumerate(whole.reshape(-1, SLICE)):
                keys = keys_ref(part)
                at = np.sort(largest_ref(keys, N_TOP))
                keys = keys[at]
                ids = at + i * SLICE
                top = keys.max()
                if first:
                    ids = ids[keys == top]
                    keys = keys[keys == top]
                made["keys"][i] = LEAST_KEY
                made["ids"][i] = PADDING_ID
                made["keys"][i, : len(keys)] = keys
                made["ids"][i, : len(keys)] = ids
                made["max"][i] = max(part.max(), np.float32(LOWEST))
                if total:
                    with np.errstate(all="ignore"):  # with NaN or infinity the sum is undefined
                        made["total"][i] = np.exp(part.astype("f8") - made["max"][i]).sum()


@dataclass(frozen=True)
class JoinTop(Spec):
    """Join the PARTIALs of a row's slices into its RESULT: the N_TOP largest, sorted, and the sum
    of exponentials. ``n``: values of a row. Items: SAMPLED records.
    """

    op: ClassVar[str] = "top_join"
    compile_ms: ClassVar[float] = 90.0
    args = Args("partials:in out:out n")

    def scratch(self, lanes: int) -> int:
        return PARTIAL.itemsize + CANDIDATES

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        sampled = frame.run("sampled", ptr)
        size = PARTIAL.itemsize
        made = frame.scratch
        n_slices = (frame.n + (SLICE - 1)) // SLICE
        with k.loop(frame.end, start=frame.begin) as item:
            source = frame.partials + item * (n_slices * size)
            out = frame.out + item * RESULT.itemsize
            record = sampled + item * SAMPLED.itemsize

            def key_at(i: Val, source: Val = source) -> Val:
                return source + i * size

            def id_at(i: Val, column: Val, source: Val = source) -> Val:
                return k.load(source + i * size, i32, offset=column * 4 + IDS)

            only = k.load(record, i64, offset=16) > 0
            found = TopBuffers(key_at, id_at, made + size)
            highest = k.max(to_float(k, emit_largest(k, n_slices, found, only, made)), LOWEST)
            with k.if_else(only) as (equal, several):
                with equal:
                    for at in range(0, 4 * N_TOP, 4 * WORD_KEYS):
                        keys = k.load(made, i32 * WORD_KEYS, offset=at)
                        k.store(out, to_float(k, keys), offset=at)
                        k.store(out, k.load(made, keys.ty, offset=at + IDS), offset=at + IDS)
                with several:
                    emit_sorted(k, made, out)
            with k.if_(k.load(record, i64, offset=24) > 0):
                total = k.var(k.const(0.0, f64))
                with k.loop(n_slices) as i:
                    part = source + i * size
                    gain = math.exp(k, k.load(part, f32, offset=MAX) - highest)
                    total.v = total.v + k.load(part, f64, offset=TOTAL) * gain.to(f64)
                k.store(out, total.v, offset=TOTAL)

    def run_ref(self, args: Any, run: Any) -> None:
        n = run["n_sampled"]
        n_slices = slices(args.n)
        parts = args.partials[: n * n_slices * PARTIAL.itemsize].view(PARTIAL).reshape(n, n_slices)
        out = args.out[: n * RESULT.itemsize].view(RESULT)
        queries = run.sampled(args.n)
        for made, part, (_, _, first, total) in zip(out, parts, queries, strict=True):
            keys = part["keys"].reshape(-1)
            ids = part["ids"].reshape(-1)
            at = largest_ref(keys, N_TOP)
            at = at[keys[at] == keys[at[0]]] if first else at
            made["values"] = -np.inf
            made["ids"] = PADDING_ID
            made["values"][: len(at)], made["ids"][: len(at)] = floats_ref(keys[at]), ids[at]
            if total:
                top = max(part["max"].max(), np.float32(LOWEST))
                with np.errstate(all="ignore"):
                    gain = np.exp(part["max"].astype(np.float64) - top)
                    made["total"] = (part["total"] * gain).sum()


class TopBuffers(NamedTuple):
    """Access to rows of N_TOP keys and their ids, and ``free`` memory of CANDIDATES bytes."""

    key_at: Callable[[Val], Val]  # address of a row's keys
    id_at: Callable[[Val, Val], Val]  # the id of a row's column
    free: Val


def emit_keys(k: Builder, row: Val, n: Val, keys: Val, mask: Val | None = None) -> None:
    """Write the keys of the ``n`` f32 values at ``row`` to ``keys``. Values whose bit in ``mask``
    is 0, and padding up to the end of the last WORD_KEYS, get -infinity's key.
    """
    ty = i32 * WORD_KEYS
    never = k.const(LEAST_KEY, ty)
    index = k.const(range(WORD_KEYS), ty)
    bit = k.const([1 << j for j in range(WORD_KEYS)], u32 * WORD_KEYS)
    with k.loop((n + (WORD_KEYS - 1)) // WORD_KEYS) as b:
        at = b * (4 * WORD_KEYS)
        key = to_key(k, k.load(row + at, f32 * WORD_KEYS))
        if mask is not None:
            word = k.splat(k.load(mask, u32, offset=b * 4), bit.ty)
            key = k.select((word & bit).eq(0) & (key < KEY_INF), never, key)
        here = index < k.splat((n - b * WORD_KEYS).to(i32), ty)
        k.store(keys + at, k.select(here, key, never))


def emit_largest(k: Builder, n_rows: Val, found: TopBuffers, only: Val, out: Val) -> Val:
    """Write the N_TOP largest keys of the ``n_rows`` rows of ``found`` to ``out``, then their ids,
    both in row order; if ``only`` is true, just those equal to the largest, and padding. Return the
    largest key.

    Each of the N_TOP columns has a maximum, so at least N_TOP keys reach the smallest of these, and
    few others do. Among the keys that do, a binary search over bits finds the N_TOP-th largest.
    """
    ty = i32 * WORD_KEYS
    never = k.const(LEAST_KEY, ty)
    one = k.const(1, ty)
    zero = k.zero(ty)
    low = k.var(never)
    high = k.var(never)
    with k.loop(n_rows) as i:
        low.v = k.max(low.v, k.load(found.key_at(i), ty))
        high.v = k.max(high.v, k.load(found.key_at(i), ty, offset=4 * WORD_KEYS))
    top = k.reduce(k.max(low.v, high.v), k.max)
    floor = k.select(only, top, k.reduce(k.min(low.v, high.v), k.min))
    n = _gather(k, n_rows, found, k.splat(floor, ty))
    n_blocks = (n + (WORD_KEYS - 1)) // WORD_KEYS

    def count(reaches: Callable[[Val], Val]) -> Val:
        total = k.var(zero)
        with k.loop(n_blocks) as c:
            here = reaches(k.load(found.free, ty, offset=c * (8 * WORD_KEYS)))
            total.v = total.v + k.select(here, one, zero)
        return k.sum(total.v)

    last = k.var(top)  # the N_TOP-th largest; an unsigned number during the search
    with k.if_(k.val(n, i64) > N_TOP):
        bits = k.var(k.const(0, u32))
        with k.loop(32) as b:
            trial = bits.v | (k.const(1 << 31, u32) >> b.to(u32))
            limit = k.splat((trial ^ (1 << 31)).bits(i32), ty)
            enough = count(lambda key, limit=limit: key >= limit) >= N_TOP  # type: ignore[misc]
            bits.v = k.select(enough, trial, bits.v)
        last.v = (bits.v ^ (1 << 31)).bits(i32)
    with k.if_(n <= N_TOP):  # all of them
        last.v = floor
    for at in range(0, 8 * N_TOP, 4 * WORD_KEYS):
        k.store(out, never if at < IDS else k.const(PADDING_ID, ty), offset=at)
    above = k.splat(last.v, ty)
    ties = k.var(N_TOP - count(lambda key: key > above))
    at_ = k.var(out)
    with k.loop(n) as i:
        place = _place(found.free, i)
        key = k.load(place, i32)
        tie = key.eq(last.v) & (ties.v > 0)
        with k.if_((key > last.v) | tie):
            k.store(at_.v, key)
            k.store(at_.v, k.load(place, i32, offset=4 * WORD_KEYS), offset=IDS)
            at_.v = at_.v + 4
            ties.v = ties.v - k.select(tie, k.const(1, i32), k.const(0, i32))
    return top


def _gather(k: Builder, n_rows: Val, found: TopBuffers, floor: Val) -> Val:
    """Copy the keys that are at least ``floor``, with their ids, to ``found.free``; return their
    number. The last WORD_KEYS are padded with -infinity's key.
    """
    n = k.var(k.i64(0))
    no = k.const(0, boolean).ir  # cttz's input is never zero here
    with k.loop(n_rows * (N_TOP // WORD_KEYS)) as b:
        i = b // (N_TOP // WORD_KEYS)
        column = b % (N_TOP // WORD_KEYS) * WORD_KEYS
        here = found.key_at(i) + column * 4
        left = k.var((k.load(here, floor.ty) >= floor).bits(u32))
        with k.loop(k.call("llvm.ctpop.i32", u32, [left.v.ir]).to(i64)):
            lane = k.call("llvm.cttz.i32", u32, [left.v.ir, no]).to(i64)
            left.v = left.v & (left.v - 1)
            place = _place(found.free, n.v)
            k.store(place, k.load(here, i32, offset=lane * 4))
            k.store(place, found.id_at(i, lane + column), offset=4 * WORD_KEYS)
            n.v = n.v + 1
    with k.loop((n.v + (WORD_KEYS - 1)) // WORD_KEYS * WORD_KEYS, start=n.v) as at:
        k.store(_place(found.free, at), k.const(LEAST_KEY, i32))
    return n.v


def _place(free: Val, i: Val) -> Val:
    """Return the address of the ``i``-th candidate's key in ``free``; its id is WORD_KEYS words
    further.
    """
    return free + (i // WORD_KEYS * (8 * WORD_KEYS) + i % WORD_KEYS * 4)


def emit_sorted(k: Builder, made: Val, out: Val) -> None:
    """Write the N_TOP keys and ids at ``made`` to ``out``, sorted: each at its rank, the number of
    keys that are larger, or equal and earlier. Keys become floats.
    """
    ty = i32 * N_TOP
    keys = k.load(made, ty)
    index = k.const(range(N_TOP), ty)
    with k.loop(N_TOP) as i:
        key = k.load(made, i32, offset=i * 4)
        own = k.splat(key, ty)
        before = (keys > own) | (keys.eq(own) & (index < k.splat(i.to(i32), ty)))
        rank = k.sum(k.select(before, k.const(1, ty), k.zero(ty))).to(i64) * 4
        k.store(out + rank, to_float(k, key))
        k.store(out + rank, k.load(made, i32, offset=i * 4 + IDS), offset=IDS)


def emit_total(k: Builder, isa: Isa, keys: Val, n_rows: Val, highest: Val) -> Val:
    """Return the sum of ``exp(x - highest)``, f64, over the floats x of ``n_rows`` rows of N_TOP
    keys at ``keys``.
    """
    width = min(2 * isa.lanes, N_TOP)
    total = k.var(k.const(0.0, f64))
    away = k.splat(highest, f32 * width)
    with k.loop(N_TOP // width) as c:
        sums = k.var(k.zero(f64 * width))
        with k.loop((n_rows + (FLUSH - 1)) // FLUSH) as group:
            part = k.var(k.zero(f32 * width))
            with k.loop(k.min((group + 1) * FLUSH, n_rows), start=group * FLUSH) as i:
                x = to_float(k, k.load(keys + (i * N_TOP + c * width) * 4, i32 * width))
                part.v = part.v + math.exp(k, x - away)
            sums.v = sums.v + part.v.to(f64)
        total.v = total.v + k.sum(sums.v)
    return total.v


def to_key(k: Builder, x: Val) -> Val:
    """Map floats to keys, i32: sign and magnitude as an integer, shifted so that -infinity's is the
    smallest. Only negative NaNs are below it: they wrap around to the largest.
    """
    bits = x.bits(i32.like(x.ty))
    return k.select(bits < 0, LEAST_KEY - bits, bits) - SHIFT


def to_float(k: Builder, key: Val) -> Val:
    """Map keys back to floats; the inverse of ``to_key``."""
    bits = key + SHIFT
    return k.select(bits < 0, LEAST_KEY - bits, bits).bits(f32.like(key.ty))


def keys_ref(x: np.ndarray) -> np.ndarray:
    """Map floats to keys, int32; the numpy twin of ``to_key``."""
    bits = x.astype(np.float32).view(np.int32)
    keys: np.ndarray = np.where(bits < 0, np.int32(LEAST_KEY) - bits, bits) - np.int32(SHIFT)
    return keys


def floats_ref(keys: np.ndarray) -> np.ndarray:
    """Map keys back to floats, float32; the numpy twin of ``to_float``."""
    bits = keys + np.int32(SHIFT)
    result: np.ndarray = np.where(bits < 0, np.int32(LEAST_KEY) - bits, bits).view(np.float32)
    return result


def largest_ref(keys: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the ``n`` largest keys, largest first, of equals the lower
    index first.
    """
    order: np.ndarray = np.argsort(-keys.astype(np.int64), kind="stable")
    return order[:n]
