"""Recurrences: each head's state, a matrix, goes from token to token, and is seen by each.

An item has some columns of one head's state, and takes all tokens of a part in order: so bits do
not depend on how a text is cut into runs, nor on the number of threads. The first token reads the
state from its old place and writes it to the next one: a run that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np

from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import Ty, f32, ptr
from treadle.kernels.matmul import COLUMNS
from treadle.kernels.spec import PART, Args, Frame, Spec, load_record, round_up, widest
from treadle.record import dataclass

TILE = 32  # columns of a state that one item handles, at most


class Here(NamedTuple):
    """What an item works on, at run time."""

    head: Val
    group: Val
    column: Val  # where its columns begin
    source: Var  # its columns of the first row: where a token finds them,
    state: Val  # and where it leaves them
    token: Val
    n_tokens: Val


class Token(NamedTuple):
    """One token of a head: in a kernel two numbers and three addresses, in a twin arrays of all
    heads, ``[n_head]`` or ``[n_head, width]``.
    """

    first: Any  # dt of Mamba-2, beta of the delta rule
    decay: Any
    value: Any
    key: Any
    query: Any


@dataclass(frozen=True)
class Scan(Spec):
    """What both recurrences have: ``n_head`` states ``[n_state, head_dim]``, f32, one behind
    another; ``n_group`` keys and queries of ``n_state`` values a token.

    ``x``: rows of values, keys and queries, from ``values``, ``keys`` and ``queries`` on;
    ``rates``: two numbers a head, the second is what its state is multiplied by
    (``kernels/rates.py``). Items: parts x heads x tiles of columns.
    """

    args = Args(
        "x:in rates:in d:const? states:const out:out stride rates_stride out_stride"
        " values keys queries cell_bytes state_off"
    )
    n_head: int
    head_dim: int
    n_state: int
    n_group: int

    @property
    def tile(self) -> int:
        return widest(TILE, self.head_dim)

    @property
    def tiles(self) -> int:
        return self.head_dim // self.tile

    @property
    def items(self) -> int:
        """Of a part."""
        return self.n_head * self.tiles

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        n = self.n_head * self.head_dim * self.n_state
        return 4 * n, 5 * n * n_tokens

    def group_of(self, head: Any) -> Any:
        """Whose keys and queries a head has: neighbours share them."""
        return head // (self.n_head // self.n_group)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        width = min(isa.lanes, self.tile)
        with self._items(k, frame, f32 * width) as here, k.loop(here.n_tokens) as t:
            row = here.token + t
            x = frame.x + row * frame.stride * 4
            rates = frame.rates + (row * frame.rates_stride + here.head) * 4
            first = k.load(rates, f32)
            decay = k.load(rates, f32, offset=4 * round_up(self.n_head, COLUMNS))
            key, query = (
                x + (at + here.group * self.n_state) * 4 for at in (frame.keys, frame.queries)
            )
            values = x + (frame.values + here.column) * 4
            out = frame.out + (row * frame.out_stride + here.column) * 4
            token = Token(first, decay, values, key, query)
            self._token(k, frame, here, f32 * width, token, out)
            here.source.v = here.state

    @contextmanager
    def _items(self, k: Builder, frame: Frame, ty: Ty) -> Iterator[Here]:
        """Each item; a text that begins finds zeros."""
        parts = frame.run("parts", ptr)
        with k.loop(frame.end, start=frame.begin) as item:
            record = load_record(k, parts + item // self.items * PART.itemsize, PART)
            head, tile = item % self.items // self.tiles, item % self.tiles
            at = head * (self.n_state * self.head_dim) + tile * self.tile
            home = frame.states + (frame.state_off + at * 4)
            old, new = (home + record[name] * frame.cell_bytes for name in ("state", "next"))
            source = k.var(old)
            with k.if_(record["position"].eq(0)):
                source.v = new
                with k.loop(self.n_state) as n:
                    for j in range(0, self.tile, ty.lanes):
                        k.store(new + (n * (4 * self.head_dim) + 4 * j), k.zero(ty))
            column, group = head * self.head_dim + tile * self.tile, self.group_of(head)
            yield Here(head, group, column, source, new, record["token"], record["n_tokens"])

    def _token(self, k: Builder, frame: Frame, here: Here, ty: Ty, token: Token, out: Val) -> None:
        """One token of an item."""
        raise NotImplementedError

    def _step(self, k: Builder, here: Here, ty: Ty, token: Token, add: list[Val]) -> list[Val]:
        """The state becomes ``decay`` of itself and ``key add^T``; gives what ``query`` sees."""
        keep, seen = k.splat(token.decay, ty), [k.var(k.zero(ty)) for _ in add]
        source = here.source.v
        with k.loop(self.n_state) as n:
            b, c = (k.splat(k.load(at + n * 4, f32), ty) for at in (token.key, token.query))
            row = n * (4 * self.head_dim)
            for j, (new, y) in enumerate(zip(add, seen, strict=True)):
                at = row + 4 * ty.lanes * j
                s = k.fma(new, b, k.load(source + at, ty) * keep)
                k.store(here.state + at, s)
                y.v = k.fma(s, c, y.v)
        return [y.v for y in seen]

    def run_ref(self, args: Any, run: Any) -> None:
        x, out = (a.reshape(-1, n) for a, n in ((args.x, args.stride), (args.out, args.out_stride)))
        rates, pad = args.rates.reshape(-1, args.rates_stride), round_up(self.n_head, COLUMNS)
        n_keys, n_values = self.n_group * self.n_state, self.n_head * self.head_dim
        shape = self.n_head, self.n_state, self.head_dim
        group = np.array([self.group_of(head) for head in range(self.n_head)])
        for part in run.parts:
            old, new = (
                args.states[int(part[name]) * args.cell_bytes + args.state_off :][
                    : 4 * n_values * self.n_state
                ].view(np.float32)
                for name in ("state", "next")
            )
            s = old.reshape(shape).astype(np.float64) if part["position"] else np.zeros(shape)
            for t in range(int(part["token"]), int(part["token"] + part["n_tokens"])):
                row = x[t].astype(np.float64)
                key, query = (
                    row[at : at + n_keys].reshape(self.n_group, -1)[group]
                    for at in (args.keys, args.queries)
                )
                value = row[args.values : args.values + n_values].reshape(self.n_head, -1)
                first, decay = (
                    rates[t, at : at + self.n_head].astype(np.float64)[:, None] for at in (0, pad)
                )
                token = Token(first, decay, value, key, query)
                s, y = self._token_ref(s, token, args.d)
                out[t, :n_values] = y.ravel()
            new[:] = s.ravel()

    def _token_ref(self, s: np.ndarray, token: Token, d: Any) -> tuple[np.ndarray, np.ndarray]:
        """The next states ``[n_head, n_state, head_dim]``, and what is seen of them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mamba2(Scan):
    """``s = decay s + key (dt value)^T``; out ``query s + d value`` (Dao and Gu, 2024)."""

    op: ClassVar[str] = "mamba2"

    @property
    def needs(self) -> set[str]:
        return self.args.required | {"d"}

    def _token(self, k: Builder, frame: Frame, here: Here, ty: Ty, token: Token, out: Val) -> None:
        columns = range(0, self.tile, ty.lanes)
        x = [k.load(token.value + 4 * j, ty) for j in columns]
        dt = k.splat(token.first, ty)
        seen = self._step(k, here, ty, token, [v * dt for v in x])
        d = k.splat(k.load(frame.d + here.head * 4, f32), ty)
        for j, v, y in zip(columns, x, seen, strict=True):
            k.store(out + 4 * j, k.fma(v, d, y))

    def _token_ref(self, s: np.ndarray, token: Token, d: Any) -> tuple[np.ndarray, np.ndarray]:
        new = (token.first * token.value)[:, None]
        s = s * token.decay[:, None] + token.key[:, :, None] * new
        skip = d[: self.n_head].astype(np.float64)[:, None] * token.value
        return s, np.einsum("hn,hnp->hp", token.query, s) + skip


