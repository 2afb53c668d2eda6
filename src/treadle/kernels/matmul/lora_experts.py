"""LoRA additions to products of experts: each expert has its own A and B.

Rows are in the order of the experts' products (``plan/lowering/experts.py``): by tiles of one
expert, or one row for each expert of a token. So adjacent rows may belong to sequences with
different adapters. ``ExpertAdapterWeights`` writes the adapters' scales for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import Format, by_name
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64, ptr
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.matmul.lora import GROUP, GROUP_OF, PIECE, STRIP, add_strip, dot
from treadle.kernels.matmul.matmul import TILE
from treadle.kernels.run_state import LORA, round_up
from treadle.kernels.spec import Args, Frame, Spec, load_record


@dataclass(frozen=True)
class ExpertAdapterWeights(Spec):
    """Write the scale of each adapter for each token, 0 if unused: ``out`` f32 ``[N, n_adapters]``.
    One item.
    """

    op: ClassVar[str] = "lora_wants"
    args = Args("out:out")
    n_adapters: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n = self.n_adapters
        loras = frame.run("loras", ptr)
        with k.loop(frame.run("n_tokens") * n) as i:
            k.store(frame.out + i * 4, k.const(0.0, f32))
        with k.loop(frame.run("n_loras")) as i:
            at = loras + i * LORA.itemsize
            record = load_record(k, at, LORA)
            with k.loop(record["n_tokens"] * n) as j:
                scale = k.load(at + record["scales"] + j % n * 4, f32)
                k.store(frame.out + (record["token"] * n + j) * 4, scale)

    def run_ref(self, args: Any, run: Any) -> None:
        out = args.out.reshape(-1, self.n_adapters)
        out[: int(run["n_tokens"])] = 0.0
        for token, n, scales in run.loras:
            out[token : token + n] = scales[: self.n_adapters]


class ExpertRows(NamedTuple):
    """Adjacent rows of one expert, and the group (of A) or strip (of B) that multiplies them."""

    part: Val  # number of the group or strip
    expert: Val
    first: Val  # the first row
    n: Val | int  # the int 1 for a single choice


@dataclass(frozen=True)
class OfExperts(Spec):
    """Base of ``ExpertDown`` and ``ExpertUp``. ``wants`` is ``ExpertAdapterWeights``' output. With
    ``sorted`` ``tiles`` and ``rows`` are ``Sort``'s outputs; else a row is one of a token's
    ``n_used`` choices, and ``tiles`` has their experts, i32. Items: tiles, or choices, times groups
    (``ExpertDown``) or strips (``ExpertUp``).
    """

    w: str  # a format of plain numbers
    n: int  # experts
    n_used: int
    n_adapters: int
    sorted: bool

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"rows"} if self.sorted else set())

    def item(self, k: Builder, frame: Frame, item: Val, per: int) -> ExpertRows:
        """Return the rows of item ``item``, and their group or strip. ``per``: items of one tile or
        choice.
        """
        unit = item // per
        part = item % per
        if not self.sorted:
            return ExpertRows(part, k.load(frame.tiles + unit * 4, i32).to(i64), unit, 1)
        tile = load_record(k, frame.tiles + (8 + unit * TILE.itemsize), TILE)
        return ExpertRows(part, tile["expert"], tile["first"], tile["n"])

    def token(self, k: Builder, frame: Frame, row: Val) -> Val:
        if self.sorted:
            return k.load(frame.rows + (8 + row * 4), i32).to(i64)
        return row // self.n_used

    def scale(self, k: Builder, frame: Frame, token: Val, adapter: Val) -> Val:
        """Return the scale of ``adapter`` for ``token``."""
        return k.load(frame.wants + (token * self.n_adapters + adapter) * 4, f32)

    def rows_ref(self, args: Any, run: Any) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield, for each tile, or for each choice if not ``sorted``: its expert, its row numbers,
        and their tokens.
        """
        if not self.sorted:
            for choice in range(int(run["n_tokens"]) * self.n_used):
                row = np.array([choice])
                yield int(args.tiles[choice]), row, row // self.n_used
            return
        for e, first, n in args.tiles[1 : 1 + 3 * int(args.tiles[0])].reshape(-1, 3):
            rows = np.arange(first, first + n)
            yield int(e), rows, args.rows[2 + rows]


