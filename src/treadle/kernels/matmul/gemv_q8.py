"""gemv in bytes: the blocks of some rows times some tokens; see ``gemv.py``.

Activations of two bytes (``q8x2``) are two dots of bytes, ``dot(code, high) * 128 + dot(code,
low)``, with the scales of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import Ty, f32, i8, i32
from treadle.kernels.activation_layout import BLOCK, BYTES, LOW_BITS, block_sums, scaled_comp
from treadle.kernels.format_blocks import (
    BlockAddress,
    across_scales,
    load_scale_run,
    scales_of,
    unpack_codes,
)
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.prefetch import Neighbours, PrefetchRuns
from treadle.kernels.reduce import reduce_all


def accumulators(k: Builder, spec: Matmul, lanes: int) -> list[list[Var]]:
    """Return new f32 variables ``[row][token]``, vectors of ``lanes`` zeros: ``spec.mr`` rows,
    ``spec.nr`` tokens.
    """
    return [[k.var(k.zero(f32 * lanes)) for _ in range(spec.nr)] for _ in range(spec.mr)]


def prepared_bytes(k: int, n_parts: int) -> int:
    """Return an upper bound of the bytes of scratch for one token's operands over ``k`` values:
    ``n_parts`` int8 parts of its values, scales, compensations and sums.
    """
    return (3 + n_parts) * k + 64


class Q8:
    """Products of rows with tokens, as many blocks at a time as fill a register with codes, the
    last ones singly. The operands of tokens, which all rows share, are prepared once, in scratch.
    """

    def __init__(self, k: Builder, spec: Matmul, tokens: list[Val], scratch: Val) -> None:
        fmt = spec.fmt
        assert fmt.codes is not None
        width = fmt.block // len(fmt.codes.order)  # codes of one block in a vector
        at_once = max(1, k.isa.vector_bits // 8 // width)
        n_blocks = spec.k // fmt.block
        whole = n_blocks // at_once * at_once
        self.runs: list[BlockRun] = []
        used = 0
        for n, first, end in ((at_once, 0, whole), (1, whole, n_blocks)):
            if first < end:
                run = BlockRun(k, spec, tokens, n, first, (end - first) // n, scratch + used)
                self.runs.append(run)
                used += run.n_bytes
        assert used <= spec.nr * prepared_bytes(spec.k, BYTES[spec.act]), spec.name

    def dot(self, rows: list[BlockAddress], ahead: Neighbours | PrefetchRuns) -> list[list[Val]]:
        """Return the products f32 ``[row][token]`` of ``rows`` with all tokens; ``ahead``
        prefetches their blocks.
        """
        totals = [run.dot(rows, ahead) for run in self.runs]
        return [
            [reduce(add, parts) for parts in zip(*row, strict=True)]
            for row in zip(*totals, strict=True)
        ]


class BlockRun:
    """Products over part of each row: ``count`` times ``n`` blocks, from block ``first`` on. The
    operands of the tokens (``BlockSums.operands``) are prepared in memory at ``scratch``.
    """

    def __init__(
        self,
        k: Builder,
        spec: Matmul,
        tokens: list[Val],
        n: int,
        first: int,
        count: int,
        scratch: Val,
    ) -> None:
        self.k = k
        self.spec = spec
        self.tokens = tokens
        self.n = n
        self.first = first
        self.count = count
        self.scratch = scratch
        self.types: list[Ty] = []
        self._prepare()

    @property
    def n_bytes(self) -> int:
        """Bytes of all tokens' operands."""
        return self.count * len(self.tokens) * sum(ty.n_bytes for ty in self.types)

    def _prepare(self) -> None:
        k = self.k
        blocks = BlockSums(k, self.spec, self.n, self.scratch)
        with k.loop(self.count) as i:
            for t, token in enumerate(self.tokens):
                operands = blocks.operands(token, i * self.n + self.first)
                self.types = [v.ty for v in operands]
                for place, v in zip(self._places(i, t), operands, strict=True):
                    k.store(place, v)

    def _places(self, i: Val, t: int) -> list[Val]:
        """Return the addresses of the ``t``-th token's operands for the ``i``-th ``n`` blocks. All
        tokens' operands for the same blocks are adjacent.
        """
        sizes = [ty.n_bytes for ty in self.types]
        at = self.scratch + (i * len(self.tokens) + t) * sum(sizes)
        return [at + sum(sizes[:j]) for j in range(len(sizes))]

    def _operands(self, i: Val) -> list[list[Val]]:
        places = [self._places(i, t) for t in range(len(self.tokens))]
        return [
            [self.k.load(p, ty) for p, ty in zip(mine, self.types, strict=True)] for mine in places
        ]

    def dot(self, rows: list[BlockAddress], ahead: Neighbours | PrefetchRuns) -> list[list[Val]]:
        """Return the products f32 ``[row][token]`` of these blocks of ``rows`` with all tokens;
        ``ahead`` prefetches the blocks.
        """
        k = self.k
        blocks = BlockSums(k, self.spec, self.n, self.scratch)
        with k.loop(self.count) as i:
            if not self.first:  # those of the other runs are few
                ahead.fetch(i, self.n)
            blocks.add(rows, lambda: self._operands(i), i * self.n + self.first)
        return blocks.totals()


