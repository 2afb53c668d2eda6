"""Rows of an embedding table that are chosen by a hash of a token and of the tokens before it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import Format, by_name
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import i32, i64, ptr
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.matmul.panel import load_values
from treadle.kernels.run_state import PART
from treadle.kernels.spec import Args, Frame, Spec, load_record, whole_rows


@dataclass(frozen=True)
class NgramRows(Spec):
    """Compute the table rows of each token's n-grams, i64 ``[N, stride]``: ``heads`` rows for each
    length from 2 to ``n``.

    With token ids ``t0`` (its own), ``t1`` (the one before), ... an n-gram's hash is the xor of
    ``t[i] * multiplier[i]``, and the row of head h ``hash % size[h] + offset[h]``; heads are
    numbered over all lengths. Tokens before an ``end`` token, or before the text's beginning, count
    as ``end``. ``hash`` is i64: ``n`` multipliers, then the size and the offset of each head.
    ``states`` keeps the last ``n - 1`` ids of each sequence, i32, for the next run. Items:
    sequences.
    """

    op: ClassVar[str] = "ngram_rows"
    args = Args("out:out hash:const states:const stride cell_bytes state_off")
    n: int
    heads: int
    end: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        tokens = frame.run("tokens", ptr)
        parts = frame.run("parts", ptr)
        before = self.n - 1
        with k.loop(frame.end, start=frame.begin) as item:
            part = load_record(k, parts + item * PART.itemsize, PART)
            old, new = (
                frame.states + frame.state_off + part[name] * frame.cell_bytes
                for name in ("state", "next")
            )
            past = [k.var(k.i64(self.end)) for _ in range(before)]  # the latest first
            with k.if_(part["position"] > 0):
                for i, var in enumerate(past):
                    var.v = k.load(old, i32, offset=4 * i).to(i64)
            with k.loop(part["n_tokens"]) as t:
                row = part["token"] + t
                own = k.load(tokens, i32, offset=row * 4).to(i64)
                seen = [own]
                ended: Val | None = None
                for var in past:
                    cut = var.v.eq(self.end)
                    ended = cut if ended is None else ended | cut
                    seen.append(k.select(ended, k.i64(self.end), var.v))
                self._rows(k, frame, row, seen)
                for i in reversed(range(1, before)):
                    past[i].v = past[i - 1].v
                past[0].v = own
            for i, var in enumerate(past):
                k.store(new, var.v.to(i32), offset=4 * i)

    def _rows(self, k: Builder, frame: Frame, row: Val, seen: list[Val]) -> None:
        """Store the numbers of the table rows of the token in row ``row`` of the batch, i64.
        ``seen``: its own id, then the ids before it.
        """
        out = frame.out + row * frame.stride * 8
        factors = [k.load(frame.hash, i64, offset=8 * i) for i in range(self.n)]
        mixed = seen[0] * factors[0]
        for length in range(2, self.n + 1):
            mixed = mixed ^ (seen[length - 1] * factors[length - 1])
            for h in range((length - 2) * self.heads, (length - 1) * self.heads):
                at = 8 * (self.n + 2 * h)
                size = k.load(frame.hash, i64, offset=at)
                offset = k.load(frame.hash, i64, offset=at + 8)
                k.store(out, mixed % size + offset, offset=8 * h)

    def run_ref(self, args: Any, run: Any) -> None:
        out = whole_rows(args.out.view(np.int64), args.stride)
        table = args.hash.view(np.int64)
        heads = table[self.n :].reshape(-1, 2)
        before = self.n - 1
        for part in run.parts:
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][: 4 * before]
                for name in ("state", "next")
            )
            past = old.view(np.int32).tolist() if part["position"] else [self.end] * before
            first = int(part["token"])
            for row in range(first, first + int(part["n_tokens"])):
                seen = [int(run.tokens[row]), *past]
                past = seen[:before]
                for i in range(1, self.n):
                    if self.end in seen[1 : i + 1]:
                        seen[i] = self.end
                mixed = seen[0] * int(table[0])
                for length in range(2, self.n + 1):
                    mixed ^= seen[length - 1] * int(table[length - 1])
                    for h in range((length - 2) * self.heads, (length - 1) * self.heads):
                        out[row, h] = mixed % int(heads[h, 0]) + int(heads[h, 1])
            new.view(np.int32)[:] = past


@dataclass(frozen=True)
class GatherRows(Spec):
    """Gather rows of a table: ``x[n, h] = W[rows[n, h]]``, f32, ``heads`` rows of ``k`` values side
    by side; ``W`` in format ``w``. Items: tokens x heads.
    """

    op: ClassVar[str] = "gather_rows"
    args = Args("w:tensor rows:in x:out rows_stride stride")
    w: str
    k: int
    heads: int

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        fmt = self.fmt
        weights = BlockAddress(fmt, frame.each("w"))
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.heads
            head = item % self.heads
            place = frame.rows + (n * frame.rows_stride + head) * 8
            row = weights.row(k.load(place, i64, align=8), self.k)
            to = frame.x + (n * frame.stride + head * self.k) * 4
            n_values = max(BLOCK, fmt.block)

            def values(b: Val, count: int, row: BlockAddress = row, to: Val = to) -> None:
                for i, v in enumerate(load_values(k, row, b, count)):
                    here = to + b * (n_values * 4) + i * (BLOCK * 4)
                    k.store_first(here, v, min(count, BLOCK))

            k.runs(self.k, n_values, values)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        fmt = self.fmt
        rows = whole_rows(args.rows.view(np.int64), args.rows_stride)[:n, : self.heads].ravel()
        parts = [
            w.reshape(-1, self.k // fmt.block * size)[rows]
            for w, size in zip(args.w, fmt.strides, strict=True)
        ]
        made = fmt.dequantize_rows(fmt.join(parts).reshape(len(rows), -1)).astype(np.float64)
        x = args.x.reshape(-1, args.stride)
        x[:n, : self.heads * self.k] = made.reshape(n, -1)
