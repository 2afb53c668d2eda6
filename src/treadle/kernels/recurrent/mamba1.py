"""Mamba-1's selective scan: each channel's state, ``n_state`` numbers, is updated token
by token.
"""

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

STRIP = 16  # channels whose state, and A, is interleaved
SOME = 16  # state numbers of each channel kept in registers
AHEAD = 8  # prefetch distance in tokens
A_SCALE = math.LOG2_E  # decays are powers of two


@dataclass(frozen=True)
class Selective(Spec):
    """Mamba-1's recurrence (Gu and Dao, 2023) for ``k`` channels: ``s[n] = e**(dt A[n]) s[n] + dt x
    B[n]`` for ``n_state`` numbers, ``dt`` the softplus of the input; out ``(sum_n C[n] s[n] + d x)
    silu(z)``.

    ``x``: rows with the channels from ``values`` on, and ``z`` from ``gates`` on; ``bc``: rows with
    B and C. Lanes are channels. ``a`` is A times A_SCALE. Like the state it is in strips:
    ``[n_state, STRIP]`` one after another, the last one as narrow as the remainder. Items:
    sequences x strips, token by token, so that results do not depend bitwise on how a sequence is
    cut into runs.

    A state stays in registers for all tokens of a sequence, SOME numbers a channel at a time; with
    more numbers the sums pass through ``out``.
    """

    op: ClassVar[str] = "selective"
    args = Args(
        "x:in dt:in bc:in a:const d:const states:const out:out stride dt_stride bc_stride"
        " out_stride values gates keys queries cell_bytes state_off"
    )
    k: int
    n_state: int

    @property
    def tile(self) -> int:
        """Number of channels in an item; divides STRIP."""
        return STRIP

    @property
    def items(self) -> int:
        """Number of work items of a sequence: one for each ``tile`` of its ``k`` channels."""
        return -(-self.k // self.tile)

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        return 4 * self.k * self.n_state, 20 * self.k * self.n_state * n_tokens

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        lanes = min(isa.lanes, self.tile)
        full, rest = divmod(self.k, lanes)
        parts = frame.run("parts", ptr)
        with k.loop(frame.end, start=frame.begin) as item:
            record = load_record(k, parts + item // self.items * PART.itemsize, PART)
            first = item % self.items * (self.tile // lanes)
            with k.loop(k.min(first + self.tile // lanes, full), start=first) as c:
                _Channels(k, self, frame, record, c * lanes, lanes, lanes).build()
            if rest:
                with k.if_((item % self.items).eq(self.items - 1)):
                    at = k.i64(full * lanes)
                    _Channels(k, self, frame, record, at, lanes, rest).build()

    def run_ref(self, args: Any, run: Any) -> None:
        x, dt, bc, out = (
            rows.reshape(-1, stride)
            for rows, stride in (
                (args.x, args.stride),
                (args.dt, args.dt_stride),
                (args.bc, args.bc_stride),
                (args.out, args.out_stride),
            )
        )
        size = self.k * self.n_state
        a = self._from_strips(args.a[:size].astype(np.float64))
        for part in run.parts:
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][: 4 * size].view(
                    np.float32
                )
                for name in ("state", "next")
            )
            s = np.zeros((self.k, self.n_state))
            if part["position"]:
                s = self._from_strips(old.astype(np.float64))
            for t in range(int(part["token"]), int(part["token"] + part["n_tokens"])):
                row = x[t].astype(np.float64)
                both = bc[t].astype(np.float64)
                value, z = (row[at : at + self.k] for at in (args.values, args.gates))
                b, c = (both[at : at + self.n_state] for at in (args.keys, args.queries))
                step = np.logaddexp(0, dt[t, : self.k].astype(np.float64))
                s = s * np.exp2(step[:, None] * a) + np.outer(step * value, b)
                out[t, : self.k] = (s @ c + args.d[: self.k] * value) * activated("silu", z)
            new[:] = np.concatenate(
                [s[at : at + STRIP].T.ravel() for at in range(0, self.k, STRIP)]
            )

    def _from_strips(self, values: np.ndarray) -> np.ndarray:
        """Return ``values``, which are stored in strips, as ``[k, n_state]``."""
        n = self.n_state
        made = []
        for at in range(0, self.k, STRIP):
            width = min(STRIP, self.k - at)
            made.append(values[at * n : (at + width) * n].reshape(n, width).T)
        return np.concatenate(made)


class _Channels:
    """Emits all tokens of a sequence for the ``n`` channels from ``at`` on."""

    def __init__(
        self,
        k: Builder,
        spec: Selective,
        frame: Frame,
        record: dict[str, Val],
        at: Val,
        lanes: int,
        n: int,
    ) -> None:
        self.k = k
        self.spec = spec
        self.frame = frame
        self.record = record
        self.n = n
        self.ty = f32 * lanes
        strip = at // STRIP * STRIP
        # The last strip is narrower, and so are its rows.
        uneven = spec.k % STRIP
        pitch = k.min(k.i64(STRIP), spec.k - strip) if uneven else k.i64(STRIP)
        inner = (strip * spec.n_state + (at - strip)) * 4
        self.pitch = pitch * 4
        self.a = frame.a + inner
        home = frame.states + (frame.state_off + inner)
        self.old, self.new = (home + record[name] * frame.cell_bytes for name in ("state", "next"))
        x = frame.x + record["token"] * (frame.stride * 4)
        self.x, self.z = (x + (column + at) * 4 for column in (frame.values, frame.gates))
        self.dt = frame.dt + (record["token"] * frame.dt_stride + at) * 4
        self.out = frame.out + (record["token"] * frame.out_stride + at) * 4
        bc = frame.bc + record["token"] * (frame.bc_stride * 4)
        self.b, self.c = (bc + column * 4 for column in (frame.keys, frame.queries))
        self.d = k.load_first(frame.d + at * 4, self.ty, n)

    def build(self) -> None:
        k = self.k
        n_state = self.spec.n_state
        if n_state <= SOME:
            self._numbers(k.i64(0), n_state, first=True, last=True)
            return
        before_last = (n_state - 1) // SOME * SOME
        self._numbers(k.i64(0), SOME, first=True, last=False)
        if before_last > SOME:
            with k.loop(before_last, start=SOME, step=SOME) as at:
                self._numbers(at, SOME, first=False, last=False)
        self._numbers(k.i64(before_last), n_state - before_last, first=False, last=True)

    def _numbers(self, at: Val, count: int, *, first: bool, last: bool) -> None:
        """Update ``count`` numbers of each channel's state, from number ``at`` on, for all tokens.
        The call with ``first`` starts the output's sums; the one with ``last`` applies the gate.
        """
        k = self.k
        ty = self.ty
        frame = self.frame
        n = self.n
        rows = [(at + i) * self.pitch for i in range(count)]
        state = [k.var(k.zero(ty)) for _ in rows]
        with k.if_(self.record["position"] > 0):
            for row, s in zip(rows, state, strict=True):
                s.v = k.load_first(self.old + row, ty, n)
        b = self.b + at * 4
        c = self.c + at * 4
        strides = {
            "x": frame.stride * 4,
            "dt": frame.dt_stride * 4,
            "bc": frame.bc_stride * 4,
            "out": frame.out_stride * 4,
        }
        with k.loop(self.record["n_tokens"]) as t:
            x_at = self.x + t * strides["x"]
            z_at = self.z + t * strides["x"]
            dt_at = self.dt + t * strides["dt"]
            out = self.out + t * strides["out"]
            ahead = [(x_at, strides["x"]), (dt_at, strides["dt"])]
            for row, stride in [*ahead, *([(z_at, strides["x"])] if last else [])]:
                k.prefetch(row + stride * AHEAD)  # rows are far apart
            dt = math.softplus(k, k.load_first(dt_at, ty, n))
            x = k.load_first(x_at, ty, n)
            new = dt * x
            y = x * self.d if first else k.load_first(out, ty, n)
            b_at = b + t * strides["bc"]
            c_at = c + t * strides["bc"]
            for i, (row, s) in enumerate(zip(rows, state, strict=True)):
                decay = math.exp2(k, k.load_first(self.a + row, ty, n) * dt)
                s.v = k.fma(k.splat(k.load(b_at, f32, offset=4 * i), ty), new, s.v * decay)
                y = k.fma(k.splat(k.load(c_at, f32, offset=4 * i), ty), s.v, y)
            y = y * math.silu(k, k.load_first(z_at, ty, n)) if last else y
            k.store_first(out, y, n)
        for row, s in zip(rows, state, strict=True):
            k.store_first(self.new + row, s.v, n)