@dataclass(frozen=True)
class CodeVector:
    """One register of codes, four in each lane: the ``part``-th of the registers that the
    ``vector``-th vector of unpacked codes fills.
    """

    vector: int
    part: int
    # By lane a number f: the codes in the lane are those of values 4 f to 4 f + 3 of the blocks.
    fours: list[int]
    subs: tuple[int, ...]  # the number of each lane's scale, over all blocks
    starts: list[int]  # at the first lane of a scale its number, else one past the last number


class BlockSums:
    """Sums of the products of ``n`` blocks at a time. A block's lanes are adjacent; for n = 2::

        dots    i32   b0 b0 b0 b0 | b1 b1 b1 b1
        scales  f32   d0 d0 d0 d0 | d1 d1 d1 d1      (CodeVector.subs)
        comps   i32   c0  0  0  0 | c1  0  0  0      (CodeVector.starts)

    ``comps`` are the compensations of the weights' zero point (``ActivationLayout``); sums of
    values, for minimums, are placed like them.

    Where dots are added up in i16, blocks have one scale, and four rows' scales of two blocks fill
    a register (``across``), these are unpacked together. Each row's scales are then spread from
    that register, and products of minimums or offsets are those of all four rows::

        scales  f32   r0 r1 r2 r3 | r0 r1 r2 r3
    """

    def __init__(self, k: Builder, spec: Matmul, n: int, scratch: Val) -> None:
        assert spec.fmt.codes is not None
        self.k = k
        self.isa = k.isa
        self.spec = spec
        self.n = n
        self.act = spec.layout()
        self.n_parts = BYTES[spec.act]
        self.scratch = scratch
        self.fmt = spec.fmt
        self.codes = spec.fmt.codes
        # Codes too large for a dot of signed bytes are made signed, by one addition each.
        signed = self.codes.top > k.isa.dot4_top and k.isa.dot4_least <= -self.codes.offset
        self.less = self.codes.offset if signed else 0
        self.offset = self.codes.offset - self.less
        self.n_subs = n * self.fmt.block // self.codes.sub
        self.n_fours = n * self.fmt.block // 4
        self.pieces = self._plan()
        kinds = {piece.subs: piece for piece in reversed(self.pieces)}
        self.firsts = [piece for piece in self.pieces if kinds[piece.subs] is piece]
        self.sums = accumulators(k, spec, len(self.pieces[0].fours))
        n_scales = spec.mr * self.n_subs
        one_scale = self.fmt.block == self.codes.sub == BLOCK
        fits = n > 1 and n_scales == k.isa.lanes
        self.across = one_scale and fits and k.isa.shorts is not None
        # One accumulator for all rows, with a lane for each of their scales.
        self.apart = self.codes.minimums or (self.across and (self.codes.has_m or self.offset > 0))
        if self.apart:
            self.minimums = [k.var(k.zero(f32 * n_scales)) for _ in range(spec.nr)]

    def _plan(self) -> list[CodeVector]:
        lanes = self.isa.lanes
        seen = set[int]()
        pieces = []
        for v, fours in enumerate(self.codes.groups(self.fmt.block, self.n)):
            for part in range(-(-len(fours) // lanes)):
                held = fours[part * lanes : (part + 1) * lanes]
                subs = tuple(g * 4 // self.codes.sub for g in held)
                starts = []
                for sub in subs:
                    starts.append(self.n_subs if sub in seen else sub)
                    seen.add(sub)
                pieces.append(CodeVector(v, part, held, subs, starts))
        return pieces

    def operands(self, token: Val, b: Val) -> list[Val]:
        """Return the operands of the token at ``token`` for the blocks from ``b`` on, the same for
        all rows, as a list: its values for each code vector, the high parts first; its scales;
        compensations if there is an offset; sums of values if there are minimums.

        Scales are spread to lanes, one vector for each different ``CodeVector.subs``; or one vector
        for all lanes, if the format's scales are unpacked by ``Codes.scales`` or ``across`` rows.
        """
        k = self.k
        codes = self.codes
        n_subs = self.n_subs
        act = self.act
        base = b * self.fmt.block
        per = BLOCK // self.codes.sub
        places = [token + (act.low_off * part + base) for part in range(self.n_parts)]
        out = [self._values(at, piece.fours) for at in places for piece in self.pieces]
        d = k.load(token + (base // BLOCK) * 4, f32 * max(1, n_subs // per), offset=act.d_off)
        d = k.shuffle(d, d, [i // per for i in range(n_subs)]) if per > 1 else d
        comp = k.load(token + (base // codes.sub) * 4, i32 * n_subs, offset=act.comp_off)
        if self.across:
            lanes = [sub for sub in range(n_subs) for _ in range(self.spec.mr)]
            terms = [d]
            terms += [scaled_comp(self.offset, comp).to(f32)] if self.offset else []
            terms += [block_sums(k, comp, d)] if codes.has_m else []
            return out + [k.shuffle(term, term, lanes) for term in terms]
        out += [d] if codes.scales else [k.shuffle(d, d, piece.subs) for piece in self.firsts]
        if self.offset:
            scaled = scaled_comp(self.offset, comp)
            out += [k.shuffle(scaled, k.zero(comp.ty), p.starts) for p in self.firsts]
        if codes.has_m:
            sums = block_sums(k, comp, d)
            once = k.shuffle(sums, k.zero(sums.ty), self.pieces[0].starts)
            out.append(sums if codes.scales else once)
        return out

    def add(
        self, rows: list[BlockAddress], operands_of: Callable[[], list[list[Val]]], b: Val
    ) -> None:
        """Add the products of the ``n`` blocks from ``b`` on of ``rows`` to the sums.
        ``operands_of`` returns the operands of each token, loaded anew.
        """
        k = self.k
        codes = self.codes
        starts = [row.block(b) for row in rows]
        operands = operands_of()
        scales: list[Val] | None = None
        if self.across:
            scales = self._scales_across(starts, operands)
        elif codes.scales:
            scales = self._scales(starts, operands)
        # Two parts of several vectors leave few registers: operands stay in memory.
        anew = self.n_parts > 1 and self.isa.memory_operands
        for r, at in enumerate(starts):
            if anew and r:
                k.fence(self.scratch)
                operands = operands_of()
            vectors = [self._split_registers(v) for v in self._codes(at)]
            for t, given in enumerate(operands):
                values = iter(given)
                xs = [[next(values) for _ in self.pieces] for _ in range(self.n_parts)]
                d = [next(values) for _ in range(1 if scales else len(self.firsts))]
                begins = self.offset and not self.across
                comps = [next(values) for _ in self.firsts] if begins else []
                dots = self._dots(vectors, xs, comps)
                for i, (subs, dot) in enumerate(dots.items()):
                    if scales is not None:
                        lanes = [self._lane(r, sub) for sub in subs]
                        scale = k.shuffle(scales[t], scales[t], lanes)
                    else:
                        scale = self._loaded(at, codes.d, subs) * d[i]
                    self.sums[r][t].v = k.fma(dot.to(f32), scale, self.sums[r][t].v)
                if codes.m and not self.across:  # a minimum's product is in one lane of its block
                    m = self._loaded(at, codes.m, self.pieces[0].subs)
                    self.sums[r][t].v = k.fma(m, next(values), self.sums[r][t].v)
                    if anew:
                        self.sums[r][t].v = k.pin(self.sums[r][t].v, "v")

    def _dots(
        self, vectors: list[list[Val]], xs: list[list[Val]], comps: list[Val]
    ) -> dict[tuple[int, ...], Val]:
        """Return the i32 dots of the codes ``vectors`` with a token's values ``xs``: a vector of
        dots for each different ``CodeVector.subs``, which is its key. They begin with ``comps`` if
        there are any.

        ``vectors[vector][part]`` is the register of a CodeVector; ``xs[i]`` the i-th parts of the
        values, the high ones first, for each CodeVector.
        """
        k = self.k
        shorts = self.isa.shorts
        if (self.n_parts > 1 or self.across) and shorts is not None:
            room = shorts.room(self.codes.top - self.less)
            if room:
                return self._short_dots(room, vectors, xs, comps)
        dots = {p.subs: k.zero(i32 * len(p.fours)) for p in self.firsts}
        for part, mine in enumerate(xs, 1):
            if part > 1:
                dots = {subs: dot << LOW_BITS for subs, dot in dots.items()}
            if part == self.n_parts and comps:
                pairs = zip(dots.items(), comps, strict=True)
                dots = {subs: comp if part == 1 else dot + comp for (subs, dot), comp in pairs}
            for piece, x in zip(self.pieces, mine, strict=True):
                w = vectors[piece.vector][piece.part]
                top = self.codes.top - self.less
                dots[piece.subs] = self.isa.dot4(k, dots[piece.subs], w, x, top)
        return dots

    def _short_dots(
        self, room: int, vectors: list[list[Val]], xs: list[list[Val]], comps: list[Val]
    ) -> dict[tuple[int, ...], Val]:
        """Return what ``_dots`` returns, computed in i16: up to ``room`` dots are added up there
        before they are added in i32.
        """
        k = self.k
        shorts = self.isa.shorts
        assert shorts is not None
        dots: dict[tuple[int, ...], Val] = {}
        for i, first in enumerate(self.firsts):
            total = comps[i] if comps else k.zero(i32 * len(first.fours))
            alike = [p for p, piece in enumerate(self.pieces) if piece.subs == first.subs]
            for part, mine in enumerate(xs):
                for at in range(0, len(alike), room):
                    short: Val | None = None
                    for p in alike[at : at + room]:
                        w = vectors[self.pieces[p].vector][self.pieces[p].part]
                        short = shorts.dot(k, short, w, mine[p])
                    assert short is not None
                    if part < self.n_parts - 1:  # the high parts
                        factor = k.const(1 << LOW_BITS, short.ty)
                        total = shorts.scale(k, total, short, factor)
                    else:
                        total = shorts.widen(k, total, short)
            dots[first.subs] = total
        return dots

    def _codes(self, at: BlockAddress) -> list[Val]:
        """Return the codes of the ``n`` blocks from ``at`` on as the dots take them, made signed if
        ``less`` is not 0.
        """
        vectors = unpack_codes(self.k, self._blocks(at))
        return [(v - self.less).bits(i8.like(v.ty)) for v in vectors] if self.less else vectors

    def _blocks(self, at: BlockAddress) -> list[BlockAddress]:
        return [at.block(i) for i in range(self.n)]

    def _scales(self, starts: list[BlockAddress], operands: list[list[Val]]) -> list[Val]:
        """Return, for each token, one vector: the scales of all rows' blocks, which begin at
        ``starts``, times the token's own scales from its ``operands``. Add the minimums' products
        to ``minimums``.

        Scales are few and take many instructions to unpack; those of all rows together fill a
        register.
        """
        k = self.k
        rows = len(starts)
        d, m = scales_of(k, [p for at in starts for p in self._blocks(at)], self.n)
        every = [*range(self.n_subs)] * rows
        out = []
        for t, given in enumerate(operands):
            dx = given[self.n_parts * len(self.pieces)]
            out.append(d * k.shuffle(dx, dx, every))
            if m is not None:
                sums = k.shuffle(given[-1], given[-1], every)
                self.minimums[t].v = k.fma(m, sums, self.minimums[t].v)
        return out

    def _scales_across(self, starts: list[BlockAddress], operands: list[list[Val]]) -> list[Val]:
        """Return what ``_scales`` returns, for formats with one scale a block and perhaps a
        minimum. Add the products of minimums or of an offset to ``minimums``.

        The rows' scales of one block are in the lanes of one half, so that a row's are spread
        within each half.
        """
        k = self.k
        d, m = across_scales(k, [at.block(i) for i in range(self.n) for at in starts])
        out = []
        for t, given in enumerate(operands):
            dx, *terms = given[self.n_parts * len(self.pieces) :]
            out.append(d * dx)
            factors = [out[-1]] * (self.offset > 0) + ([] if m is None else [m])
            for factor, term in zip(factors, terms, strict=True):
                self.minimums[t].v = k.fma(factor, term, self.minimums[t].v)
        return out

    def _lane(self, r: int, sub: int) -> int:
        """Return the lane of scale number ``sub`` of row ``r`` in the vector that ``_scales`` or
        ``_scales_across`` returns.
        """
        return sub * self.spec.mr + r if self.across else r * self.n_subs + sub

    def _loaded(self, at: BlockAddress, field: str, subs: tuple[int, ...]) -> Val:
        return load_scale_run(self.k, at, self.n, field, subs)

    def _split_registers(self, vector: Val) -> list[Val]:
        width = min(vector.ty.lanes, 4 * self.isa.lanes)
        return self.k.split(vector, width)

    def _values(self, at: Val, fours: list[int]) -> Val:
        """Load the activations for a vector of codes, i8, from the blocks' values at ``at``;
        ``fours``: as in ``CodeVector``.
        """
        k = self.k
        n = len(fours)
        if fours == list(range(fours[0], fours[0] + n)):
            return k.load(at, i8 * (4 * n), offset=4 * fours[0])
        half = n // 2
        if fours[:half] == list(range(fours[0], fours[0] + half)) and fours[half:] == list(
            range(fours[half], fours[half] + half)
        ):
            return k.concat(
                *(k.load(at, i8 * (2 * n), offset=4 * f) for f in (fours[0], fours[half]))
            )
        whole = k.load(at, i32 * self.n_fours)
        return k.shuffle(whole, whole, fours).bits(i8 * (4 * n))

    def totals(self) -> list[list[Val]]:
        """Return the products ``[row][token]``, scalars: each the total of a sum's lanes, with
        minimums.
        """
        k = self.k
        rows = self.spec.mr
        out: list[list[Val]] = [[] for _ in range(rows)]
        for t in range(self.spec.nr):
            sums = [self.sums[r][t].v for r in range(rows)]
            if self.apart:
                sums = [self._add_minimums(s, self.minimums[t].v, r) for r, s in enumerate(sums)]
            lanes = sums[0].ty.lanes  # as many as fit one reduction
            for first in range(0, rows, lanes):
                some = sums[first : first + lanes]
                reduced = reduce_all(k, some, lambda a, b: a + b)
                for r in range(len(some)):
                    out[first + r].append(k.extract(reduced, r))
        return out

    def _add_minimums(self, total: Val, minimums: Val, r: int) -> Val:
        """Return ``total``, the sums of row ``r``, plus that row's lanes of ``minimums``, in as
        many lanes as ``total`` has.
        """
        k = self.k
        n = self.n_subs
        lanes = total.ty.lanes
        mine = k.split(
            k.shuffle(minimums, minimums, [self._lane(r, i) for i in range(n)]), min(n, lanes)
        )
        for part in mine:
            if n < lanes:
                part = k.shuffle(part, k.zero(part.ty), [min(i, n) for i in range(lanes)])
            total = total + part
        return total
