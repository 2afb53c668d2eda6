"""Compression of a sequence in time: each unit of tokens becomes one row (DeepSeek V4, 2026).

::

    row = sum_t softmax_t(gate_t + bias_t) value_t          in each column by itself

The softmax is online, token by token, so that a unit may begin in one run and end in another.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32
from treadle.kernels.attention.work_item import LOWEST
from treadle.kernels.recurrent.convolution import ByChannel
from treadle.kernels.spec import Args, Frame, f32_values

SUMS = 3  # of each accumulator: the largest score, the sum of weights, that of weighted values


@dataclass(frozen=True)
class Compress(ByChannel):
    """Compute for each token the weighted mean of its unit's values up to it, ``out [N, k]``.

    ``kv`` and ``gate`` have a value and a score for each column; ``bias`` is ``[unit, columns]``,
    by a token's place in its unit of ``unit`` tokens. With ``overlap`` there are ``2 k`` columns: a
    unit's row is the mean over the last ``k`` columns of its own tokens and the first ``k`` of the
    previous unit's. The sums are the sequence's state. Items: sequences x tiles of TILE columns.
    """

    op: ClassVar[str] = "compress"
    args = Args(
        "kv:in gate:in bias:const states:const out:out kv_stride gate_stride out_stride kv_column "
        "gate_column cell_bytes state_off"
    )
    k: int
    unit: int
    overlap: bool = False

    @property
    def columns(self) -> int:
        """Columns of values, of scores, and of the bias."""
        return self.k * (1 + self.overlap)

    @property
    def n_values(self) -> int:
        """Number of f32 values in a sequence's state."""
        return SUMS * self.columns

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        return 4 * self.n_values, 8 * self.columns * n_tokens

    def _channels(
        self, k: Builder, frame: Frame, record: dict[str, Val], at: Val, lanes: int, n: int
    ) -> None:
        ty = f32 * lanes
        home = frame.states + (frame.state_off + at * 4)
        old, new = (home + record[name] * frame.cell_bytes for name in ("state", "next"))
        sums = [_Sums(k, k.zero(ty)) for _ in range(1 + self.overlap)]
        with k.if_(record["position"] > 0):
            for i, each in enumerate(sums):
                for j, var in enumerate(each.all):
                    var.v = k.load_first(old + 4 * (i * SUMS + j) * self.k, ty, n)
        with k.loop(record["n_tokens"]) as t:
            row = record["token"] + t
            place = (record["position"] + t) % self.unit
            with k.if_(place.eq(0)):
                for each, behind in zip(sums, [*sums[1:], None], strict=True):
                    each.begin(behind)
            kv = frame.kv + (row * frame.kv_stride + frame.kv_column + at) * 4
            gate = frame.gate + (row * frame.gate_stride + frame.gate_column + at) * 4
            bias = frame.bias + (place * self.columns + at) * 4
            for i, each in enumerate(sums):
                # Its own columns are the last: those of the accumulator that the unit began with.
                off = 4 * self.k * (self.overlap - i)
                score, added, value = (k.load_first(p + off, ty, n) for p in (gate, bias, kv))
                each.add((score + added) * math.LOG2_E, value)
            out = frame.out + (row * frame.out_stride + at) * 4
            k.store_first(out, sums[0].values.v / sums[0].total.v, n)
        for i, each in enumerate(sums):
            for j, var in enumerate(each.all):
                k.store_first(new + 4 * (i * SUMS + j) * self.k, var.v, n)

    def run_ref(self, args: Any, run: Any) -> None:
        n = self.k
        width = self.columns
        kv = f32_values(args.kv).reshape(-1, args.kv_stride)[:, args.kv_column :][:, :width]
        gate = f32_values(args.gate).reshape(-1, args.gate_stride)[:, args.gate_column :][:, :width]
        bias = args.bias[: self.unit * width].reshape(self.unit, width).astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)
        for part in run.parts:
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][
                    : 4 * self.n_values
                ].view(np.float32)
                for name in ("state", "next")
            )
            empty = np.stack([np.full(n, LOWEST), np.zeros(n), np.zeros(n)])
            state = np.stack([empty] * (1 + self.overlap))
            if part["position"]:
                state = old.reshape(state.shape).astype(np.float64)
            for t in range(int(part["n_tokens"])):
                row = int(part["token"]) + t
                place = (int(part["position"]) + t) % self.unit
                if not place:
                    state = np.concatenate([state[1:], empty[None]])
                score = (gate[row].astype(np.float64) + bias[place]) * math.LOG2_E
                parts = slice(None, None, -1)  # the last columns come first
                score = score.reshape(-1, n)[parts]
                value = kv[row].astype(np.float64).reshape(-1, n)[parts]
                most = np.maximum(state[:, 0], score)
                before = np.exp2(state[:, 0] - most)
                weight = np.exp2(score - most)
                total = state[:, 1] * before + weight
                values = state[:, 2] * before + weight * value
                state = np.stack([most, total, values], 1)
                out[row, :n] = values[0] / total[0]
            new[:] = state.ravel()


class _Sums:
    """An online softmax in each lane: the largest score, the sum of weights, the sum of weighted
    values.
    """

    def __init__(self, k: Builder, zero: Val) -> None:
        self.k = k
        self.zero = zero
        self.lowest = k.const(LOWEST, zero.ty)
        self.most: Var = k.var(self.lowest)
        self.total: Var = k.var(zero)
        self.values: Var = k.var(zero)

    @property
    def all(self) -> tuple[Var, Var, Var]:
        return self.most, self.total, self.values

    def begin(self, behind: _Sums | None) -> None:
        """Begin with a copy of the sums ``behind``; None: with empty sums."""
        if behind is None:
            self.most.v = self.lowest
            self.total.v = self.zero
            self.values.v = self.zero
            return
        for own, other in zip(self.all, behind.all, strict=True):
            own.v = other.v

    def add(self, score: Val, value: Val) -> None:
        """Add a token's ``value``; ``score``: log2 of its weight."""
        k = self.k
        most = k.max(self.most.v, score)
        before = math.exp2(k, self.most.v - most)
        weight = math.exp2(k, score - most)
        self.most.v = most
        self.total.v = k.fma(self.total.v, before, weight)
        self.values.v = k.fma(weight, value, self.values.v * before)
