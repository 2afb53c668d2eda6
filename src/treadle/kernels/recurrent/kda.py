"""Kimi Delta Attention (Kimi Team, 2025): the delta rule with a decay for each channel of a head's
key. Row n of a state is multiplied by the n-th of its head's decays.

In a block of tokens, keys and queries are multiplied by the decays up to their token before they
are multiplied by the state, and keys by the decays after their token before they are added to it.
Nothing is divided by a product of decays, which may be close to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, f32
from treadle.kernels.activations import activated
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.rules import Delta
from treadle.kernels.recurrent.scan import ScanBlock, ScanItem, Token
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Args, Frame, Spec


@dataclass(frozen=True)
class ChannelRates(Spec):
    """Compute for each head ``most * sigmoid(beta)``, and for each of its ``k`` channels the decay
    ``e**(a softplus(x + bias))``, with one ``a`` below 0 for each head. With ``floor``, which is
    below 0, the decay is ``e**(floor * sigmoid(a (x + bias)))``, with ``a`` above 0.

    ``out`` has the first, ``heads`` values padded to COLUMNS, then the decays, ``heads * k``
    values, side by side. Items: tokens x heads.
    """

    op: ClassVar[str] = "channel_rates"
    args = Args(
        "x:in beta:in a:const bias:const out:out stride beta_stride out_stride column beta_column"
    )
    heads: int
    k: int
    floor: float = 0.0
    most: float = 1.0

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.heads
            head = item % self.heads
            at = head * (4 * self.k)
            out = frame.out + n * frame.out_stride * 4
            x = frame.x + (n * frame.stride + frame.column) * 4 + at
            beta = frame.beta + (n * frame.beta_stride + frame.beta_column + head) * 4
            a = k.load(frame.a + head * 4, f32)

            def decay(x: Val, bias: Val, a: Val = a) -> Val:
                if self.floor:
                    share = math.sigmoid(k, (x + bias) * k.splat(a, x.ty))
                    return math.exp(k, share * self.floor)
                return math.exp(k, math.softplus(k, x + bias) * k.splat(a, x.ty))

            map_row(k, 1, out + head * 4, self._first(k), beta)
            decays = out + 4 * round_up(self.heads, COLUMNS)
            map_row(k, self.k, decays + at, decay, x, frame.bias + at)

    def _first(self, k: Builder) -> Callable[[Val], Val]:
        if self.most == 1.0:
            return lambda v: math.sigmoid(k, v)
        return lambda v: math.sigmoid(k, v) * self.most

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        h = self.heads
        rows = args.x.reshape(-1, args.stride)[:n, args.column :].astype(np.float64)
        beta = args.beta.reshape(-1, args.beta_stride)[:n, args.beta_column :].astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)
        pad = round_up(h, COLUMNS)
        x = rows[:, : h * self.k] + args.bias[: h * self.k]
        a = args.a[:h].astype(np.float64).repeat(self.k)
        decay = self.floor * activated("sigmoid", a * x) if self.floor else a * np.logaddexp(0, x)
        out[:n, :h] = self.most * activated("sigmoid", beta[:, :h])
        out[:n, pad : pad + h * self.k] = np.exp(decay)


@dataclass(frozen=True)
class ChannelDelta(Delta):
    """The gated delta rule (``Delta``) with a decay for each row of a state; ``rates``: the output
    of ``ChannelRates``.
    """

    op: ClassVar[str] = "channel_delta"

    @property
    def n_decay(self) -> int:
        return self.n_state

    @property
    def rows_at(self) -> int:
        """Scratch offset, after the state, of the rows that ``_rows_of`` writes."""
        return self.state_at + 4 * self.n_state * self.tile

    def scratch(self, lanes: int) -> int:
        return self.rows_at + 12 * self.n_state * self.block if self.staged else 0

    def _decay(self, k: Builder, rates: Val, head: Val) -> Val:
        return rates + (head * (self.n_state - 1) + round_up(self.n_head, COLUMNS)) * 4

    def _decay_products(self, tokens: list[Token]) -> list[list[Val]]:
        return []

    def _decay_factor(self, k: Builder, token: Token, ty: Ty) -> Callable[[Val], Val]:
        return lambda n: k.splat(k.load(token.decay + n * 4, f32), ty)

    def _token(
        self, k: Builder, frame: Frame, here: ScanItem, ty: Ty, token: Token, out: Val
    ) -> None:
        columns = range(0, self.tile, ty.lanes)
        known = [k.var(k.zero(ty)) for _ in columns]
        beta = k.splat(token.first, ty)
        source = here.source.v
        with k.loop(self.n_state) as n:
            key, decay = (k.load(row + n * 4, f32) for row in (token.key, token.decay))
            b = k.splat(key * decay, ty)
            row = source + n * here.pitch
            for j, y in zip(columns, known, strict=True):
                y.v = k.fma(k.load(row + 4 * j, ty), b, y.v)
        add = [
            (k.load(token.value + 4 * j, ty) - y.v) * beta
            for j, y in zip(columns, known, strict=True)
        ]
        for j, sees in zip(columns, self._step(k, here, ty, token, add), strict=True):
            k.store(out + 4 * j, sees)

    def _block(self, k: Builder, isa: Isa, frame: Frame, here: ScanItem, block: ScanBlock) -> None:
        tokens = block.tokens
        ty = block.ty
        n = self.block
        rows = [frame.scratch + (self.rows_at + 4 * self.n_state * i) for i in range(3 * n)]
        known_by, seen_by = self._rows_of(k, isa, block, rows)
        for at in range(0, self.tile, block.n * ty.lanes):
            columns = [4 * (at + j * ty.lanes) for j in range(block.n)]
            both = self._times_state(k, here, block, at, rows[: 2 * n])
            new = self._answer(k, block, columns, both, known_by, seen_by)

            def keep(i: Val) -> Val:
                return k.splat(k.load(rows[-1] + i * 4, f32), ty)

            keys = [*rows[2 * n : -1], tokens[-1].key]
            self._keep_and_add(k, here, block, at, keep, keys, new)

    def _rows_of(
        self, k: Builder, isa: Isa, block: ScanBlock, rows: list[Val]
    ) -> tuple[list[list[Val]], list[list[Val]]]:
        """Write at the addresses ``rows``, each for ``n_state`` values: each token's key, then its
        query, times the decays up to it; each key but the last, times the decays after it; and the
        product of all decays.

        Return two lists ``[t][s]``, each value in all lanes: the weights of token s's update for
        token t's key (s < t), and for token t's query (s <= t).
        """
        tokens = block.tokens
        n = self.block
        lanes = isa.lanes
        ty, (full, rest) = f32 * lanes, divmod(self.n_state, isa.lanes)
        known = [[k.var(k.zero(ty)) for _ in range(t)] for t in range(n)]
        seen = [[k.var(k.zero(ty)) for _ in range(t + 1)] for t in range(n)]

        def step(at: Val, count: int) -> None:
            off = at * 4
            since = k.const(1.0, ty)
            past = list[Val]()
            for t, token in enumerate(tokens):
                decay, key, query = (
                    k.load_first(row + off, ty, count)
                    for row in (token.decay, token.key, token.query)
                )
                since = since * decay
                past = [each * decay for each in past]
                k.store_first(rows[t] + off, key * since, count)
                k.store_first(rows[n + t] + off, query * since, count)
                for var, each in zip(known[t], past, strict=True):
                    var.v = k.fma(each, key, var.v)
                past.append(key)
                for var, each in zip(seen[t], past, strict=True):
                    var.v = k.fma(each, query, var.v)
            for row, each in zip(rows[2 * n :], [*past[:-1], since], strict=True):
                k.store_first(row + off, each, count)

        with k.loop(full * lanes, step=lanes) as at:
            step(at, lanes)
        if rest:
            step(k.i64(full * lanes), rest)

        def spread(sums: list[list[Any]]) -> list[list[Val]]:
            found = iter(self._summed(k, lanes, [var for row in sums for var in row]))
            return [[k.splat(next(found), block.ty) for _ in row] for row in sums]

        return spread(known), spread(seen)
