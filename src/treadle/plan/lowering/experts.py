"""CPU lowering of a mixture of experts: the op ``experts`` of ``models/ffns/experts.py``.

Up to four tokens have one row per *choice* (one of a token's experts), and a gemv that reads the
choice's expert. For more tokens, rows are sorted by expert. An expert with many rows goes through
gemm tiles, so that a packed panel of weights serves all of them::

    route      each token's experts, and their weights
    sort       rows by expert, in tiles; their number is known only during the run, and later
               grids read it
    fetch      asks the system for the experts' pages, if memory does not hold the model
    gather     copies the tokens' activations into these rows
    gate_up    both products of a tile and the activation
    down       f32 rows
    combine    the weighted sum of each token's rows, with residual and shared expert

For an expert with few rows, packing a panel takes longer than the products. Its rows are in the
tiles of a separate sort (``few.sort``), four rows a tile at most, and gemvs of so many rows read
the weights once (``few.gate_up``, ``few.down``).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.errors import UnsupportedError
from treadle.kernels.activation_layout import DWORD, ActivationLayout
from treadle.kernels.elementwise.elementwise import Pack
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.gemv import GROUPED, GroupGemv
from treadle.kernels.matmul.matmul import TILE, Matmul
from treadle.kernels.matmul.select import few_rows, gated, group_gemv, matmul
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.moe.dispatch import Gather
from treadle.kernels.moe.page_in_experts import Fetch
from treadle.kernels.moe.route import Route, RouteByToken, Sort, blocks_most
from treadle.kernels.run_state import GEMV_TOKENS, round_up
from treadle.kernels.spec import Grid
from treadle.models.ops import TensorSlice, tensor_of
from treadle.plan.lowering.deferred import Branch, ExpertMatrix, ExpertSum, is_per_output
from treadle.plan.plan import ANY, Buffer
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.models.config import Experts
    from treadle.models.ops import Rows, TensorName
    from treadle.plan.lowering.materialize import Materializer
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.plan import Const

    Gemms = list[tuple[str, list[ExpertMatrix], Matmul]]  # label, matrices, kernel

# -- pages of experts, where memory does not hold the whole model ---------------------------------


def emit_fetch(
    steps: Steps,
    label: str,
    matrices: Sequence[ExpertMatrix],
    grid: Grid,
    *,
    chosen: Buffer | None = None,
    tiles: Buffer | None = None,
) -> None:
    """Emit a step that asks the OS to page in the chosen experts' matrices (``madvise``), without
    waiting. Nothing is emitted if memory holds the model. ``chosen``: the expert of each choice; or
    ``tiles``: tiles of rows, each with its expert.

    With many tokens, callers pass the matrices of one product at a time: more may not fit in
    memory.
    """
    told = SYSTEM.fetch_call() if steps.scarce else None
    if told is None:
        return
    arrays = []
    length = []
    pitch = []
    for each in matrices:
        name = tensor_of(each.stem, "weight")
        n_rows = steps.weights.n_rows(name)
        for const in steps.weight(name):
            row = const.array.nbytes // n_rows
            arrays.append(const)
            length.append(each.height * row)
            pitch.append(each.pitch * row)
            SYSTEM.expect_random(const.array)
    call, advice = told
    steps.emit(
        f"{label}.fetch",
        Fetch(len(arrays), tiled=tiles is not None),
        grid,
        call=call,
        advice=advice,
        page=mmap.PAGESIZE,
        w=arrays,
        length=length,
        pitch=pitch,
        chosen=chosen,
        tiles=tiles,
    )


def expert_table(steps: Steps, name: str, n: int) -> Const:
    """Return the table ``name`` of each vocabulary token's experts, i32 ``[n_vocab * n_used]``.
    Raises FileError for another type, or an expert number that is not below ``n``.
    """
    weights = steps.weights
    steps.plan.tensors_used.add(name)
    key = f"{name}:experts"
    if key not in weights.consts:
        tensor = weights.tensor(name)
        if tensor.format is not None or tensor.n_bytes != 4 * prod(tensor.shape):
            raise tensor.error(f"is in {tensor.type_name}", "whole numbers of 32 bits")
        table = tensor.data.view("<i4")
        wrong = np.flatnonzero((table < 0) | (table >= n))
        if len(wrong):
            raise tensor.error(f"element {wrong[0]} is {table[wrong[0]]}", f"0 to {n - 1}")
        weights.consts[key] = (weights.storage.weights(key, table),)
    (found,) = weights.consts[key]
    return found


# -- routing, products by expert, the gate between them, adapters ---------------------------------


class Mixture:
    """The parts of a layer's mixture of experts: routing, kernels, products, gate, adapters."""

    def __init__(
        self,
        ops: Materializer,
        label: str,
        layer: int,
        at: Experts,
        *,
        chunks: bool = False,
        shared: bool = False,
    ) -> None:
        self.ops = ops
        self.steps = ops.steps
        self.label = label
        self.at = at
        self.routed = at
        self.per = 1
        self.exps = "exps"
        if chunks:
            self.per = at.per_chunk
            self.exps = "chexps"
            self.routed = replace(at, scale=at.scale * at.chunk_scale)
            self.at = replace(at, n=at.n // at.per_chunk, n_ff=at.n_ff_chunk)
        if shared:
            self.exps = "shexp"
            self.at = replace(at, n=at.n_shared, n_used=at.n_shared)
        self.fn = at.activation or ops.config.arch.activation
        self.blk = f"blk.{layer}.ffn"
        self.gated = ops.config.arch.gated
        self.n_choices = self.at.n_used * self.steps.plan.n_tokens
        self.chosen = Buffer(f"{label}.chosen", self.n_choices, 4, "i4")
        self.weights = Buffer(f"{label}.weights", self.n_choices, 4)

    def scales(self) -> str:
        """Return the name of the tensor with factors of the experts' weights; "" if there is
        none.
        """
        last = f"{self.blk}_down_{self.exps}"
        scales = f"{last}.scale"
        if not self.steps.has(scales) or self.has_factor(last):
            return ""
        if self.ops.adapted([last]):
            # NVFP4's scale applies to the weights only, Gemma 4's to the expert's output.
            why = f"the products are scaled by {scales}, and the adapter's must not be"
            raise UnsupportedError(
                f"{self.steps.weights.gguf.path}: {last}.weight: LoRA is not supported here: {why}"
            )
        return scales

    def route(self, scores: Rows, shared: Mixture | None = None) -> None:
        """Emit the router. It writes each choice's expert, i32 ``[N * n_used]``, to ``chosen``, and
        its weight, f32, to ``weights``; and those of the ``shared`` experts that it scores, if any.
        """
        at = self.routed
        rows = self.ops.floats(scores)
        # A bias for the choice only, not the weights: ``exp_probs_b`` in models/ffns/experts.py.
        bias = f"{self.blk.rpartition('.')[0]}.exp_probs_b.bias"
        has_bias = self.steps.has(bias)
        scales = self.scales()
        given: dict[str, Any] = {"chosen": self.chosen, "weights": self.weights}
        table = f"{self.blk}_gate_tid2eid.weight"
        if at.by_token:
            self.steps.emit(
                f"{self.label}.route",
                RouteByToken(at.n, at.n_used, at.gating, at.norm, at.scale),
                Grid(1, "n_tokens"),
                scores=rows,
                table=expert_table(self.steps, table, at.n),
                stride=rows.row_bytes // 4,
                **given,
            )
            return
        own_shared = ""
        if shared is not None:
            own_shared = shared.scales()
            given |= {"shared_chosen": shared.chosen, "shared_weights": shared.weights}
            given["shared_scales"] = self.steps.vector(own_shared) if own_shared else None
        spec = Route(
            at.n,
            at.n_used,
            at.gating,
            at.norm,
            at.scale,
            bias=has_bias,
            n_groups=at.n_groups,
            n_groups_used=at.n_groups_used,
            own=bool(scales),
            jitter=at.jitter,
            per=self.per,
            n_shared=at.n_shared,
            own_shared=bool(own_shared),
        )
        self.steps.emit(
            f"{self.label}.route",
            spec,
            Grid(1, "n_tokens"),
            scores=rows,
            bias=self.steps.vector(bias) if has_bias else None,
            scales=self.steps.vector(scales) if scales else None,
            stride=rows.row_bytes // 4,
            **given,
        )

    def first_products(self, both: list[ExpertMatrix]) -> list[tuple[str, list[ExpertMatrix]]]:
        """Return the first products (gate, up), each with the name of its step: one step for both
        if their formats, biases and factors match, else two. ``both``: the two matrices.
        """
        if not self.gated:
            return [("up", both)]
        steps = self.steps
        kinds = {
            (
                steps.weights.format(tensor_of(each.stem, "weight")).name,
                steps.has(tensor_of(each.stem, "bias")),
                self.has_factor(each.stem),
            )
            for each in both
        }
        if len(kinds) == 1:
            return [("gate_up", both)]
        return [("gate", both[:1]), ("up", both[1:])]

    def has_factor(self, stem: TensorName) -> bool:
        """Return whether the products with the matrix ``stem`` are multiplied by a factor.

        The factor of ``down`` is part of the routing weights, unless a bias is added before it.
        """
        steps = self.steps
        last = f"{self.blk}_down_{self.exps}"
        if stem != last:
            return steps.has_factor(stem)
        return steps.has(f"{last}.scale") and steps.has(f"{last}.bias")

    def format(self, matrices: list[ExpertMatrix]) -> Format:
        return self.steps.weights.format(tensor_of(matrices[0].stem, "weight"))

    def fields(self, matrices: list[ExpertMatrix]) -> dict[str, Any]:
        """Return the fields of ``Matmul`` that are the same in all kernels for ``matrices``."""
        stem = matrices[0].stem
        return {
            "segments": len(matrices),
            "bias": self.steps.has(tensor_of(stem, "bias")),
            "factor": self.has_factor(stem),
            "experts": self.at.n_used,
        }

    def first_rows(self, branch: Branch, both: list[ExpertMatrix]) -> tuple[Buffer, int]:
        """Return a new buffer for the branch's first products (gate, up) side by side, and the
        column where each product begins.
        """
        pitch = round_up(self.at.n_ff, COLUMNS)
        return Buffer(f"{branch.label}.gate_up", branch.n_rows, len(both) * pitch * 4), pitch

    def gate(
        self, branch: Branch, down: ExpertMatrix, x: Buffer, up: int, act: ActivationLayout
    ) -> tuple[Buffer, Buffer]:
        """Emit the activation of the first products ``x``; ``up``: first column of the up products.
        Return the rows in the layout ``act``, and as f32 if an adapter of ``down`` needs them.
        """
        plain = ActivationLayout("f32", act.k)
        if act == plain or not self.adapted([down]):
            result = self._pack(branch, self.fn, x, up, act)
            return result, result
        floats = self._pack(branch, self.fn, x, up, plain)
        return self._pack(branch, "copy", floats, 0, act), floats

    def _pack(self, branch: Branch, fn: str, x: Buffer, up: int, act: ActivationLayout) -> Buffer:
        layout = (act.kind, act.k, act.group, act.sub)
        counted = branch.rows is not None
        per = branch.block if counted else self.at.n_used
        spec = Pack(fn, *layout, self.gated or fn == "copy", per, counted, act.unit)
        out = self.packed(branch, self.fn + (".pack" if fn == "copy" else ""), act)
        grid = Grid(spec.slices * per // act.together, "rows" if counted else "n_tokens")
        given: dict[str, Any] = {"x": x, "out": out, "up": up, "rows": branch.rows}
        self.steps.emit(out.name, spec, grid, stride=x.row_bytes // 4, **given)
        return out

    def packed(self, branch: Branch, name: str, act: ActivationLayout) -> Buffer:
        """Return a new buffer ``name`` for the branch's rows in the layout ``act``: one record per
        group of ``act.group`` rows.
        """
        return Buffer(f"{branch.label}.{name}", branch.n_rows // act.group, act.group_bytes, "u1")

    def adapted(self, matrices: list[ExpertMatrix]) -> bool:
        """Return whether an adapter adds to the products with these matrices."""
        return self.ops.adapted([each.stem for each in matrices])

    def adapt(
        self,
        branch: Branch,
        matrices: list[ExpertMatrix],
        x: Rows | Buffer,
        y: Buffer,
        first: int = 0,
    ) -> None:
        """Add the adapters' products of ``x`` with ``matrices`` to the rows of ``y`` from ``first``
        on, if there are any.

        x: deferred ``Rows`` have one row per token; a Buffer has one per row of the branch.
        """
        if not self.adapted(matrices):
            return
        from treadle.plan.lowering.lora import emit_experts_lora  # few plans have adapters

        floats = (
            x
            if isinstance(x, Buffer)
            else self.ops.activations(x, ActivationLayout("f32", x.width))
        )
        of_tokens = not isinstance(x, Buffer)
        emit_experts_lora(self.steps, branch, matrices, floats, y, first, self.at.n_used, of_tokens)

    def multiply(
        self,
        branch: Branch,
        name: str,
        spec: Matmul,
        matrices: list[ExpertMatrix],
        columns: list[int],
        x: Buffer,
        y: Buffer,
        first: int = 0,
        *,
        of_tokens: bool = False,
    ) -> None:
        """Emit the step ``name``: the kernel ``spec`` multiplies each row of a branch by its
        expert's part of each of ``matrices``, into ``y``.

        ``columns``: for each of ``matrices``, the first column of ``y`` of its results. ``x``: one
        row per row of the branch, or with ``of_tokens`` one per token. ``first``: the row of ``y``
        for the branch's first row, read only by a ``GroupGemv``.
        """
        steps = self.steps
        at = self.at
        heights = [each.height for each in matrices]
        strips = spec.strips(heights, steps.isa.lanes)
        stems = [each.stem for each in matrices]
        given: dict[str, Any] = {"tokens": 0}
        if branch.rows is None:
            given["tokens"] = at.n_used if of_tokens else 1
        elif isinstance(spec, GroupGemv):
            given |= {"first": first, "sources": branch.rows if of_tokens else None}
        steps.emit(
            f"{branch.label}.{name}",
            spec,
            Grid(strips, "tiles") if branch.rows else Grid(strips * at.n_used, "n_tokens"),
            n_bytes=at.n * sum(heights) * spec.fmt.row_bytes(spec.k),
            read_share=at.n_used / at.n,
            rows_per_expert=branch.rows_per_expert,
            n_flops=2 * spec.k * sum(heights) * at.n_used,
            shape=(sum(heights), spec.k),
            x=x,
            y=y,
            stride=y.row_bytes // 4,
            tiles=branch.tiles,
            w=[steps.weight(tensor_of(stem, "weight")) for stem in stems],
            bias=[steps.vector(tensor_of(stem, "bias")) for stem in stems] if spec.bias else None,
            factor=[steps.factor(stem) for stem in stems] if spec.factor else None,
            rows=heights,
            column=columns,
            pitch=[each.pitch for each in matrices],
            **given,
        )


# -- the op ---------------------------------------------------------------------------------------

MOST_ROWS = 512  # of a tile; they share the packing of a panel
# Tokens of an expert from which matrix registers are faster than vectors, though panels must be
# packed for them too.
MATRIX_ROWS = 24


def experts(
    ops: Materializer,
    label: str,
    h: Rows,
    scores: Rows,
    *shared: Rows,
    layer: int,
    chunks: bool = False,
) -> Rows:
    """Return the weighted sum of each token's experts, applied to ``h``, plus the shared expert's
    rows; plus the weighted sum of the shared experts that the router scores, if any.

    scores: the router's scores, f32 ``[N, n]``.
    shared: the shared expert's rows, then the score whose sigmoid weighs them, if any.
    chunks: use the small experts that groups of neighbours share (``chexps``), by the same scores.
    """
    at = ops.config.layers[layer].experts
    if at is None or is_per_output(h):
        raise UnsupportedError(
            f"{label}: the layer has no experts, or its rows are limited to outputs"
        )
    added = [ops.floats(x) for x in shared]
    routed = _Experts(ops, label, layer, at, chunks=chunks)
    if not at.n_shared:
        routed.route(scores)
        return routed.build(h, added)
    scored = _Experts(ops, f"{label}.shared", layer, at, shared=True)
    routed.route(scores, scored)
    return scored.build(h, [ops.floats(routed.build(h, added))])


class _Experts(Mixture):
    def build(self, h: Rows, shared: list[Buffer]) -> Rows:
        """Emit the products of ``h``, and the gate, of the experts that ``route`` has chosen;
        return their weighted sum, plus ``shared``, the shared expert's rows.
        """
        n_ff = self.at.n_ff
        fused = f"{self.blk}_gate_up_{self.exps}"
        if self.steps.has(f"{fused}.weight"):
            n_rows = 2 * n_ff * self.at.n
            up = TensorSlice(fused, n_ff, n_rows - n_ff)
            both = [ExpertMatrix(fused, n_ff, 2 * n_ff), ExpertMatrix(up, n_ff, 2 * n_ff)]
        else:
            names = ("gate", "up") if self.gated else ("up",)
            both = [ExpertMatrix(f"{self.blk}_{name}_{self.exps}", n_ff, n_ff) for name in names]
        down = ExpertMatrix(f"{self.blk}_down_{self.exps}", h.width, h.width)
        by_choice = self.steps.plan.n_tokens in GEMV_TOKENS and not self.steps.deterministic
        y, places = (self._emit_by_choice if by_choice else self._emit_by_expert)(h, both, down)
        at = self.at
        return ExpertSum(
            self.label, h.width, y, self.weights, places, at.n_used, shared, at.shared_mean
        )

    def _emit_by_choice(
        self, h: Rows, both: list[ExpertMatrix], down: ExpertMatrix
    ) -> tuple[Buffer, None]:
        """Emit the mixture for few tokens. ``both``: the gate and up matrices. Return the results,
        f32 ``[N * n_used, n_embd]``, one row per choice, and None, as ``_emit_by_expert`` returns
        places.
        """
        grid = Grid(self.at.n_used, "n_tokens")
        emit_fetch(self.steps, self.label, [*both, down], grid, chosen=self.chosen)
        y = self._result(h, self.n_choices)
        self._emit_gemvs(Branch(self.label, self.chosen, self.n_choices), h, both, down, y)
        return y, None

    def _emit_by_expert(
        self, h: Rows, both: list[ExpertMatrix], down: ExpertMatrix
    ) -> tuple[Buffer, Buffer]:
        """Emit the mixture with rows sorted by expert. ``both``: the gate and up matrices. Return
        the results, f32 rows, and for each choice the number of its row, i32.
        """
        n_choices = self.n_choices
        sizes = (self.at.n, self.at.n_used)
        few = 0 if self.steps.deterministic else few_rows(self.steps.isa)
        firsts, last = self._gemms(h, both, down)
        block = lcm(*(spec.layout().group for spec in (last, *(spec for *_, spec in firsts))))
        n_rows = blocks_most(n_choices, self.at.n, block) * block
        n_few = min(n_choices, few * self.at.n)
        y = self._result(h, n_rows + n_few)
        places = Buffer(f"{self.label}.places", n_choices, 4, "i4")
        if few:
            sort = Sort(*sizes, block=1, most=GROUPED, upto=few)
            branch = self._sort("few.", sort, places, n_few, n_rows)
            grid = Grid(1, "tiles")
            emit_fetch(self.steps, branch.label, [*both, down], grid, tiles=branch.tiles)
            self._emit_gemvs(branch, h, both, down, y)
        sort = Sort(*sizes, block, most=max(block, MOST_ROWS // block * block), over=few)
        branch = self._sort("", sort, places, n_rows, 0)
        self._emit_tiles(branch, h, both, down, firsts, last, y)
        return y, places

    def _result(self, h: Rows, n_rows: int) -> Buffer:
        return Buffer(f"{self.label}.down", n_rows, round_up(h.width, COLUMNS) * 4)

    def _sort(self, kind: str, spec: Sort, places: Buffer, n_rows: int, first: int) -> Branch:
        """Emit a sort of choices by expert, by the kernel ``spec``. Return the branch, with its
        tiles and each row's token; each choice's row, counted from ``first`` on, is written to
        ``places``. ``kind``: prefix of the step's label; ``n_rows``: the largest number of rows.
        """
        label = f"{self.label}.{kind}"
        n_tiles = blocks_most(min(n_rows, self.n_choices), self.at.n, spec.most)
        tiles = Buffer(f"{label}tiles", 1, 8 + n_tiles * TILE.itemsize, "i8")
        rows = Buffer(f"{label}rows", 1, 8 + 4 * n_rows, "i4")
        given: dict[str, Any] = {
            "chosen": self.chosen,
            "tiles": tiles,
            "rows": rows,
            "places": places,
            "first": first,
        }
        self.steps.emit(f"{label}sort", spec, Grid(1), **given)
        met = range(spec.over + 1, spec.upto + 1 if spec.upto else ANY.stop)
        return Branch(label.removesuffix("."), tiles, n_rows, rows, spec.block, first, met)

    # -- experts with few rows ----------------------------------------------------------------

    def _emit_gemvs(
        self, branch: Branch, h: Rows, both: list[ExpertMatrix], down: ExpertMatrix, y: Buffer
    ) -> None:
        made, pitch = self.first_rows(branch, both)
        for name, some in self.first_products(both):
            spec = self._gemv(branch, some, h.width, of_tokens=True)
            x = self.ops.activations(h, spec.layout())
            columns = [both.index(each) * pitch for each in some]
            self.multiply(branch, name, spec, some, columns, x, made, of_tokens=True)
        self.adapt(branch, both, h, made)
        spec = self._gemv(branch, [down], self.at.n_ff)
        packed, floats = self.gate(branch, down, made, pitch, spec.layout())
        self.multiply(branch, "down", spec, [down], [0], packed, y, branch.first)
        self.adapt(branch, [down], floats, y, branch.first)

    def _gemv(
        self, branch: Branch, matrices: list[ExpertMatrix], k: int, *, of_tokens: bool = False
    ) -> Matmul:
        isa = self.steps.isa
        table = self.steps.table
        own = self.fields(matrices)
        if branch.rows is None:
            return matmul(self.format(matrices), isa, k, 1, table, **own)
        return group_gemv(self.format(matrices), isa, k, table, of_tokens=of_tokens, **own)

    # -- experts with many rows ---------------------------------------------------------------

    def _gemms(self, h: Rows, both: list[ExpertMatrix], down: ExpertMatrix) -> tuple[Gemms, Matmul]:
        """Return the kernels of the first products, as (label, matrices, kernel), and that of
        ``down``, chosen for the expected number of rows per expert.
        """
        n = self.n_choices // self.at.n
        n = n if n >= MATRIX_ROWS else GEMV_TOKENS[-1] + 1  # the fewest tokens that a gemm is for

        def gemm(matrices: list[ExpertMatrix], k: int) -> Matmul:
            steps = self.steps
            own = self.fields(matrices)
            alone = steps.deterministic
            return matmul(self.format(matrices), steps.isa, k, n, steps.table, alone=alone, **own)

        last = gemm([down], self.at.n_ff)
        firsts = [(name, some, gemm(some, h.width)) for name, some in self.first_products(both)]
        if len(firsts) > 1 or not self.gated or self.adapted([*both, down]):
            return firsts, last
        fused = self._fused(both, h.width, last.layout(), n)
        return ([(f"gate_up_{self.fn}", both, fused)] if fused else firsts), last

    def _emit_tiles(
        self,
        branch: Branch,
        h: Rows,
        both: list[ExpertMatrix],
        down: ExpertMatrix,
        gemms: Gemms,
        last: Matmul,
        y: Buffer,
    ) -> None:
        emit_fetch(self.steps, branch.label, both, Grid(1, "tiles"), tiles=branch.tiles)
        made, pitch = self.first_rows(branch, both)
        gathered: dict[ActivationLayout, Buffer] = {}
        for name, some, spec in gemms:
            act = spec.layout()
            if act not in gathered:
                gathered[act] = self._gather(branch, h, act, bool(gathered))
            if isinstance(spec, Gated):
                packed = floats = self.packed(branch, self.fn, spec.result())
                self.multiply(branch, name, spec, both, [0, 0], gathered[act], packed)
                break
            columns = [both.index(each) * pitch for each in some]
            self.multiply(branch, name, spec, some, columns, gathered[act], made)
        else:
            self.adapt(branch, both, h, made)
            packed, floats = self.gate(branch, down, made, pitch, last.layout())
        emit_fetch(self.steps, f"{branch.label}.down", [down], Grid(1, "tiles"), tiles=branch.tiles)
        self.multiply(branch, "down", last, [down], [0], packed, y)
        self.adapt(branch, [down], floats, y)

    def _gather(self, branch: Branch, h: Rows, act: ActivationLayout, more: bool) -> Buffer:
        """Emit a copy of the tokens' activations ``h`` into rows sorted by expert, in the layout
        ``act``. ``more``: another layout of these rows exists already, so the label names this one.
        """
        name = "gather" + (f".{act.kind}_group{act.group}_sub{act.sub}" if more else "")
        out = self.packed(branch, name, act)
        spec = Gather(act.kind, act.k, act.group, act.sub, branch.block, act.unit)
        x = self.ops.activations(h, replace(act, group=1, unit=DWORD))
        self.steps.emit(out.name, spec, Grid(1, "rows"), x=x, rows=branch.rows, out=out)
        return out

    def _fused(
        self, both: list[ExpertMatrix], k: int, out: ActivationLayout, n: int
    ) -> Gated | None:
        """Return the kernel that computes gate, up and the activation in one step, or None if there
        is none for these matrices. ``k``: columns; ``out``: layout of the result; ``n``: expected
        rows per expert.
        """
        steps = self.steps
        stem = both[0].stem
        alone = self.steps.deterministic
        given = self.format(both), steps.isa, k, self.at.n_ff, self.fn, out, n, steps.table
        made = gated(*given, alone=alone)
        if made is None or self.has_factor(stem):
            return None
        return replace(made, bias=steps.has(tensor_of(stem, "bias")), experts=self.at.n_used)
