"""Sums of f32 rows: of two buffers, or of tokens and rows of a small matrix."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa
from treadle.jit.types import ptr
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.run_state import PART
from treadle.kernels.spec import Args, Frame, Spec, f32_values, load_record


@dataclass(frozen=True)
class Add(Spec):
    """Add two buffers, ``out[n] = x[n] + h[n]``, ``k`` values a row, where no product or norm
    includes the addition. Items: tokens.
    """

    op: ClassVar[str] = "add"
    args = Args("x:in h:in out:out stride")
    k: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x = frame.x
        h = frame.h
        out = frame.out
        stride = frame.stride * 4
        with k.loop(frame.end, start=frame.begin) as n:
            row = n * stride
            map_row(k, self.k, out + row, operator.add, x + row, h + row)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        given = map(f32_values, (args.x, args.h, args.out))  # a norm's rows may be bytes
        x, h, out = (a.reshape(-1, args.stride)[:n, : self.k] for a in given)
        out[:] = x.astype(np.float64) + h


@dataclass(frozen=True)
class AddRows(Spec):
    """Add a row of a matrix to each token's: ``x[n] += w[row]``, ``k`` values. ``by`` selects the
    row: "position", the token's position in its sequence; "type", 0 or 1 for its token type;
    "first", row 0. Items: the batch's sequences.
    """

    op: ClassVar[str] = "add_rows"
    args = Args("x:inout w:const stride")
    k: int
    by: str

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        parts = frame.run("parts", ptr)
        stride = frame.stride * 4
        with k.loop(frame.end, start=frame.begin) as part:
            record = load_record(k, parts + part * PART.itemsize, PART)
            token = record["token"]
            position = record["position"]
            with k.loop(record["n_tokens"]) as t:
                x = frame.x + (token + t) * stride
                row = frame.w
                if self.by == "position":
                    row = row + (position + t) * (4 * self.k)
                if self.by == "type":
                    is_second = position + t >= record["second"]
                    row = row + k.select(is_second, k.i64(4 * self.k), k.i64(0))
                map_row(k, self.k, x, operator.add, x, row)

    def run_ref(self, args: Any, run: Any) -> None:
        x = args.x.reshape(-1, args.stride)
        w = args.w
        for part in run.parts:
            for t in range(int(part["n_tokens"])):
                position = int(part["position"]) + t
                second = position >= int(part["second"])
                row = {"position": position, "type": int(second), "first": 0}[self.by]
                x[int(part["token"]) + t, : self.k] += w[row * self.k :][: self.k]
