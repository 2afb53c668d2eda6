"""Recurrences: each head's state, a matrix, is updated token by token, and read by each token's
query.

An item has some columns of one head's state, and processes all tokens of a sequence in order. So
results do not depend bitwise on the number of threads, nor, one token at a time, on how a sequence
is cut into runs. The first token reads the state from its old slot and writes it to the next one: a
failed run has changed nothing.

Tokens of a block (``block``) are multiplied by the state as it was before them, and by each other
through products of their keys and queries. So the state is read once for the whole block, and their
decays are applied together (the chunks of Dao and Gu, 2024, and of Yang and others, 2024, small
enough to stay in registers and f32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any, ClassVar, NamedTuple

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Operand, Val, Var
from treadle.jit.types import Ty, f32, ptr
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.reduce import reduce_all
from treadle.kernels.run_state import LINE, PART, round_up
from treadle.kernels.spec import Args, Frame, Spec, load_record, widest

TILE = 32  # most columns of a state in an item
BLOCK = 4  # tokens at a time; their sums and keys leave registers for the state's vectors


class ScanItem(NamedTuple):
    """One item at run time: some columns of the state of ``head``, and ``n_tokens`` tokens of a
    sequence, from row ``token`` on. ``group``: whose keys and queries the head uses.
    """

    head: Val
    group: Val
    column: Val  # its first column
    source: Var  # address of its columns in the first row, for the next token to read
    state: Val  # the same, to write
    pitch: int  # bytes from one row to the next
    token: Val
    n_tokens: Val


class Token(NamedTuple):
    """One token of a head: in a kernel two numbers and three addresses, in a numpy twin arrays of
    all heads, ``[n_head, 1]`` or ``[n_head, width]``. ``decay`` is an address too if each row of a
    state has its own decay.
    """

    first: Any  # dt of Mamba-2, beta of the delta rule
    decay: Any
    value: Any
    key: Any
    query: Any


class ScanBlock(NamedTuple):
    """Tokens that are processed together, some columns at a time."""

    tokens: list[Token]
    decays: list[list[Val]]  # [t][s]: product of the decays of tokens s to t
    out: list[Val]  # address of each token's output columns
    ty: Ty
    n: int  # vectors of ty processed together


@dataclass(frozen=True)
class Scan(Spec):
    """Base of the recurrences: ``n_head`` states ``[n_state, head_dim]``, f32, consecutive;
    ``n_group`` keys and queries of ``n_state`` values a token; ``block`` tokens at a time.

    ``x``: rows of values, keys and queries, from ``values``, ``keys`` and ``queries`` on;
    ``rates``: two numbers a head, the second its state's decay (``gates.py``). Items: sequences x
    heads x tiles of columns.
    """

    args = Args(
        "x:in rates:in d:const? chunks:in? states:const out:out stride rates_stride out_stride"
        " values keys queries cell_bytes state_off"
    )
    state_at: ClassVar[int] = 0
    n_head: int
    head_dim: int
    n_state: int
    n_group: int
    block: int = 1
    passing: bool = False  # states, in whole cache lines, bypass the caches: one token a sequence

    @property
    def tile(self) -> int:
        return widest(TILE, self.head_dim)

    @property
    def tiles(self) -> int:
        return self.head_dim // self.tile

    @property
    def items(self) -> int:
        """Number of items of a sequence."""
        return self.n_head * self.tiles

    @property
    def n_decay(self) -> int:
        """Number of decays of a head's state: one, or one for each row."""
        return 1

    @property
    def staged(self) -> bool:
        """Whether an item's columns of the state are in scratch, from ``state_at`` on, during the
        item.
        """
        return self.block > 1

    def scratch(self, lanes: int) -> int:
        return 4 * self.n_state * self.tile if self.staged else 0

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        n = self.n_head * self.head_dim * self.n_state
        return 4 * n, 5 * n * n_tokens

    def group_of(self, head: Any) -> Any:
        """Return the group whose keys and queries a head uses: adjacent heads share one."""
        return head // (self.n_head // self.n_group)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        ty = f32 * min(isa.lanes, self.tile)
        with self._items(k, frame, ty) as here:
            done = self._blocks(k, isa, frame, here, ty) if self.block > 1 else k.i64(0)
            self._one_by_one(k, frame, here, ty, done)

    def _one_by_one(self, k: Builder, frame: Frame, here: ScanItem, ty: Ty, start: Operand) -> None:
        """Process the tokens of item ``here``, one at a time, from its ``start``-th on."""
        with k.loop(here.n_tokens, start=start) as t:
            token, out = self._token_at(k, frame, here, t)
            self._token(k, frame, here, ty, token, out)
            here.source.v = here.state

    def _blocks(self, k: Builder, isa: Isa, frame: Frame, here: ScanItem, ty: Ty) -> Val:
        """Process an item's tokens in whole blocks; return the number of tokens processed."""
        done = here.n_tokens // self.block * self.block
        n = max(1, min(self.tile // ty.lanes, isa.regs // (4 * self.block)))
        with k.loop(done, step=self.block) as t:
            both = [self._token_at(k, frame, here, t + i) for i in range(self.block)]
            tokens = [token for token, _ in both]
            out = [at for _, at in both]
            for token in tokens:  # those of the next block: rows are far apart
                ahead = frame.stride * (4 * self.block)
                rows = (
                    (token.value, self.tile),
                    (token.key, self.n_state),
                    (token.query, self.n_state),
                )
                for row, n_values in rows:
                    for line in range(0, 4 * n_values, LINE):
                        k.prefetch(row + (ahead + line))
            self._block(
                k, isa, frame, here, ScanBlock(tokens, self._decay_products(tokens), out, ty, n)
            )
            here.source.v = here.state
        return done

    def _decay_products(self, tokens: list[Token]) -> list[list[Val]]:
        """Return ``ScanBlock.decays``: ``[t][s]``, the product of the decays of tokens s to t."""
        left = [[token.decay] for token in tokens]
        for i, row in enumerate(left):
            for s in range(i - 1, -1, -1):
                row.insert(0, left[i - 1][s] * tokens[i].decay)
        return left

    def _decay(self, k: Builder, rates: Val, head: Val) -> Val:
        """Return a token's decay for ``head``; ``rates``: address of the head's first rate."""
        return k.load(rates, f32, offset=4 * round_up(self.n_head, COLUMNS))

    def _token_at(self, k: Builder, frame: Frame, here: ScanItem, t: Val) -> tuple[Token, Val]:
        """Return the ``t``-th token of item ``here``, and the address of its outputs in the item's
        columns.
        """
        row = here.token + t
        x = frame.x + row * frame.stride * 4
        rates = frame.rates + (row * frame.rates_stride + here.head) * 4
        first = k.load(rates, f32)
        decay = self._decay(k, rates, here.head)
        key, query = (
            x + (at + here.group * self.n_state) * 4 for at in (frame.keys, frame.queries)
        )
        values = x + (frame.values + here.column) * 4
        out = frame.out + (row * frame.out_stride + here.column) * 4
        return Token(first, decay, values, key, query), out

    @contextmanager
    def _items(self, k: Builder, frame: Frame, ty: Ty) -> Iterator[ScanItem]:
        """Loop over the items: yield each one. If the sequence has no state yet, its columns begin
        as zeros.
        """
        parts = frame.run("parts", ptr)
        with k.loop(frame.end, start=frame.begin) as item:
            record = load_record(k, parts + item // self.items * PART.itemsize, PART)
            head = item % self.items // self.tiles
            tile = item % self.tiles
            at = head * (self.n_state * self.head_dim) + tile * self.tile
            home = frame.states + (frame.state_off + at * 4)
            old, new = (home + record[name] * frame.cell_bytes for name in ("state", "next"))
            state = new
            pitch = 4 * self.head_dim
            if self.staged:
                state = frame.scratch + self.state_at
                pitch = 4 * self.tile
            source = k.var(old)
            with k.if_else(record["position"].eq(0)) as (begins, goes_on):
                with begins:
                    source.v = state
                    self._rows(k, ty, None, (state, pitch))
                with goes_on:
                    if self.staged:
                        source.v = state
                        self._rows(k, ty, (old, 4 * self.head_dim), (state, pitch))
            column = head * self.head_dim + tile * self.tile
            group = self.group_of(head)
            yield ScanItem(
                head, group, column, source, state, pitch, record["token"], record["n_tokens"]
            )
            if self.staged:
                self._rows(k, ty, (state, pitch), (new, 4 * self.head_dim))

    def _rows(
        self, k: Builder, ty: Ty, source: tuple[Val, int] | None, to: tuple[Val, int]
    ) -> None:
        """Copy an item's columns of a state from ``source`` (None: zeros) to ``to``, each an
        address and the bytes from one row to the next.
        """
        with k.loop(self.n_state) as n:
            for j in range(0, 4 * self.tile, 4 * ty.lanes):
                v = k.zero(ty)
                if source is not None:
                    v = k.load(source[0] + (n * source[1] + j), ty)
                k.store(to[0] + (n * to[1] + j), v)

    def skip(self, k: Builder, frame: Frame, here: ScanItem) -> Val | None:
        """Return the factor by which a token's own value is added to its head's output (Mamba's D),
        or None if the recurrence adds none.
        """
        return None

    def _token(
        self, k: Builder, frame: Frame, here: ScanItem, ty: Ty, token: Token, out: Val
    ) -> None:
        """Process one token of an item."""
        raise NotImplementedError

    def _block(self, k: Builder, isa: Isa, frame: Frame, here: ScanItem, block: ScanBlock) -> None:
        """Process a block of tokens of an item."""
        raise NotImplementedError

    def _dots(self, k: Builder, isa: Isa, pairs: Sequence[tuple[Val, Val]]) -> list[Val]:
        """Return the inner product of each of ``pairs``, addresses of two keys or queries of
        ``n_state`` values.
        """
        lanes, rows = isa.lanes, list(dict.fromkeys(row for pair in pairs for row in pair))
        full, rest = divmod(self.n_state, lanes)
        sums = [k.var(k.zero(f32 * lanes)) for _ in pairs]

        def step(at: Val, n: int) -> None:
            loaded = {row: k.load_first(row + at * 4, f32 * lanes, n) for row in rows}
            for (a, b), var in zip(pairs, sums, strict=True):
                var.v = k.fma(loaded[a], loaded[b], var.v)

        with k.loop(full * lanes, step=lanes) as at:
            step(at, lanes)
        if rest:
            step(k.i64(full * lanes), rest)
        return self._summed(k, lanes, sums)

    def _summed(self, k: Builder, lanes: int, sums: Sequence[Var]) -> list[Val]:
        """Return the sum of the lanes of each vector."""
        found: list[Val] = []
        for start in range(0, len(sums), lanes):
            some = [var.v for var in sums[start : start + lanes]]
            whole = reduce_all(k, some, add)
            found += [k.extract(whole, lane) for lane in range(len(some))]
        return found

    def _among(
        self, k: Builder, isa: Isa, block: ScanBlock, rows: Sequence[Val], own: int
    ) -> list[list[Val]]:
        """Return ``[t][s]``, in all lanes: the weight of token s's update for ``rows[t]`` (a key or
        query of token t), which is their inner product times the decays after s. s < t; with
        ``own`` 1 also s = t.
        """
        n = len(rows)
        pairs = [(t, s) for t in range(n) for s in range(t + own)]
        dots = self._dots(k, isa, [(rows[t], block.tokens[s].key) for t, s in pairs])
        among: list[list[Val]] = [[] for _ in rows]
        for (t, s), dot in zip(pairs, dots, strict=True):
            among[t].append(k.splat(dot if s == t else dot * block.decays[t][s + 1], block.ty))
        return among

    def _times_state(
        self, k: Builder, here: ScanItem, block: ScanBlock, at: int, rows: Sequence[Val]
    ) -> list[list[Val]]:
        """Return the products of ``rows``, each of ``n_state`` values, with the state's columns
        from ``at`` on: ``[row][vector of columns]``.
        """
        seen = [[k.var(k.zero(block.ty)) for _ in range(block.n)] for _ in rows]
        source = here.source.v + 4 * at
        size = 4 * block.ty.lanes
        with k.loop(self.n_state) as n:
            home = source + n * here.pitch
            s = [k.load(home + size * j, block.ty) for j in range(block.n)]
            for row, vars_ in zip(rows, seen, strict=True):
                by = k.splat(k.load(row + n * 4, f32), block.ty)
                for j, var in enumerate(vars_):
                    var.v = k.fma(s[j], by, var.v)
        return [[var.v for var in vars_] for vars_ in seen]

    def _update_state(
        self, k: Builder, here: ScanItem, block: ScanBlock, at: int, new: list[list[Val]]
    ) -> None:
        """Update the state's columns from ``at`` on after a block: multiply them by the block's
        decays, and add ``key new^T`` of each token, times the decays after it.
        """
        ty = block.ty
        left = block.decays[-1]
        keep = k.splat(left[0], ty)
        kept = [*left[1:], None]  # remaining decay of what each token adds; None for the last: 1
        new = [
            vectors if part is None else [v * k.splat(part, ty) for v in vectors]
            for vectors, part in zip(new, kept, strict=True)
        ]
        keys = [token.key for token in block.tokens]
        self._keep_and_add(k, here, block, at, lambda n: keep, keys, new)

    def _keep_and_add(
        self,
        k: Builder,
        here: ScanItem,
        block: ScanBlock,
        at: int,
        keep: Callable[[Val], Val],
        keys: Sequence[Val],
        new: list[list[Val]],
    ) -> None:
        """Update the state's columns from ``at`` on: multiply row n by ``keep(n)``, and add to it,
        for each of ``keys``, the key's n-th value times the key's vectors of columns in ``new``.
        """
        ty = block.ty
        source = here.source.v + 4 * at
        size = 4 * block.ty.lanes
        with k.loop(self.n_state) as n:
            home = n * here.pitch
            kept = keep(n)
            s = [k.load(source + (home + size * j), ty) * kept for j in range(block.n)]
            for key, vectors in zip(keys, new, strict=True):
                by = k.splat(k.load(key + n * 4, f32), ty)
                s = [k.fma(v, by, x) for v, x in zip(vectors, s, strict=True)]
            for j, x in enumerate(s):
                k.store(here.state + (home + 4 * at + size * j), x)

    def _decay_factor(self, k: Builder, token: Token, ty: Ty) -> Callable[[Val], Val]:
        """Return a function ``keep(n)``: the factor by which the update for ``token`` multiplies
        row n of the state. In this class it is the same for all rows.
        """
        keep = k.splat(token.decay, ty)
        return lambda n: keep

    def _step(self, k: Builder, here: ScanItem, ty: Ty, token: Token, add: list[Val]) -> list[Val]:
        """Process one token: multiply the state by its decay, add ``key add^T``, and return the
        product of its query with the new state. ``add``: the update of each vector of columns.
        """
        keep = self._decay_factor(k, token, ty)
        seen = [k.var(k.zero(ty)) for _ in add]
        source = here.source.v
        with k.loop(self.n_state) as n:
            kept = keep(n)
            b, c = (k.splat(k.load(at + n * 4, f32), ty) for at in (token.key, token.query))
            row = n * here.pitch
            for j, (new, y) in enumerate(zip(add, seen, strict=True)):
                at = row + 4 * ty.lanes * j
                s = k.fma(new, b, k.load(source + at, ty) * kept)
                (k.store_passing if self.passing else k.store)(here.state + at, s)
                y.v = k.fma(s, c, y.v)
        return [y.v for y in seen]

    def run_ref(self, args: Any, run: Any) -> None:
        x, out = (a.reshape(-1, n) for a, n in ((args.x, args.stride), (args.out, args.out_stride)))
        rates = args.rates.reshape(-1, args.rates_stride)
        pad = round_up(self.n_head, COLUMNS)
        n_keys = self.n_group * self.n_state
        n_values = self.n_head * self.head_dim
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
                first = rates[t, : self.n_head].astype(np.float64)[:, None]
                decay = rates[t, pad : pad + self.n_head * self.n_decay].astype(np.float64)
                decay = decay.reshape(self.n_head, self.n_decay)
                token = Token(first, decay, value, key, query)
                s, y = self._token_ref(s, token, args.d)
                out[t, :n_values] = y.ravel()
            new[:] = s.ravel()

    def _token_ref(self, s: np.ndarray, token: Token, d: Any) -> tuple[np.ndarray, np.ndarray]:
        """Process one token of a sequence for all heads: return the states after it ``[n_head,
        n_state, head_dim]``, made of ``s``, and the outputs ``[n_head, head_dim]``; ``d``: Mamba's
        D, or None. The numpy twin of ``_token``.
        """
        raise NotImplementedError
