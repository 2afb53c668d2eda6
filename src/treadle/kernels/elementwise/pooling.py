"""Pooling: one row for each sequence in a batch, from its tokens' rows."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.elementwise.elementwise import map_row, mean_square
from treadle.kernels.run_state import PART
from treadle.kernels.spec import Args, Frame, Spec, load_record

TINY = 1e-30  # lower bound of mean squares, so that rows of zeros stay zeros


@dataclass(frozen=True)
class Pooling(Spec):
    """Pool each sequence's rows of ``k`` values into one row. ``how``: their "mean", or the "first"
    or "last" of them. With ``unit`` the result is scaled to Euclidean length 1. Items: the batch's
    sequences.
    """

    op: ClassVar[str] = "pooling"
    args = Args("x:in out:out stride out_stride")
    how: str
    k: int
    unit: bool = False

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        parts = frame.run("parts", ptr)
        lanes = isa.lanes
        with k.loop(frame.end, start=frame.begin) as part:
            record = load_record(k, parts + part * PART.itemsize, PART)
            first = record["token"]
            n = record["n_tokens"]
            if self.how == "last":
                first = first + (n - 1)
            n = n if self.how == "mean" else k.i64(1)
            x = frame.x + first * frame.stride * 4
            out = frame.out + part * frame.out_stride * 4
            share = 1.0 / n.to(f32)

            def columns(c: Val, count: int, x: Val = x, out: Val = out, n: Val = n) -> None:
                total = k.var(k.zero(f32 * lanes))
                with k.loop(n) as t:
                    row = x + (t * frame.stride + c * lanes) * 4
                    total.v = total.v + k.load_first(row, f32 * lanes, count)
                k.store_first(out + c * (lanes * 4), total.v * k.splat(share, f32 * lanes), count)

            k.runs(self.k, lanes, columns)
            if self.unit:
                square = k.max(mean_square(k, out, self.k, lanes), TINY) * float(self.k)
                scale = k.splat(1.0 / k.sqrt(square), f32 * lanes)
                map_row(k, self.k, out, lambda v, scale=scale: v * scale, out)

    def run_ref(self, args: Any, run: Any) -> None:
        x = args.x.view(np.float32).reshape(-1, args.stride)[:, : self.k].astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)
        for i, part in enumerate(run.parts):
            rows = x[part["token"] :][: part["n_tokens"]]
            pooled = {"mean": rows.mean(0), "first": rows[0], "last": rows[-1]}[self.how]
            length = np.sqrt(max(np.mean(pooled**2), TINY) * self.k) if self.unit else 1.0
            out[i, : self.k] = pooled / length
