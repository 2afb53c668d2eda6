"""Expert dispatch: rows of tokens to rows of experts before their products, and back after them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64
from treadle.kernels.activation_layout import BLOCK, DWORD, ActivationLayout
from treadle.kernels.spec import Args, Frame, Spec, f32_values
from treadle.kernels.transpose import transpose

WIDTH = 16  # a row is a multiple of this many dwords
CODES_WIDTH = BLOCK // DWORD  # its codes alone are a multiple of this many dwords
MOST = 16  # rows that are transposed at once; more would spill
PIECE = 512  # values of a row in an item: decoding's single row then feeds several threads


@dataclass(frozen=True)
class Gather(Spec):
    """Gather the activations of a batch's tokens, ``x``, one row of ``k`` values for each choice of
    an expert: row ``i`` of ``out`` is that of token ``rows[i]``, as ``Sort`` writes them.

    ``x`` has activations of kind ``act`` with one token in a group; ``out`` has the layout
    ``layout()``, with ``group`` rows in a group. A group interleaves its rows dword by dword
    (values, scales and compensations alike), so dwords are copied whatever they mean. Items: blocks
    of ``block`` rows, a multiple of ``group``.
    """

    op: ClassVar[str] = "gather"
    args = Args("x:in rows:in out:out")
    act: str
    k: int
    group: int
    sub: int  # sub of the activations
    block: int
    unit: int = DWORD  # unit of the activations

    def layout(self) -> ActivationLayout:
        """Return the activation layout of the output."""
        return ActivationLayout(self.act, self.k, self.group, self.sub, self.unit)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act = self.layout()
        each = self.block // self.group
        width = min(isa.lanes, WIDTH if self.unit == DWORD else CODES_WIDTH)
        with k.loop(frame.end * each, start=frame.begin * each) as g:
            tokens = frame.rows + (8 + g * (4 * self.group))
            out = frame.out + g * act.group_bytes
            rows = [
                frame.x + k.load(tokens, i32, offset=4 * t).to(i64) * act.row_bytes
                for t in range(self.group)
            ]
            apart = 0 if self.unit == DWORD else act.kd  # dwords that are kept in adjacent pairs
            if apart:
                with k.shared_loop(apart, step=width) as c:
                    self._columns(k, rows, out, c, width, 2)
            with k.shared_loop(act.row_bytes // 4, start=apart, step=width) as c:
                self._columns(k, rows, out, c, width, 1)

    def _columns(self, k: Builder, rows: list[Val], out: Val, c: Val, width: int, per: int) -> None:
        """Write ``width`` dwords of each row of a group, from the ``c``-th on, to the group at
        ``out``; ``per`` consecutive dwords of a row stay side by side.
        """
        first = 0
        ty = (i32 if per == 1 else i64) * (width // per)
        while first < self.group:  # transposed in powers of two
            n = min(1 << (self.group - first).bit_length() - 1, MOST)
            held = [k.load(row, ty, offset=c * 4) for row in rows[first : first + n]]
            for j, column in enumerate(transpose(k, held, ty.lanes)):
                at = out + (c + j * per) * (4 * self.group)
                for i, v in enumerate(column):
                    k.store(at, v, offset=4 * per * (first + i * v.ty.lanes))
            first += n

    def run_ref(self, args: Any, run: Any) -> None:
        n_rows = int(args.rows[:2].view(np.int64)[0]) * self.block
        act = self.layout()
        if not n_rows:
            return
        tokens = args.rows[2 : 2 + n_rows]
        source = args.x[: (int(tokens.max()) + 1) * act.row_bytes].reshape(-1, act.row_bytes)
        dwords = source[tokens].view(np.int32).reshape(-1, self.group, act.row_bytes // 4)
        apart = 0 if self.unit == DWORD else act.kd
        codes = dwords[:, :, :apart].copy().view(np.int64)
        rest = dwords[:, :, apart:]
        parts = (part.transpose(0, 2, 1).reshape(len(part), -1) for part in (codes, rest))
        made = np.concatenate([part.view(np.int32) for part in parts], 1).view(np.uint8).ravel()
        args.out[: made.size] = made


@dataclass(frozen=True)
class Combine(Spec):
    """Add up the results of a token's choices of experts:
    ``out[n] = residual[n] + gain[n] shared[n] + sum over s of weights[n, s] y[row of (n, s)]``,
    ``k`` values each. Choices are added in order, then shared, then the residual. ``mean``: the
    mean of the shared term and of the sum, instead of their sum.

    ``places`` has the row of y of each choice; without it, choice s of token n is row
    ``n_used n + s``. ``gain`` is the sigmoid of ``gate``'s first column, or 1 without it. Items:
    tokens times pieces of PIECE values.
    """

    op: ClassVar[str] = "combine"
    args = Args(
        "y:in weights:in places:in? residual:in? shared:in? gate:in? out:out stride gate_stride"
    )
    k: int
    n_used: int  # choices of a token
    places: bool = False  # whether this argument is given; so for the next three
    residual: bool = False
    shared: bool = False
    gate: bool = False
    mean: bool = False

    @property
    def needs(self) -> set[str]:
        optional = ("places", "residual", "shared", "gate")
        return self.args.required | {name for name in optional if getattr(self, name)}

    @property
    def pieces(self) -> int:
        return -(-self.k // PIECE)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        lanes = isa.lanes
        stride = frame.stride * 4
        full, rest = divmod(self.k, lanes)
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.pieces
            piece = item % self.pieces
            choices = [token * self.n_used + s for s in range(self.n_used)]
            weights = [k.load(frame.weights + choice * 4, f32) for choice in choices]
            places = choices
            if self.places:
                places = [k.load(frame.places + choice * 4, i32).to(i64) for choice in choices]
            rows = [frame.y + place * stride for place in places]
            row = token * stride
            if self.gate:
                score = k.load(frame.gate + token * frame.gate_stride * 4, f32)
                gain = math.sigmoid(k, k.splat(score, f32 * lanes))

            def vector(
                c: Val, n: int, rows: list[Val] = rows, weights: list[Val] = weights, row: Val = row
            ) -> None:
                ty = f32 * lanes
                at = c * (4 * lanes)
                total = k.zero(ty)
                for source, weight in zip(rows, weights, strict=True):
                    total = k.fma(k.load_first(source + at, ty, n), k.splat(weight, ty), total)
                if self.shared:
                    shared = k.load_first(frame.shared + row + at, ty, n)
                    total = k.fma(shared, gain, total) if self.gate else shared + total
                if self.mean:
                    total = total * 0.5
                if self.residual:
                    total = k.load_first(frame.residual + row + at, ty, n) + total
                k.store_first(frame.out + row + at, total, n)

            per = PIECE // lanes
            with k.shared_loop(k.min((piece + 1) * per, full), start=piece * per) as c:
                vector(c, lanes)
            if rest:
                with k.if_(piece.eq(self.pieces - 1)), k.once():
                    vector(k.i64(full), rest)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        choices = np.arange(n * self.n_used)
        places = args.places[choices] if self.places else choices
        y = args.y.reshape(-1, args.stride)[places, : self.k].astype(np.float64)
        weights = args.weights[choices].reshape(n, self.n_used, 1)
        total = (y.reshape(n, self.n_used, -1) * weights).sum(1)
        if self.shared:
            shared = args.shared.reshape(-1, args.stride)[:n, : self.k].astype(np.float64)
            if self.gate:
                score = args.gate.reshape(-1, args.gate_stride)[:n, :1].astype(np.float64)
                shared = shared / (1 + np.exp(-score))
            total = (total + shared) * (0.5 if self.mean else 1.0)
        if self.residual:
            residual = f32_values(args.residual).reshape(-1, args.stride)
            total = total + residual[:n, : self.k]
        args.out.reshape(-1, args.stride)[:n, : self.k] = total
