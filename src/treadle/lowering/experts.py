"""How the CPU lowers a mixture of experts: the word ``experts`` of ``models/ffns/experts.py``.

For many tokens rows are sorted by expert, so that a panel of weights, once packed, meets all the
rows that want it::

    route      which experts each token has, and what they weigh
    sort       rows by expert, in tiles: how many is known as the run goes, and later grids read it
    fetch      the system is asked for what is needed, if memory does not hold the model
    gather     the tokens' activations into these rows
    gate_up    both products of a tile and the activation
    down       f32 rows
    combine    each token's rows, weighed, with what else is added

For few tokens rows of the first product are tokens', and of all else slots, and a gemv reads the
experts chosen, no others: of each slot by itself, or, from five tokens on, of up to four slots that
have chosen the same expert (``group``).
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.kernels.act import DWORD, Act
from treadle.kernels.choice import GEMV_TOKENS, by_slot, gated, group_gemv, matmul
from treadle.kernels.elementwise import Pack
from treadle.kernels.gated import Gated
from treadle.kernels.gather import Gather
from treadle.kernels.matmul import COLUMNS, GROUP, ROWS, TILE, Matmul
from treadle.kernels.route import Group, Route, Sort, blocks_most, tiles_most
from treadle.kernels.spec import Grid, round_up
from treadle.lowering.fetch import emit_fetch
from treadle.lowering.values import Matrix, Mixed, of_outputs
from treadle.models.ops import part
from treadle.plan import Buffer

if TYPE_CHECKING:
    from treadle.lowering.making import Making
    from treadle.models.config import Experts
    from treadle.models.ops import Rows

MOST_ROWS = 512  # of a tile: so many share a panel's packing
# Tokens of an expert from which on matrix registers are faster than vectors: panels are packed for
# them too.
MATRIX_ROWS = 24


def experts(
    ops: Making, label: str, h: Rows, scores: Rows, *shared: Rows, layer: int, chunks: bool = False
) -> Rows:
    """Each token's experts' answers to ``h``, weighed; ``shared``: rows that are added, and the
    score of these. ``chunks``: of those that its experts share with their neighbours.
    """
    at = ops.config.layers[layer].experts
    if at is None or of_outputs(h):
        raise UnsupportedError(f"{label}: experts of a layer without any, or of outputs")
    return _Mixture(ops, label, layer, at, chunks).build(h, scores, [ops.floats(x) for x in shared])


class _Mixture:
    """One layer's."""

    def __init__(self, ops: Making, label: str, layer: int, at: Experts, chunks: bool) -> None:
        self.ops, self.steps, self.label, self.at = ops, ops.steps, label, at
        self.routed, self.per, self.exps = at, 1, "exps"
        if chunks:
            self.per, self.exps = at.per_chunk, "chexps"
            self.routed = replace(at, scale=at.scale * at.chunk_scale)
            self.at = replace(at, n=at.n // at.per_chunk, n_ff=at.n_ff_chunk)
        self.fn, self.blk = at.activation or ops.config.arch.activation, f"blk.{layer}.ffn"
        self.gated = ops.config.arch.gated
        self.n_slots = at.n_used * self.steps.plan.n_tokens
        n = self.steps.plan.n_tokens
        few = by_slot(self.steps.isa, n, at.n_used, self.at.n)
        self.by_row = few and not self.steps.deterministic
        self.grouped = self.by_row and n > GEMV_TOKENS[-1]
        self.gathered: dict[Act, Buffer] = {}

    def build(self, h: Rows, scores: Rows, shared: list[Buffer]) -> Rows:
        chosen, weights = self._route(scores)
        n_ff, fused = self.at.n_ff, f"{self.blk}_gate_up_{self.exps}"
        if self.steps.has(f"{fused}.weight"):
            n_rows = 2 * n_ff * self.at.n
            up = part(fused, n_ff, n_rows - n_ff)
            both = [Matrix(fused, n_ff, 2 * n_ff), Matrix(up, n_ff, 2 * n_ff)]
        else:
            names = ("gate", "up") if self.gated else ("up",)
            both = [Matrix(f"{self.blk}_{name}_{self.exps}", n_ff, n_ff) for name in names]
        down = Matrix(f"{self.blk}_down_{self.exps}", h.width, h.width)
        make = self._by_row if self.by_row else self._by_tile
        y, places = make(h, chosen, both, down)
        at = self.at
        return Mixed(self.label, h.width, y, weights, places, at.n_used, shared, at.shared_mean)

    def _route(self, scores: Rows) -> tuple[Buffer, Buffer]:
        at, rows = self.routed, self.ops.floats(scores)
        # What is chosen by alone: see ``exp_probs_b`` in models/ffns/experts.py.
        bias = f"{self.blk.rpartition('.')[0]}.exp_probs_b.bias"
        last = f"{self.blk}_down_{self.exps}"
        has_bias, scales = self.steps.has(bias), f"{last}.scale"
        own = self.steps.has(scales) and not self._has_factor(last)
        if own and self.ops.adapted([last]):
            # Of NVFP4 it scales weights alone, of Gemma 4 what an expert gives.
            why = f"its products are multiplied by {scales}: what an adapter adds may not be"
            raise UnsupportedError(f"{self.steps.weights.gguf.path}: {last}.weight: {why}")
        chosen = Buffer(f"{self.label}.chosen", self.n_slots, 4, "i4")
        weights = Buffer(f"{self.label}.weights", self.n_slots, 4)
        spec = Route(
            at.n,
            at.n_used,
            at.gating,
            at.norm,
            at.scale,
            bias=has_bias,
            n_groups=at.n_groups,
            n_groups_used=at.n_groups_used,
            own=own,
            jitter=at.jitter,
            per=self.per,
        )
        self.steps.emit(
            f"{self.label}.route",
            spec,
            Grid(1, "n_tokens"),
            scores=rows,
            bias=self.steps.vector(bias) if has_bias else None,
            scales=self.steps.vector(scales) if own else None,
            chosen=chosen,
            weights=weights,
            stride=rows.row_bytes // 4,
        )
        return chosen, weights

    # -- few tokens -------------------------------------------------------------------------------

    def _by_row(
        self, h: Rows, chosen: Buffer, both: list[Matrix], down: Matrix
    ) -> tuple[Buffer, None]:
        """f32 rows ``[N * n_used, n_embd]``."""
        label, n_used, pitch = self.label, self.at.n_used, round_up(self.at.n_ff, COLUMNS)
        emit_fetch(self.steps, label, [*both, down], Grid(n_used, "n_tokens"), chosen=chosen)
        met = self._group(chosen) if self.grouped else chosen
        made = Buffer(f"{label}.gate_up", self.n_slots, len(both) * pitch * 4)
        for name, some in self._alike(both):
            spec = self._matmul(some, h.width, 1)
            x = self.ops.activations(h, spec.layout())
            columns = [both.index(each) * pitch for each in some]
            self._multiply(name, spec, some, columns, x, made, met, n_used)
        self._adapt(both, h, made, chosen)
        spec = self._matmul([down], self.at.n_ff, 1)
        packed, floats = self._gate(down, made, pitch, spec.layout(), self.n_slots, per=n_used)
        y = Buffer(f"{label}.down", self.n_slots, round_up(h.width, COLUMNS) * 4)
        self._multiply(f"{label}.down", spec, [down], [0], packed, y, met, 1)
        self._adapt([down], floats, y, chosen)
        return y, None

    def _group(self, chosen: Buffer) -> Buffer:
        """Slots that are multiplied together."""
        n_groups = tiles_most(self.n_slots, self.at.n, ROWS)
        groups = Buffer(f"{self.label}.groups", 1, 8 + n_groups * GROUP.itemsize, "i8")
        spec = Group(self.at.n, self.at.n_used)
        self.steps.emit(f"{self.label}.group", spec, Grid(1), chosen=chosen, groups=groups)
        return groups

    # -- many tokens ------------------------------------------------------------------------------

    def _by_tile(
        self, h: Rows, chosen: Buffer, both: list[Matrix], down: Matrix
    ) -> tuple[Buffer, Buffer]:
        """f32 rows by expert, and where each slot's is."""
        at, label, n_ff = self.at, self.label, self.at.n_ff
        # By how many an expert has; tiles of one token would be too many to sort.
        n = self.n_slots // at.n
        n = n if n >= MATRIX_ROWS else GEMV_TOKENS[-1] + 1
        last = self._matmul([down], n_ff, n)
        firsts = [(name, some, self._matmul(some, h.width, n)) for name, some in self._alike(both)]
        block = lcm(*(spec.layout().group for spec in (last, *(spec for *_, spec in firsts))))
        n_rows = blocks_most(self.n_slots, at.n, block) * block
        tiles, rows, places = self._sort(chosen, block, n_rows)
        emit_fetch(self.steps, label, both, Grid(1, "tiles"), tiles=tiles)
        alike = self.gated and len(firsts) == 1 and not self._adapted([*both, down])
        fused = self._fused(both, h.width, last.layout(), n) if alike else None
        if fused is not None:
            x = self._gather(h, fused.layout(), rows, block, n_rows)
            packed = self._rows(f"{label}.{self.fn}", fused.result(), n_rows)
            name = f"{label}.gate_up_{self.fn}"
            self._multiply(name, fused, both, [0, 0], x, packed, tiles)
            floats = packed  # which nothing wants
        else:
            pitch = round_up(n_ff, COLUMNS)
            made = Buffer(f"{label}.gate_up", n_rows, len(both) * pitch * 4)
            for name, some, spec in firsts:
                x = self._gather(h, spec.layout(), rows, block, n_rows)
                columns = [both.index(each) * pitch for each in some]
                self._multiply(name, spec, some, columns, x, made, tiles)
            self._adapt(both, h, made, tiles, rows)
            given: dict[str, Any] = {"per": block, "rows": rows}
            packed, floats = self._gate(down, made, pitch, last.layout(), n_rows, **given)
        y = Buffer(f"{label}.down", n_rows, round_up(h.width, COLUMNS) * 4)
        emit_fetch(self.steps, f"{label}.down", [down], Grid(1, "tiles"), tiles=tiles)
        self._multiply(f"{label}.down", last, [down], [0], packed, y, tiles)
        self._adapt([down], floats, y, tiles, rows)
        return y, places

    def _sort(self, chosen: Buffer, block: int, n_rows: int) -> tuple[Buffer, Buffer, Buffer]:
        """Tiles, the tokens of rows, and the rows of slots."""
        at, label, most = self.at, self.label, max(block, MOST_ROWS // block * block)
        n_tiles = tiles_most(self.n_slots, at.n, most)
        tiles = Buffer(f"{label}.tiles", 1, 8 + n_tiles * TILE.itemsize, "i8")
        rows = Buffer(f"{label}.rows", 1, 8 + 4 * n_rows, "i4")
        places = Buffer(f"{label}.places", self.n_slots, 4, "i4")
        spec = Sort(at.n, at.n_used, block, most)
        given: dict[str, Any] = {"chosen": chosen, "tiles": tiles, "rows": rows, "places": places}
        self.steps.emit(f"{label}.sort", spec, Grid(1), **given)
        return tiles, rows, places

    def _gather(self, h: Rows, act: Act, rows: Buffer, block: int, n_rows: int) -> Buffer:
        """The tokens' activations as an expert's, once for each layout."""
        if act not in self.gathered:
            more = f".{act.kind}_group{act.group}_sub{act.sub}" if self.gathered else ""
            label = f"{self.label}.gather{more}"
            out = self.gathered[act] = self._rows(label, act, n_rows)
            spec = Gather(act.kind, act.k, act.group, act.sub, block, act.unit)
            x = self.ops.activations(h, replace(act, group=1, unit=DWORD))
            self.steps.emit(label, spec, Grid(1, "rows"), x=x, rows=rows, out=out)
        return self.gathered[act]

    def _rows(self, name: str, act: Act, n_rows: int) -> Buffer:
        return Buffer(name, n_rows // act.group, act.group_bytes, "u1")

    def _fused(self, both: list[Matrix], k: int, out: Act, n: int) -> Gated | None:
        """The kernel of both products and the activation."""
        steps, name = self.steps, both[0].name
        fmt = steps.weights.format(f"{name}.weight")
        made = gated(
            fmt, steps.isa, k, self.at.n_ff, self.fn, out, n, steps.table, alone=steps.deterministic
        )
        if made is None or self._has_factor(name):
            return None
        return replace(made, bias=steps.has(f"{name}.bias"), experts=self.at.n_used)

    # -- both -------------------------------------------------------------------------------------

    def _alike(self, both: list[Matrix]) -> list[tuple[str, list[Matrix]]]:
        """Matrices of one format as one step, with its label."""
        if not self.gated:
            return [(f"{self.label}.up", both)]
        steps = self.steps
        kinds = {
            (
                steps.weights.format(f"{each.name}.weight").name,
                steps.has(f"{each.name}.bias"),
                self._has_factor(each.name),
            )
            for each in both
        }
        if len(kinds) == 1:
            return [(f"{self.label}.gate_up", both)]
        return [
            (f"{self.label}.{name}", [each])
            for name, each in zip(("gate", "up"), both, strict=True)
        ]

    def _has_factor(self, name: str) -> bool:
        """Whether a product is multiplied. What comes last is so by the experts' weights, unless a
        bias is added before.
        """
        steps, last = self.steps, f"{self.blk}_down_{self.exps}"
        if name != last:
            return steps.has_factor(name)
        return steps.has(f"{last}.scale") and steps.has(f"{last}.bias")

    def _matmul(self, matrices: list[Matrix], k: int, n: int) -> Matmul:
        """The product for ``n`` rows of an expert."""
        steps, name = self.steps, matrices[0].name
        fmt, biased = steps.weights.format(f"{name}.weight"), steps.has(f"{name}.bias")
        own = {"segments": len(matrices), "bias": biased, "factor": self._has_factor(name)}
        if self.grouped:
            spec: Matmul = group_gemv(fmt, steps.isa, k, steps.table, **own)
        else:
            spec = matmul(fmt, steps.isa, k, n, steps.table, alone=steps.deterministic, **own)
        return replace(spec, experts=self.at.n_used)

    def _gate(
        self,
        down: Matrix,
        x: Buffer,
        up: int,
        act: Act,
        n_rows: int,
        per: int,
        rows: Buffer | None = None,
    ) -> tuple[Buffer, Buffer]:
        """What the gate lets through, or the activation gives, ``per`` rows of each token, or of
        each block of ``rows``; and in f32, where an adapter wants it so.
        """
        plain = Act("f32", act.k)
        if act == plain or not self._adapted([down]):
            made = self._pack(self.fn, x, up, act, n_rows, per, rows)
            return made, made
        floats = self._pack(self.fn, x, up, plain, n_rows, per, rows)
        return self._pack("copy", floats, 0, act, n_rows, per, rows), floats

    def _pack(
        self, fn: str, x: Buffer, up: int, act: Act, n_rows: int, per: int, rows: Buffer | None
    ) -> Buffer:
        layout, counted = (act.kind, act.k, act.group, act.sub), rows is not None
        spec = Pack(fn, *layout, self.gated or fn == "copy", per, counted, act.unit)
        label = f"{self.label}.{self.fn}" + (".pack" if fn == "copy" else "")
        out = self._rows(label, act, n_rows)
        grid = Grid(spec.slices * per // act.together, "rows" if rows else "n_tokens")
        given: dict[str, Any] = {"x": x, "out": out, "up": up, "rows": rows}
        self.steps.emit(label, spec, grid, stride=x.row_bytes // 4, **given)
        return out

    def _adapted(self, matrices: list[Matrix]) -> bool:
        return self.ops.adapted([each.name for each in matrices])

    def _adapt(
        self,
        matrices: list[Matrix],
        x: Rows | Buffer,
        y: Buffer,
        tiles: Buffer,
        rows: Buffer | None = None,
    ) -> None:
        """Add what adapters make of ``x``, a row of each token or one for each of ``y``'s."""
        if not self._adapted(matrices):
            return
        from treadle.lowering.lora import emit_experts_lora  # no plan without adapters needs it

        floats = x if isinstance(x, Buffer) else self.ops.activations(x, Act("f32", x.width))
        emit_experts_lora(
            self.steps,
            y.name,
            matrices,
            floats,
            y,
            tiles,
            rows,
            n_used=self.at.n_used,
            of_tokens=not isinstance(x, Buffer),
        )

    def _multiply(
        self,
        label: str,
        spec: Matmul,
        matrices: list[Matrix],
        columns: list[int],
        x: Buffer,
        y: Buffer,
        tiles: Buffer,
        tokens: int = 0,
    ) -> None:
        """``tiles``: those of a gemm, or a gemv's experts or groups of slots, ``tokens`` of which
        share a row of x.
        """
        steps, at, heights = self.steps, self.at, [each.height for each in matrices]
        slots = self.by_row and not self.grouped
        strips = spec.strips(heights, steps.isa.lanes)
        names = [each.name for each in matrices]
        steps.emit(
            label,
            spec,
            Grid(strips * at.n_used, "n_tokens") if slots else Grid(strips, "tiles"),
            n_bytes=at.n * sum(heights) * spec.fmt.row_bytes(spec.k),
            used=at.n_used / at.n,
            n_flops=2 * spec.k * sum(heights) * at.n_used,
            shape=(sum(heights), spec.k),
            x=x,
            y=y,
            stride=y.row_bytes // 4,
            tokens=tokens,
            tiles=tiles,
            w=[steps.weight(f"{name}.weight") for name in names],
            bias=[steps.vector(f"{name}.bias") for name in names] if spec.bias else None,
            factor=[steps.factor(name) for name in names] if spec.factor else None,
            rows=heights,
            column=columns,
            pitch=[each.pitch for each in matrices],
        )
