"""Short convolutions in time: each channel combines its last few values, across runs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, ptr
from treadle.kernels.activations import activated
from treadle.kernels.run_state import PART
from treadle.kernels.spec import Args, Frame, Spec, load_record

TILE = 64  # channels of an item
AHEAD = 16  # prefetch distance in tokens


@dataclass(frozen=True)
class ByChannel(Spec):
    """Base of kernels that process some of ``k`` channels of a sequence token by token. Items:
    sequences x tiles of TILE channels, so that results do not depend bitwise on how a sequence is
    cut into runs.
    """

    k: int

    @property
    def tiles(self) -> int:
        return -(-self.k // TILE)

    def lanes(self, isa: Isa) -> int:
        """Return the number of lanes of a vector of channels, a divisor of TILE."""
        return min(isa.lanes, TILE)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        lanes = self.lanes(isa)
        full, rest = divmod(self.k, lanes)
        parts = frame.run("parts", ptr)
        with k.loop(frame.end, start=frame.begin) as item:
            part = item // self.tiles
            tile = item % self.tiles
            record = load_record(k, parts + part * PART.itemsize, PART)
            first = tile * (TILE // lanes)
            with k.shared_loop(k.min(first + TILE // lanes, full), start=first) as c:
                self._channels(k, frame, record, c * lanes, lanes, lanes)
            if rest:
                with k.if_(tile.eq(self.tiles - 1)), k.once():
                    self._channels(k, frame, record, k.i64(full * lanes), lanes, rest)

    def _channels(
        self, k: Builder, frame: Frame, record: dict[str, Val], at: Val, lanes: int, n: int
    ) -> None:
        """Process all tokens of a sequence for the ``n`` channels from ``at`` on, in vectors of
        ``lanes``. ``record``: the fields of the sequence's PART record.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Convolution(ByChannel):
    """Convolve each channel of ``u`` with its values at earlier tokens, in place: ``y[t] =
    silu(bias + sum_j w[j] u[t - taps + 1 + j])`` replaces ``u``; ``w`` is ``[taps, k]``.

    With ``gates`` (LFM2) a row has ``b``, ``c`` and ``x`` side by side: ``u = b * x``, there is no
    silu, and ``c * y`` replaces ``b``. Taps are ``dilation`` tokens apart; with ``plain`` there is
    no silu. With ``residual`` (Inkling) u is added to y; with ``scaled`` u is the input times the
    only value of ``gain``. The last ``before`` values of u are the sequence's state, ``[before,
    k]``. Items as in ``ByChannel``.
    """

    op: ClassVar[str] = "convolution"
    args = Args(
        "x:inout w:const bias:const? gain:const? states:const stride column cell_bytes state_off"
    )
    k: int
    taps: int
    bias: bool = False
    gates: bool = False
    dilation: int = 1
    plain: bool = False
    residual: bool = False
    scaled: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {"bias": self.bias, "gain": self.scaled}
        return self.args.required | {name for name, on in asked.items() if on}

    @property
    def before(self) -> int:
        """Number of earlier values of u that a token may read."""
        return (self.taps - 1) * self.dilation

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        return 4 * self.before * self.k, 2 * self.taps * self.k * n_tokens

    def _channels(
        self, k: Builder, frame: Frame, record: dict[str, Val], at: Val, lanes: int, n: int
    ) -> None:
        """Process all tokens of a sequence for the ``n`` channels from ``at`` on. ``record``: the
        fields of the sequence's PART record.
        """
        ty = f32 * lanes
        before = self.before
        home = frame.states + (frame.state_off + at * 4)
        old, new = (home + record[name] * frame.cell_bytes for name in ("state", "next"))
        w = [k.load_first(frame.w + (at + j * self.k) * 4, ty, n) for j in range(self.taps)]
        last = [k.var(k.zero(ty)) for _ in range(before)]
        with k.if_(record["position"] > 0):
            for j, var in enumerate(last):
                var.v = k.load_first(old + 4 * j * self.k, ty, n)
        bias = k.load_first(frame.bias + at * 4, ty, n) if self.bias else None
        gain = k.splat(k.load(frame.gain, f32), ty) if self.scaled else None
        with k.loop(record["n_tokens"]) as t:
            row = frame.x + ((record["token"] + t) * frame.stride + frame.column + at) * 4
            k.prefetch(row + frame.stride * (4 * AHEAD))  # rows are far apart
            u = k.load_first(row, ty, n)
            if self.gates:
                u = u * k.load_first(row + 8 * self.k, ty, n)
            if gain is not None:
                u = u * gain
            values = [*(var.v for var in last), u]
            y = values[0] * w[0] if bias is None else k.fma(values[0], w[0], bias)
            for value, weight in zip(values[self.dilation :: self.dilation], w[1:], strict=True):
                y = k.fma(value, weight, y)
            if self.gates:
                y = y * k.load_first(row + 4 * self.k, ty, n)
            if self.residual:
                y = y + u
            k.store_first(row, y if self.gates or self.plain else math.silu(k, y), n)
            for var, value in zip(last, values[1:], strict=True):
                var.v = value
        for j, var in enumerate(last):
            k.store_first(new + 4 * j * self.k, var.v, n)

    def run_ref(self, args: Any, run: Any) -> None:
        n = self.k
        before = self.before
        rows = args.x.reshape(-1, args.stride)[:, args.column :]
        w = args.w[: self.taps * n].reshape(self.taps, n).astype(np.float64)
        for part in run.parts:
            mine = rows[int(part["token"]) :][: int(part["n_tokens"])]
            u = mine[:, :n].astype(np.float64)
            u = u * mine[:, 2 * n : 3 * n] if self.gates else u
            u = u * float(args.gain[0]) if self.scaled else u
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][: 4 * before * n]
                for name in ("state", "next")
            )
            past = old.view(np.float32).reshape(before, n)
            u = np.concatenate([past if part["position"] else np.zeros((before, n)), u])
            n_new = len(u) - before
            y = sum(u[j * self.dilation :][:n_new] * w[j] for j in range(self.taps))
            y = y + args.bias[:n] if self.bias else y
            if self.gates:
                y = y * mine[:, n : 2 * n]
            y = y + u[before:] if self.residual else y
            mine[:, :n] = y if self.gates or self.plain else activated("silu", y)
            new.view(np.float32)[:] = u[-before:].ravel()