@dataclass(frozen=True)
class ExpertDown(OfExperts):
    """First LoRA product of experts: ``t[n, r] = s factor (A[e, r] . x[n])`` for each routed row n,
    its expert e, and each row r of A of the adapters that n's token uses. s is the token's scale of
    the row's adapter (``wants``), factor the adapter's alpha / rank.

    ``w``: ``[n_groups, n experts, GROUP, k up to whole blocks of 32]``; ``groups``: the adapter's
    number and its factor for each GROUP rows of A (records GROUP_OF). ``x`` f32 has a row for each
    routed row, or for each token if ``of_tokens``. Parts of t of unused adapters are unwritten or
    0.
    """

    op: ClassVar[str] = "expert_lora_down"
    args = Args("x:in w:const groups:const wants:in tiles:in rows:in? t:out stride t_stride")
    k: int
    n_groups: int
    of_tokens: bool

    @property
    def width(self) -> int:
        return round_up(self.k, BLOCK)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        row_bytes = self.fmt.row_bytes(self.width)
        with k.loop(frame.end, start=frame.begin) as i:
            at = self.item(k, frame, i, self.n_groups)
            group = frame.groups + at.part * GROUP_OF.itemsize
            adapter, factor = k.load(group, i32).to(i64), k.load(group, f32, offset=4)
            first = frame.w + (at.part * self.n + at.expert) * (GROUP * row_bytes)
            weights = [first + j * row_bytes for j in range(GROUP)]

            def meet(
                rows: list[Val],
                at: ExpertRows = at,
                adapter: Val = adapter,
                factor: Val = factor,
                weights: list[Val] = weights,
            ) -> None:
                tokens = [self.token(k, frame, row) for row in rows]
                scales = [self.scale(k, frame, token, adapter) for token in tokens]
                wanted = k.abs(scales[0])
                for other in scales[1:]:
                    wanted = k.max(wanted, k.abs(other))
                sources = tokens if self.of_tokens else rows
                xs = [frame.x + source * (frame.stride * 4) for source in sources]
                to = [frame.t + (row * frame.t_stride + at.part * GROUP) * 4 for row in rows]
                with k.if_(wanted > 0.0):
                    gains = [scale * factor for scale in scales]
                    dot(k, self.fmt, self.width, weights, xs, to, gains)

            if isinstance(at.n, int):
                meet([at.first])
            else:
                with k.loop(at.n // 2) as pair:
                    meet([at.first + pair * 2, at.first + (pair * 2 + 1)])
                with k.if_(at.n % 2 > 0):
                    meet([at.first + (at.n - 1)])

    def run_ref(self, args: Any, run: Any) -> None:
        groups = args.groups.view(GROUP_OF)
        n_bytes = self.fmt.row_bytes(self.width)
        w = self.fmt.dequantize_rows(args.w.view(np.uint8).reshape(-1, n_bytes)).astype(np.float64)
        w = w.reshape(self.n_groups, self.n, GROUP, -1)[..., : self.k]
        x = args.x.view(np.float32).reshape(-1, args.stride)
        t = args.t.reshape(-1, args.t_stride)
        wants = args.wants.reshape(-1, self.n_adapters)
        for e, rows, tokens in self.rows_ref(args, run):
            for g, (adapter, factor) in enumerate(groups.tolist()):
                scales = wants[tokens, adapter]
                some = scales != 0.0
                from_ = (tokens if self.of_tokens else rows)[some]
                made = x[from_, : self.k].astype(np.float64) @ w[g, e].T
                t[rows[some], GROUP * g : GROUP * (g + 1)] = made * (scales[some, None] * factor)


@dataclass(frozen=True)
class ExpertUp(OfExperts):
    """Second LoRA product of experts: ``y[first + n] += B[e] t[n]`` for each routed row n and its
    expert e, adapter by adapter, one column of t after the other. ``first``: the row of y of routed
    row 0.

    ``w``: the pieces of all B's, each ``[columns of t, STRIP]``; ``pieces``: for each adapter and
    each strip of STRIP columns of y, which columns of t are multiplied and where their weights are
    in ``w`` (records PIECE, ``[n_adapters, n_strips]``).
    """

    op: ClassVar[str] = "expert_lora_up"
    args = Args(
        "t:in w:const pieces:const wants:in tiles:in rows:in? y:inout first stride t_stride"
    )
    n_strips: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as i:
            at = self.item(k, frame, i, self.n_strips)
            with k.loop(self.n_adapters) as adapter:
                where = frame.pieces + (adapter * self.n_strips + at.part) * PIECE.itemsize
                piece = load_record(k, where, PIECE)
                w = frame.w + (piece["at"] + at.expert * piece["pitch"])
                with k.if_(piece["n"] > 0), k.loop(at.n) as j:
                    row = at.first + j
                    scale = self.scale(k, frame, self.token(k, frame, row), adapter)
                    with k.if_(k.abs(scale) > 0.0):
                        t = frame.t + (row * frame.t_stride + piece["first"]) * 4
                        y = frame.y + ((frame.first + row) * frame.stride + at.part * STRIP) * 4
                        add_strip(k, self.fmt, y, w, t, piece["n"])

    def run_ref(self, args: Any, run: Any) -> None:
        pieces = args.pieces.view(PIECE).reshape(self.n_adapters, self.n_strips)
        y = args.y.reshape(-1, args.stride)
        t = args.t.reshape(-1, args.t_stride)
        raw = args.w.reshape(-1).view(np.uint8)
        n_bytes = self.fmt.row_bytes(STRIP)
        wants = args.wants.reshape(-1, self.n_adapters)
        for e, rows, tokens in self.rows_ref(args, run):
            for adapter, strip in np.ndindex(pieces.shape):
                first, count, at, pitch = pieces[adapter, strip].tolist()
                some = rows[wants[tokens, adapter] != 0.0]
                if not count or not len(some):
                    continue
                w = raw[at + e * pitch :][: count * n_bytes].reshape(count, n_bytes)
                mine = t[some, first : first + count].astype(np.float64)
                made = mine @ self.fmt.dequantize_rows(w).astype(np.float64)
                y[args.first + some, strip * STRIP : (strip + 1) * STRIP] += made
