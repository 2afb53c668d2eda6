"""LoRA additions to a matrix product: ``y[n] += sum over adapters of s B (A x[n])``.

One step serves several adapters; each sequence has a scale s for each, 0 if unused. The rows of a
sequence are cut into runs of at most LORA_ROWS; here a run is a *tile*. The LORA record of a tile
locates its scales, one for each adapter.

A product with several matrices (q, k, v) has one ``LoraDown``: the rows of all A's are concatenated
adapter by adapter, each A padded with zeros to whole groups of GROUP rows. ``LoraUp`` adds to the
columns of y strip by strip, for all matrices.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import Format, by_name
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64, ptr
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.run_state import LORA, round_up
from treadle.kernels.spec import Args, Frame, Spec, load_record

GROUP = 4  # rows of A that share each load of x
STRIP = 64  # columns of y of one item
# An adapter's B for a strip of columns: the first column of t, the number of columns (0 if the
# adapter has none there), the first byte of their weights, and the byte distance to the next
# expert's (``lora_experts.py``).
PIECE = np.dtype([(name, "i8") for name in ("first", "n", "at", "pitch")])
GROUP_OF = np.dtype([("adapter", "i4"), ("factor", "f4")])  # factor: alpha / r or its replacement


@dataclass(frozen=True)
class LoraDown(Spec):
    """First LoRA product: ``t[n, r] = s * factor * (A[r] . x[n])`` for each token n, and each row r
    of A of the adapters that n's sequence uses. s is the sequence's scale of the row's adapter
    (``loras`` of the run), factor the adapter's alpha / rank.

    ``w`` is all A's, ``[GROUP * n_groups, k up to whole blocks of 32]``; ``x`` f32 rows of at least
    that width; ``groups``: the adapter's number and its factor for each GROUP rows of A (records
    GROUP_OF). Parts of t of unused adapters are not written. Items: groups times tiles.
    """

    op: ClassVar[str] = "lora_down"
    args = Args("x:in w:const groups:const t:out stride t_stride")
    w: str  # a format of plain numbers
    k: int

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    @property
    def width(self) -> int:
        return round_up(self.k, BLOCK)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        loras = frame.run("loras", ptr)
        n_tiles = frame.run("n_loras")
        row_bytes = self.fmt.row_bytes(self.width)
        with k.loop(frame.end, start=frame.begin) as item:
            group = item // n_tiles
            tile = item % n_tiles
            at = loras + tile * LORA.itemsize
            record = load_record(k, at, LORA)
            own = frame.groups + group * GROUP_OF.itemsize
            adapter = k.load(own, i32).to(i64)
            scale = k.load(at + record["scales"] + adapter * 4, f32)
            with k.if_(k.abs(scale) > 0.0):
                gain = scale * k.load(own, f32, offset=4)
                rows = [frame.w + (group * GROUP + i) * row_bytes for i in range(GROUP)]
                first = record["token"]
                n = record["n_tokens"]
                pairs = n // 2
                with k.loop(pairs) as i:
                    self._dot(k, frame, rows, group, gain, first + i * 2, 2)
                with k.if_(n % 2 > 0):
                    self._dot(k, frame, rows, group, gain, first + (n - 1), 1)

    def _dot(
        self, k: Builder, frame: Frame, rows: list[Val], group: Val, gain: Val, first: Val, n: int
    ) -> None:
        tokens = [first + i for i in range(n)]
        xs = [frame.x + token * (frame.stride * 4) for token in tokens]
        to = [frame.t + (token * frame.t_stride + group * GROUP) * 4 for token in tokens]
        dot(k, self.fmt, self.width, rows, xs, to, [gain] * n)

    def run_ref(self, args: Any, run: Any) -> None:
        groups = args.groups.view(GROUP_OF)
        n_bytes = self.fmt.row_bytes(self.width)
        w = self.fmt.dequantize_rows(args.w.view(np.uint8).reshape(-1, n_bytes)).astype(np.float64)
        x = args.x.view(np.float32).reshape(-1, args.stride)
        t = args.t.reshape(-1, args.t_stride)
        for token, n, scales in run.loras:
            rows = x[token : token + n, : self.k].astype(np.float64)
            for g, (adapter, factor) in enumerate(groups.tolist()):
                if scale := float(scales[adapter]):
                    at = slice(GROUP * g, GROUP * (g + 1))
                    t[token : token + n, at] = rows @ w[at, : self.k].T * (scale * factor)


@dataclass(frozen=True)
class LoraUp(Spec):
    """Second LoRA product: ``y[n] += B t[n]``, adapter by adapter, one column of t after the other.

    ``w``: the pieces of all B's, each ``[columns of t, STRIP]``; ``pieces``: for each adapter and
    each strip of STRIP columns of y, which columns of t are multiplied and where their weights are
    in ``w`` (records PIECE, ``[n_adapters, n_strips]``). Items: strips times tiles.
    """

    op: ClassVar[str] = "lora_up"
    args = Args("t:in w:const pieces:const y:inout stride t_stride")
    w: str
    n_adapters: int
    n_strips: int

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        loras = frame.run("loras", ptr)
        n_tiles = frame.run("n_loras")
        with k.loop(frame.end, start=frame.begin) as item:
            strip = item // n_tiles
            tile = item % n_tiles
            at = loras + tile * LORA.itemsize
            record = load_record(k, at, LORA)
            with k.loop(self.n_adapters) as adapter:
                scale = k.load(at + record["scales"] + adapter * 4, f32)
                with k.if_(k.abs(scale) > 0.0):
                    where = frame.pieces + (adapter * self.n_strips + strip) * PIECE.itemsize
                    piece = load_record(k, where, PIECE)
                    self._add(k, frame, strip, record, piece)

    def _add(
        self, k: Builder, frame: Frame, strip: Val, record: dict[str, Val], piece: dict[str, Val]
    ) -> None:
        with k.if_(piece["n"] > 0), k.loop(record["n_tokens"]) as i:
            token = record["token"] + i
            t = frame.t + (token * frame.t_stride + piece["first"]) * 4
            y = frame.y + (token * frame.stride + strip * STRIP) * 4
            add_strip(k, self.fmt, y, frame.w + piece["at"], t, piece["n"])

    def run_ref(self, args: Any, run: Any) -> None:
        pieces = args.pieces.view(PIECE).reshape(self.n_adapters, self.n_strips)
        y = args.y.reshape(-1, args.stride)
        t = args.t.reshape(-1, args.t_stride)
        raw = args.w.reshape(-1).view(np.uint8)
        n_bytes = self.fmt.row_bytes(STRIP)
        for token, n, scales in run.loras:
            for adapter in np.flatnonzero(scales[: self.n_adapters]):
                for strip, (first, count, at, _) in enumerate(pieces[adapter].tolist()):
                    if not count:
                        continue
                    w = raw[at : at + count * n_bytes].reshape(count, n_bytes)
                    b = self.fmt.dequantize_rows(w).astype(np.float64)
                    mine = t[token : token + n, first : first + count].astype(np.float64)
                    y[token : token + n, strip * STRIP :][:, :STRIP] += mine @ b


def dot(
    k: Builder,
    fmt: Format,
    width: int,
    rows: list[Val],
    xs: list[Val],
    to: list[Val],
    gains: list[Val],
) -> None:
    """Multiply each of ``xs``, addresses of ``width`` f32, by each of ``rows`` of A, in format
    ``fmt``, and by the x's entry of ``gains``. Store an x's results, one for each row, as
    consecutive f32 from its entry of ``to`` on. Each sum has a vector of its own, so it does not
    depend on how many rows and xs are multiplied together.
    """
    lanes = min(k.isa.lanes, BLOCK)
    assert fmt.load is not None
    sums = [[k.var(k.zero(f32 * lanes)) for _ in rows] for _ in xs]
    size = fmt.dtype.itemsize
    with k.shared_loop(width, step=lanes) as c:
        weights = [fmt.load(k, k.isa, row + c * size, lanes, lanes) for row in rows]
        for x, mine in zip(xs, sums, strict=True):
            values = k.load(x + c * 4, f32 * lanes)
            for total, weight in zip(mine, weights, strict=True):
                total.v = k.fma(weight, values, total.v)
    for mine, place, gain in zip(sums, to, gains, strict=True):
        for r, total in enumerate(mine):
            k.store(place, k.total(total.v) * gain, offset=4 * r)


def add_strip(k: Builder, fmt: Format, y: Val, w: Val, t: Val, n: Val) -> None:
    """Add ``t w`` to STRIP f32 values at ``y``: ``n`` values of ``t``, f32, times the rows of ``w
    [n, STRIP]``, one after the other.
    """
    lanes = min(k.isa.lanes, STRIP)
    wide = lanes if k.sharing else min(STRIP, 8 * lanes)  # columns that fit registers
    size = fmt.dtype.itemsize
    load = fmt.load
    assert load is not None
    with k.shared_loop(STRIP, step=wide) as begin:
        offsets = range(0, wide, lanes)
        to = y + begin * 4
        rows = w + begin * size
        sums = [k.var(k.load(to, f32 * lanes, offset=4 * o)) for o in offsets]
        with k.loop(n) as r:
            value = k.splat(k.load(t + r * 4, f32), f32 * lanes)
            row = rows + r * (STRIP * size)
            for o, total in zip(offsets, sums, strict=True):
                weight = load(k, k.isa, row + o * size, lanes, lanes)
                total.v = k.fma(weight, value, total.v)
        for o, total in zip(offsets, sums, strict=True):
            k.store(to, total.v, offset=4 * o)