@dataclass(frozen=True)
class Delta(Scan):
    """``s = decay s + key (beta (value - key decay s))^T``; out ``query s`` (Yang and others,
    2024). Heads take keys in turn, unless they are ``grouped``.
    """

    op: ClassVar[str] = "delta"
    grouped: bool = False

    def group_of(self, head: Any) -> Any:
        return super().group_of(head) if self.grouped else head % self.n_group

    def _token(self, k: Builder, frame: Frame, here: Here, ty: Ty, token: Token, out: Val) -> None:
        columns = range(0, self.tile, ty.lanes)
        known = [k.var(k.zero(ty)) for _ in columns]
        beta, keep = k.splat(token.first, ty), k.splat(token.decay, ty)
        source = here.source.v
        with k.loop(self.n_state) as n:
            row = source + n * (4 * self.head_dim)
            b = k.splat(k.load(token.key + n * 4, f32), ty)
            for j, y in zip(columns, known, strict=True):
                y.v = k.fma(k.load(row + 4 * j, ty), b, y.v)
        add = [
            (k.load(token.value + 4 * j, ty) - y.v * keep) * beta
            for j, y in zip(columns, known, strict=True)
        ]
        for j, sees in zip(columns, self._step(k, here, ty, token, add), strict=True):
            k.store(out + 4 * j, sees)

    def _token_ref(self, s: np.ndarray, token: Token, d: Any) -> tuple[np.ndarray, np.ndarray]:
        s = s * token.decay[:, None]
        add = token.first * (token.value - np.einsum("hn,hnp->hp", token.key, s))
        s = s + token.key[:, :, None] * add[:, None]
        return s, np.einsum("hn,hnp->hp", token.query, s)
