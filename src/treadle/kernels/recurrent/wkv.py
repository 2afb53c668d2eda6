"""WKV-7, of RWKV-7 (Peng and others, 2025): the delta rule with a decay for each channel of a key,
and a separate direction that is removed from the state. Before it each token is mixed with the
previous one (token shift).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, f32
from treadle.kernels.activations import activated
from treadle.kernels.elementwise.elementwise import map_row, mean_square, row_mean
from treadle.kernels.recurrent.convolution import ByChannel
from treadle.kernels.recurrent.scan import Scan, ScanItem
from treadle.kernels.spec import Args, Frame, Spec, f32_values

DECAY = -0.606531  # decays are e**(DECAY s), with s a sigmoid; about -e**-0.5
LEAST = 1e-12  # least length of a vector that is normalised
ROW = ("decays", "removed", "added", "keys", "values")  # columns of ``WkvKeys``' output


@dataclass(frozen=True)
class TokenShift(ByChannel):
    """Mix each token with the previous one: ``out[j] = x + w[j] (x' - x)`` for each of ``n`` rows
    of ``w``, side by side, where ``x'`` is the previous token, or zeros before the first. ``x`` has
    ``k`` channels.

    The last token is the sequence's state. Items: sequences x tiles of TILE channels.
    """

    op: ClassVar[str] = "token_shift"
    args = Args("x:in w:const states:const out:out stride out_stride cell_bytes state_off")
    n: int

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        return 4 * self.k, 3 * self.n * self.k * n_tokens

    def _channels(
        self, k: Builder, frame: Frame, record: dict[str, Val], at: Val, lanes: int, n: int
    ) -> None:
        """Process all tokens of a sequence for the ``n`` channels from ``at`` on. ``record``: the
        fields of the sequence's PART record.
        """
        ty = f32 * lanes
        home = frame.states + (frame.state_off + at * 4)
        old, new = (home + record[name] * frame.cell_bytes for name in ("state", "next"))
        w = [k.load_first(frame.w + (at + j * self.k) * 4, ty, n) for j in range(self.n)]
        last = k.var(k.zero(ty))
        with k.if_(record["position"] > 0):
            last.v = k.load_first(old, ty, n)
        with k.loop(record["n_tokens"]) as t:
            row = record["token"] + t
            x = k.load_first(frame.x + (row * frame.stride + at) * 4, ty, n)
            out = frame.out + (row * frame.out_stride + at) * 4
            less = last.v - x
            for j, weight in enumerate(w):
                k.store_first(out + 4 * j * self.k, k.fma(less, weight, x), n)
            last.v = x
        k.store_first(new, last.v, n)

    def run_ref(self, args: Any, run: Any) -> None:
        x = f32_values(args.x).reshape(-1, args.stride)
        out = args.out.reshape(-1, args.out_stride)
        w = args.w[: self.n * self.k].reshape(self.n, self.k).astype(np.float64)
        for part in run.parts:
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][: 4 * self.k]
                for name in ("state", "next")
            )
            rows = slice(int(part["token"]), int(part["token"] + part["n_tokens"]))
            mine = x[rows, : self.k].astype(np.float64)
            first = old.view(np.float32) if part["position"] else np.zeros(self.k)
            past = np.concatenate([first[None], mine])
            made = mine[:, None] + w * (past[:-1] - mine)[:, None]
            out[rows, : self.n * self.k] = made.reshape(len(mine), -1)
            new.view(np.float32)[:] = past[-1]


@dataclass(frozen=True)
class WkvKeys(Spec):
    """Compute the inputs of ``Wkv`` for each token and its ``heads``, of ``k`` channels each: the
    five parts that ``ROW`` names, side by side.

    ``decays`` are ``e**(DECAY sigmoid(decay + w0))``; ``removed`` is ``key k_k``, normalised to
    length 1 per head; ``added`` is ``removed`` times ``r = sigmoid(rate + a0)``; ``keys`` are ``key
    (1 + (r - 1) k_a)``. ``values`` are ``value``; with ``mixed``, a blend of ``first`` (the first
    layer's values), with weight ``sigmoid(mix + mix0)``, and ``value``. All input rows have one
    stride. Items: tokens x heads.
    """

    op: ClassVar[str] = "wkv_keys"
    args = Args(
        "decay:in rate:in key:in value:in first:in? mix:in? w0:const a0:const mix0:const?"
        " k_k:const k_a:const out:out stride out_stride"
    )
    heads: int
    k: int
    mixed: bool = False

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"first", "mix", "mix0"} if self.mixed else set())

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        width = 4 * self.heads * self.k
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.heads
            at = item % self.heads * (4 * self.k)
            home = n * frame.stride * 4 + at
            to = frame.out + n * frame.out_stride * 4 + at
            decays, removed, added, keys, values = (to + i * width for i in range(len(ROW)))

            def decay(v: Val, w0: Val) -> Val:
                return math.exp(k, math.sigmoid(k, v + w0) * DECAY)

            def sigmoid(v: Val, bias: Val) -> Val:
                return math.sigmoid(k, v + bias)

            def key(v: Val, rate: Val, k_a: Val) -> Val:
                return v * ((rate - 1.0) * k_a + 1.0)

            map_row(k, self.k, decays, decay, frame.decay + home, frame.w0 + at)
            map_row(k, self.k, added, sigmoid, frame.rate + home, frame.a0 + at)
            map_row(k, self.k, keys, key, frame.key + home, added, frame.k_a + at)
            map_row(k, self.k, removed, lambda v, k_k: v * k_k, frame.key + home, frame.k_k + at)
            total = mean_square(k, removed, self.k, isa.lanes) * float(self.k)
            gain = k.const(1.0, f32) / k.max(k.sqrt(total), k.const(LEAST, f32))
            map_row(k, self.k, removed, lambda v, g=gain: v * k.splat(g, v.ty), removed)
            map_row(k, self.k, added, lambda v, rate: v * rate, removed, added)
            value = frame.value + home
            if self.mixed:
                more = frame.first + home, frame.mix + home, frame.mix0 + at

                def blend(v: Val, first: Val, mix: Val, mix0: Val) -> Val:
                    return k.fma(first - v, math.sigmoid(k, mix + mix0), v)

                map_row(k, self.k, values, blend, value, *more)
            else:
                map_row(k, self.k, values, lambda v: v, value)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.heads * self.k

        def rows(x: Any) -> Any:
            return x.reshape(-1, args.stride)[:n, :width].astype(np.float64)

        w0, a0, k_k, k_a = (
            x[:width].astype(np.float64) for x in (args.w0, args.a0, args.k_k, args.k_a)
        )
        key = rows(args.key)
        value = rows(args.value)
        rate = activated("sigmoid", rows(args.rate) + a0)
        removed = (key * k_k).reshape(n, self.heads, self.k)
        length = np.sqrt((removed**2).sum(-1, keepdims=True))
        removed = (removed / np.maximum(length, LEAST)).reshape(n, width)
        if self.mixed:
            share = activated("sigmoid", rows(args.mix) + args.mix0[:width])
            value = value + (rows(args.first) - value) * share
        decays = np.exp(DECAY * activated("sigmoid", rows(args.decay) + w0))
        made = decays, removed, removed * rate, key * (1 + (rate - 1) * k_a), value
        args.out.reshape(-1, args.out_stride)[:n, : 5 * width] = np.concatenate(made, -1)


@dataclass(frozen=True)
class Wkv(Scan):
    """WKV-7's recurrence: ``s = decays s - added (removed s)^T + keys values^T``; out ``r s``.
    ``x``: the output of ``WkvKeys``, whose parts these names are; ``r``: a query for each head.
    Each head has keys of its own, as wide as its values.
    """

    op: ClassVar[str] = "wkv"
    args = Args("x:in r:in states:const out:out stride r_stride out_stride cell_bytes state_off")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        ty = f32 * min(isa.lanes, self.tile)
        with self._items(k, frame, ty) as here, k.loop(here.n_tokens) as t:
            self._run_token(k, frame, here, ty, here.token + t)
            here.source.v = here.state

    def _run_token(self, k: Builder, frame: Frame, here: ScanItem, ty: Ty, token: Val) -> None:
        """Process one token of an item: update the state, and store its outputs."""
        columns = range(0, self.tile, ty.lanes)
        size = 4 * self.n_head * self.head_dim
        row = frame.x + token * frame.stride * 4
        at = row + here.head * (4 * self.n_state)
        decays, removed, added, keys = (at + i * size for i in range(4))
        value = row + (4 * size + here.column * 4)
        query = here.head * (4 * self.n_state)
        query = frame.r + token * frame.r_stride * 4 + query
        out = frame.out + (token * frame.out_stride + here.column) * 4
        source = here.source.v

        def one(row: Val, n: Val) -> Val:
            return k.splat(k.load(row + n * 4, f32), ty)

        gone, seen = ([k.var(k.zero(ty)) for _ in columns] for _ in range(2))
        with k.loop(self.n_state) as n:
            by = one(removed, n)
            there = source + n * here.pitch
            for j, y in zip(columns, gone, strict=True):
                y.v = k.fma(k.load(there + 4 * j, ty), by, y.v)
        new = [k.load(value + 4 * j, ty) for j in columns]
        with k.loop(self.n_state) as n:
            keep, less, key, sees = (one(row, n) for row in (decays, added, keys, query))
            for j, v, was, y in zip(columns, new, gone, seen, strict=True):
                there = n * here.pitch + 4 * j
                s = k.fma(v, key, k.load(source + there, ty) * keep) - was.v * less
                (k.store_passing if self.passing else k.store)(here.state + there, s)
                y.v = k.fma(s, sees, y.v)
        for j, y in zip(columns, seen, strict=True):
            k.store(out + 4 * j, y.v)

    def run_ref(self, args: Any, run: Any) -> None:
        x, r, out = (
            a.reshape(-1, n)
            for a, n in (
                (args.x, args.stride),
                (args.r, args.r_stride),
                (args.out, args.out_stride),
            )
        )
        width = self.n_head * self.head_dim
        shape = (self.n_head, self.n_state, self.head_dim)
        for part in run.parts:
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][
                    : 4 * width * self.n_state
                ].view(np.float32)
                for name in ("state", "next")
            )
            s = old.reshape(shape).astype(np.float64) if part["position"] else np.zeros(shape)
            for t in range(int(part["token"]), int(part["token"] + part["n_tokens"])):
                decay, removed, added, key, value = (
                    x[t, : 5 * width].astype(np.float64).reshape(5, self.n_head, -1)
                )
                gone = np.einsum("hn,hnp->hp", removed, s)
                s = s * decay[:, :, None] - added[:, :, None] * gone[:, None]
                s = s + key[:, :, None] * value[:, None]
                query = r[t, :width].astype(np.float64).reshape(self.n_head, -1)
                out[t, :width] = np.einsum("hn,hnp->hp", query, s).ravel()
            new[:] = s.ravel()


@dataclass(frozen=True)
class WkvOut(Spec):
    """Finish WKV-7's output ``x`` for each head, in place: ``(norm(x) + (sum of r r_k key) value)
    gate``. With ``norm``, a LayerNorm with a weight and a bias for each channel; without ``norm``
    or ``gate`` that factor is left out. ``rows``: the output of ``WkvKeys``, which has key and
    value; all other rows have one stride. Items: tokens x heads.
    """

    op: ClassVar[str] = "wkv_out"
    args = Args("x:inout r:in rows:in gate:in? r_k:const w:const? bias:const? stride rows_stride")
    heads: int
    k: int
    eps: float
    norm: bool = True
    gate: bool = True

    @property
    def needs(self) -> set[str]:
        asked = {"gate": self.gate, "w": self.norm, "bias": self.norm}
        return self.args.required | {name for name, on in asked.items() if on}

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        width = 4 * self.heads * self.k
        lanes = isa.lanes
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.heads
            at = item % self.heads * (4 * self.k)
            home = n * frame.stride * 4 + at
            x = frame.x + home
            rows = frame.rows + n * frame.rows_stride * 4 + at
            bonus = self._bonus(k, lanes, frame.r + home, rows + 3 * width, frame.r_k + at)
            more = [rows + 4 * width]
            mean, gain = k.const(0.0, f32), k.const(1.0, f32)
            if self.norm:
                mean = row_mean(k, x, self.k, lanes, lambda total, v, _: total + v)
                gain = 1.0 / k.sqrt(mean_square(k, x, self.k, lanes, mean) + self.eps)
                more += [frame.w + at, frame.bias + at]
            more += [frame.gate + home] if self.gate else []

            def made(
                v: Val, value: Val, *more: Val, at: tuple[Val, ...] = (mean, gain, bonus)
            ) -> Val:
                mean, gain, bonus = (k.splat(each, v.ty) for each in at)
                if self.norm:
                    v = (v - mean) * gain * more[0] + more[1]
                v = k.fma(value, bonus, v)
                return v * more[-1] if self.gate else v

            map_row(k, self.k, x, made, x, *more)

    def _bonus(self, k: Builder, lanes: int, *rows: Val) -> Val:
        """Return the sum over a head's channels of the product of three rows; ``rows``: their
        addresses.
        """
        total = k.var(k.zero(f32 * lanes))

        def run(at: Val, count: int) -> None:
            a, b, c = (k.load_first(row + at * (4 * lanes), f32 * lanes, count) for row in rows)
            total.v = k.fma(a * b, c, total.v)

        k.runs(self.k, lanes, run)
        return k.total(total.v)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.heads * self.k
        shape = n, self.heads, self.k

        def rows(x: Any) -> Any:
            return x.reshape(-1, args.stride)[:n, :width].astype(np.float64).reshape(shape)

        made = args.rows.reshape(-1, args.rows_stride)[:n, : 5 * width].astype(np.float64)
        key, value = (made.reshape(n, 5, self.heads, self.k)[:, i] for i in (3, 4))
        r_k = args.r_k[:width].astype(np.float64).reshape(self.heads, self.k)
        y = rows(args.x)
        if self.norm:
            y = y - y.mean(-1, keepdims=True)
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + self.eps)
            w, bias = (x[:width].reshape(self.heads, self.k) for x in (args.w, args.bias))
            y = y * w + bias
        y = y + (rows(args.r) * key * r_k).sum(-1, keepdims=True) * value
        y = y * rows(args.gate) if self.gate else y
        args.x.reshape(-1, args.stride)[:n, :width] = y.reshape(n, width)
