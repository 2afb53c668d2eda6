"""Scale search of K-quants as a kernel: base of ``offset.py``, ``signed.py`` and ``ladder.py``.
``formats/k_search.py`` describes the method, and is the numpy twin. A small block, as of Q4_0, is a
super-block of one sub-block.

A lane is a super-block: its weights, scales and sums stay in that lane throughout, so nothing is
added across lanes and no step waits for another. An item is as many super-blocks as a vector has
lanes. Scratch holds them as columns: vector i of ``x`` is weight i of every lane.

The twin rounds each product before it is added; a kernel's FMA does not. So if two candidates are
almost equal, kernel and twin may choose differently, and descend from different candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import by_name
from treadle.formats.k_search import CLOSE, F16_MAX, LEAST, ROUNDS, STEPS
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, u8
from treadle.kernels.quantize.columns import (
    ScratchColumns,
    adjacent_f16,
    inverse,
    near_f16,
    rounded,
)
from treadle.kernels.spec import Args, Frame, Spec, parts
from treadle.kernels.transpose import transpose


@dataclass(frozen=True)
class SearchKernel(Spec):
    """Base of the searches: find the scales and codes of format ``w`` for the weights ``x f32 [n,
    block]``. ``aware``: errors are weighted by ``importance f32 [n, block]``.

    Writes ``d`` (and ``dmin``) f32 ``[padded]``, ``codes`` bytes ``[padded, block]``, and a
    sub-block's integers (``sc``, and ``m``) bytes ``[items, n_sub, lanes]``; padded is items times
    lanes. Items: as many super-blocks as a vector of f32 has lanes.
    """

    args = Args("x:in importance:in? d:out dmin:out? sc:out m:out? codes:out n")
    scales: ClassVar[tuple[str, ...]]  # names of the f16 factors, in the order of ``args``
    integers: ClassVar[tuple[str, ...]]  # a sub-block's integers: as many, in the same order
    final_moves: ClassVar[tuple[tuple[int, ...], ...]]  # final moves to adjacent f16 scales
    final_steps: ClassVar[tuple[int, ...]]
    result_type: ClassVar[Any]  # the twin's result class
    least: ClassVar[float] = LEAST
    byte: ClassVar[Any]  # numpy type of integers and codes
    w: str
    aware: bool = False

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"importance"} if self.aware else set()) | set(self.scales)

    @property
    def how(self) -> Any:
        """The format's search object (in ``formats/``): it has the candidates to try."""
        return by_name(self.w).search

    @property
    def block(self) -> int:
        """Number of weights in a super-block."""
        return by_name(self.w).block

    @property
    def n_sub(self) -> int:
        n: int = self.how.n_sub
        return n

    @property
    def length(self) -> int:
        """Number of weights in a sub-block."""
        return self.block // self.n_sub

    def sizes(self) -> dict[str, int]:
        """Return the number of vectors of each array in scratch, by name. Prefix ``best_``: the
        best result so far; ``try_``: the start of a step; ``new_``: the result of a step.
        """
        each = [f"{kind}_{name}" for kind in ("best", "try", "new") for name in self.integers]
        ones = [f"{kind}_{name}" for kind in ("best", "try") for name in self.scales]
        sizes = {"x": self.block, **dict.fromkeys(each, self.n_sub), **dict.fromkeys(ones, 1)}
        if self.aware:
            sizes |= {"w": self.block, "xw": self.block, "sum_w": self.n_sub}
        first = {f"fit_{name}": self.n_sub for name in self.integers}
        first |= {f"most_{name}": 1 for name in self.integers}
        polished = {f"fitted_{name}": 1 for name in self.scales}
        polished |= {f"largest_{name}": 1 for name in self.integers}
        rest = dict.fromkeys(("spoilt", "may", "best_error", "new_error"), 1)
        return sizes | first | polished | {f"from_{n}": self.n_sub for n in self.integers} | rest

    def scratch(self, lanes: int) -> int:
        return sum(self.sizes().values()) * 4 * lanes

    def numbers(self, arrays: Mapping[str, np.ndarray], n: int) -> Any:
        """Return the first ``n`` super-blocks of the kernel's output ``arrays`` as a
        ``result_type``, the twin's result class.
        """
        made = {name: arrays[name][:n] for name in self.scales}
        for name in self.integers:
            each = arrays[name].view(self.byte).transpose(0, 2, 1)
            made[name] = each.reshape(-1, self.n_sub)[:n]
        return self.result_type(**made, q=arrays["codes"].view(self.byte)[:n])

    def run_ref(self, args: Any, run: Any) -> None:
        """Run the numpy twin, and write its result as the kernel does."""
        shape = (args.n, self.block)
        weights = args.importance.reshape(shape) if self.aware else None
        found = self.how.run(args.x.reshape(shape), weights)
        lanes = args.sc.shape[-1]
        for name in self.scales:
            getattr(args, name)[: args.n] = getattr(found, name)
        for name in self.integers:
            for i, each in enumerate(getattr(found, name)):
                getattr(args, name).view(self.byte)[i // lanes, :, i % lanes] = each
        args.codes.view(self.byte)[: args.n] = found.q

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the search: read, fit, descend and write for each item."""
        with k.loop(frame.end, start=frame.begin) as item:
            self.read(k, frame, item)
            self.do(k, "fit", frame.scratch)
            self.descend(k, frame.scratch)
            self.write(k, frame, item)

    def do(self, k: Builder, name: str, scratch: Val, *more: Any) -> None:
        """Call the search's step ``name``, a method that takes the columns at ``scratch``, then
        ``more``. It is emitted once as a function of its own: it has many callers, and gets all
        registers.
        """

        def emit(inner: Builder, base: Val) -> None:
            getattr(self, name)(inner, ScratchColumns(inner, base, self.sizes()), *more)

        label = "".join(str(m) for m in more if not isinstance(m, tuple)) + "".join(
            str(len(m)) for m in more if isinstance(m, tuple)
        )
        k.outlined(f"{name}{label}", [scratch], emit)

    # -- in and out -----------------------------------------------------------------------------

    def read(self, k: Builder, frame: Frame, item: Val) -> None:
        """Load an item's rows as columns. Super-blocks with NaN, infinity or weights that no f16
        can scale are marked in ``spoilt``, and become zeros.
        """
        c = ScratchColumns(k, frame.scratch, self.sizes())
        lanes = k.isa.lanes
        zero = k.zero(c.ty)
        top = k.var(zero)
        spoilt = k.var(zero)
        for name, source in (("x", frame.x), ("w", frame.importance))[: 1 + self.aware]:
            rows = [source + self.row(k, frame, item, lane) for lane in range(lanes)]
            with k.loop(self.block // lanes) as i:
                loaded = [k.load(row, c.ty, offset=i * c.ty.n_bytes) for row in rows]
                for j, (v,) in enumerate(transpose(k, loaded, lanes)):
                    if name == "x":
                        top.v = k.max(k.abs(v), top.v)  # ignores NaN
                        spoilt.v = k.select(v.eq(v), spoilt.v, k.const(float("nan"), c.ty))
                    c.store(name, v, i * lanes + j)
        reach = F16_MAX * self.reach
        spoilt.v = spoilt.v + k.select(top.v > reach, k.const(float("inf"), c.ty), zero)
        c.store("spoilt", spoilt.v)
        sound = spoilt.v.eq(0.0)
        with k.loop(self.block) as i:
            c.store("x", k.select(sound, c.load("x", i), zero), i)
        if self.aware:
            self.weigh(k, c)

    def row(self, k: Builder, frame: Frame, item: Val, lane: int) -> Val:
        """Return the byte offset in ``x`` of the super-block that an item has in lane ``lane``;
        past the last super-block, that of the last one.
        """
        return k.min(item * k.isa.lanes + lane, frame.n - 1) * (4 * self.block)

    def weigh(self, k: Builder, c: ScratchColumns) -> None:
        """Normalise the importances ``w`` to a mean of about 1, none of them 0, as ``relative`` in
        ``formats/`` does; store their products with x in ``xw``, and their sums in ``sum_w``.
        """
        zero = k.zero(c.ty)
        one = k.const(1.0, c.ty)
        top = k.var(zero)
        with k.loop(self.block) as i:
            v = c.load("w", i)
            v = k.select((v > 0.0) & (v < float("inf")), v, zero)
            top.v = k.max(top.v, v)
            c.store("w", v, i)
        unit = k.select(top.v > 0.0, top.v, one)
        total = k.var(zero)
        with k.loop(self.block) as i:
            v = c.load("w", i) / unit
            total.v = total.v + v
            c.store("w", v, i)
        some = total.v > 0.0
        unit = one / (k.select(some, total.v, one) * (1 / self.block))
        with k.loop(self.n_sub) as sub:
            sums = k.var(zero)
            with k.loop(self.length) as j:
                i = sub * self.length + j
                v = k.select(some, c.load("w", i) * unit, one) + self.least
                sums.v = sums.v + v
                c.store("w", v, i)
                c.store("xw", v * c.load("x", i), i)
            c.store("sum_w", sums.v, sub)

    def write(self, k: Builder, frame: Frame, item: Val) -> None:
        """Store the best scales, integers and codes of an item as rows."""
        c = ScratchColumns(k, frame.scratch, self.sizes())
        lanes = k.isa.lanes
        at = item * lanes
        for name, value in zip(self.scales, self.final_scales(k, c), strict=True):
            k.store(getattr(frame, name) + at * 4, value)
        for name in self.integers:
            with k.loop(self.n_sub) as sub:
                byte = c.load(f"best_{name}", sub).to(i32).to(u8)
                k.store(getattr(frame, name) + (at * self.n_sub + sub * lanes), byte)
        with k.loop(self.n_sub) as sub:
            code = self.coder(k, c, sub)
            for first, n in parts(self.length, lanes):
                rows = [code(first + i).to(i32) for i in range(n)]
                for lane, (row,) in enumerate(transpose(k, rows, lanes)):
                    here = (at + lane) * self.block + (sub * self.length + first)
                    k.store(frame.codes + here, row.to(u8))

    # -- the descent ----------------------------------------------------------------------------

    def descend(self, k: Builder, scratch: Val) -> None:
        """Search from the best of several starts, as the twin's ``KSearch.search``."""
        c = ScratchColumns(k, scratch, self.sizes())
        c.store("best_error", k.const(float("inf"), c.ty))
        c.store("may", k.const(1.0, c.ty))
        table = k.table(self.start_table())
        n_bytes = self.start_table().strides[0]
        with k.loop(len(self.start_table())) as i:
            self.start(k, c, table + i * n_bytes)
            self.attempt(k, scratch, "try", (0,))
        for _ in range(ROUNDS):
            self.do(k, "refit", scratch)
            for name in self.scales:
                c.store(f"try_{name}", near_f16(k, c.load(f"fitted_{name}")))
            self.attempt(k, scratch, "best", STEPS)
        # If codes fit well, the error left is from rounding to f16: try other integers for the same
        # scales.
        error = c.load("best_error")
        close = (error > 0.0) & (error < self.energy(k, c) * float(CLOSE))
        c.store("may", k.select(close, k.const(1.0, c.ty), k.zero(c.ty)))
        with k.if_(k.sum(c.load("may")) > 0.0):
            self.do(k, "refit", scratch)
            self.polish(k, c, scratch)
        c.store("may", k.const(1.0, c.ty))
        for moves in self.final_moves:
            for name, step in zip(self.scales, moves, strict=True):
                c.store(f"try_{name}", adjacent_f16(k, c.load(f"best_{name}"), step))
            self.attempt(k, scratch, "best", self.final_steps)

    def attempt(self, k: Builder, scratch: Val, source: str, steps: tuple[int, ...]) -> None:
        """Try, with the scales in ``try_``, all integers that differ by one of ``steps`` from those
        with the prefix ``source`` ("try" or "best"), and keep the result in the lanes where it is
        better.
        """
        self.do(k, "look", scratch, source, steps)
        self.do(k, "better", scratch)

    def better(self, k: Builder, c: ScratchColumns) -> None:
        """Copy the result in ``new_`` to ``best_``, in each lane that may change (``may``) and
        whose error is smaller.
        """
        new = c.load("new_error")
        old = c.load("best_error")
        less = (new < old) & (c.load("may") > 0.0)
        c.store("best_error", k.select(less, new, old))
        for name in self.scales:
            both = c.load(f"try_{name}"), c.load(f"best_{name}")
            c.store(f"best_{name}", k.select(less, *both))
        with k.loop(self.n_sub) as sub:
            for name in self.integers:
                both = c.load(f"new_{name}", sub), c.load(f"best_{name}", sub)
                c.store(f"best_{name}", k.select(less, *both), sub)

    def energy(self, k: Builder, c: ScratchColumns) -> Val:
        """Return the (weighted) sum of squares of each super-block."""
        total = k.var(k.zero(c.ty))
        with k.loop(self.block) as i:
            x = c.load("x", i)
            total.v = k.fma(x, c.load("xw", i) if self.aware else x, total.v)
        return total.v

    def polish(self, k: Builder, c: ScratchColumns, scratch: Val) -> None:
        """Refine the best result: try, with the fitted scales, every integer from half of the
        largest one allowed up to it as the largest integer of the super-block.
        """
        for name in self.integers:
            largest = k.var(k.zero(c.ty))
            with k.loop(self.n_sub) as sub:
                v = c.load(f"best_{name}", sub)
                c.store(f"from_{name}", v, sub)
                largest.v = k.max(largest.v, k.abs(v))
            c.store(f"largest_{name}", largest.v)
        for _ in range(len(self.scales)):
            for scale, integer in zip(self.scales, self.integers, strict=True):
                top = self.how.top
                with k.loop(top + 1, start=top // 2) as i:
                    self.polish_one(k, c, scale, integer, i)
                    self.attempt(k, scratch, "try", (0,))

    def polish_one(self, k: Builder, c: ScratchColumns, scale: str, integer: str, i: Val) -> None:
        """Set up one try of ``polish`` in ``try_``: the scale named ``scale``, and its integers
        (``integer``) scaled so that the largest is ``i``; all else as in ``best_``.
        """
        for name in self.scales:
            c.store(f"try_{name}", c.load(f"best_{name}"))
        wanted = k.splat(i.to(i32).to(f32), c.ty)
        largest = c.load(f"largest_{integer}")
        c.store(f"try_{scale}", near_f16(k, c.load(f"fitted_{scale}") * largest / wanted))
        factor = wanted * inverse(k, largest)
        with k.loop(self.n_sub) as sub:
            for name in self.integers:
                v = c.load(f"best_{name}", sub)
                if name == integer:
                    v = k.round(c.load(f"from_{name}", sub) * factor)
                c.store(f"try_{name}", v, sub)

    def errors(
        self, k: Builder, c: ScratchColumns, sub: Val, lines: list[tuple[Val, Val | None]]
    ) -> list[Val]:
        """Return the rounding error of sub-block ``sub`` on each line (unit, offset): the sum of
        ``(u - round(u))**2``, ``u = x * unit + offset``. A single line is summed in two halves, so
        that an FMA need not wait for the previous one.
        """
        halves = 2 if len(lines) == 1 else 1
        sums = [[k.var(k.zero(c.ty)) for _ in range(halves)] for _ in lines]
        for j in range(self.length):
            i = sub * self.length + j
            x = c.load("x", i)
            for (unit, low), total in zip(lines, sums, strict=True):
                u = x * unit if low is None else x * unit + low
                off = u - rounded(k, u, *self.ends)
                weighted = off * c.load("w", i) if self.aware else off
                part = total[j % halves]
                part.v = k.fma(off, weighted, part.v)
        return [part[0].v + part[1].v if halves > 1 else part[0].v for part in sums]

    # -- hooks for subclasses ---------------------------------------------------------------------

    @property
    def reach(self) -> float:
        """Largest magnitude of a weight that can be stored, divided by the largest f16."""
        raise NotImplementedError

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest code."""
        raise NotImplementedError

    def start_table(self) -> Any:
        """Return the starts of the search, f32 ``[starts, n]``; ``start`` reads one row of it."""
        raise NotImplementedError

    def start(self, k: Builder, c: ScratchColumns, row: Val) -> None:
        """Store in ``try_`` the scales and integers of the start whose row of ``start_table`` is at
        address ``row``.
        """
        raise NotImplementedError

    def fit(self, k: Builder, c: ScratchColumns) -> None:
        """Store each sub-block's best unrounded scale (and minimum) in ``fit_``, and the largest of
        the super-block in ``most_``.
        """
        raise NotImplementedError

    def look(self, k: Builder, c: ScratchColumns, source: str, steps: tuple[int, ...]) -> None:
        """Store in ``new_``, for each sub-block, the best of the integers that differ by one of
        ``steps`` from those with the prefix ``source``, for the scales in ``try_``.
        """
        raise NotImplementedError

    def refit(self, k: Builder, c: ScratchColumns) -> None:
        """Store in ``fitted_`` the least-squares scales for the best integers and codes."""
        raise NotImplementedError

    def coder(self, k: Builder, c: ScratchColumns, sub: Val) -> Any:
        """Return a function from a weight's number in sub-block ``sub`` to its code, f32, with the
        best scales and integers.
        """
        raise NotImplementedError

    def final_scales(self, k: Builder, c: ScratchColumns) -> Sequence[Val]:
        """Return the scales to write, in the order of ``scales``; NaN or infinity for a spoilt
        super-block.
        """
        raise NotImplementedError
