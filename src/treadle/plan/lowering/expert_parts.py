"""A mixture of experts' parts that the CPU's ways to lower it share (``experts.py``): the
router's choice, products by expert, what stands between two of them, what adapters add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.elementwise.elementwise import Pack
from treadle.kernels.matmul.gemv import GroupGemv
from treadle.kernels.matmul.matmul import COLUMNS, Matmul
from treadle.kernels.moe.route import Route
from treadle.kernels.spec import Grid, round_up
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.models.config import Experts
    from treadle.models.ops import Rows
    from treadle.plan.lowering.deferred import Branch, ExpertMatrix
    from treadle.plan.lowering.materialize import Materializer


class Mixture:
    """One layer's."""

    def __init__(
        self, ops: Materializer, label: str, layer: int, at: Experts, chunks: bool
    ) -> None:
        self.ops, self.steps, self.label, self.at = ops, ops.steps, label, at
        self.routed, self.per, self.exps = at, 1, "exps"
        if chunks:
            self.per, self.exps = at.per_chunk, "chexps"
            self.routed = replace(at, scale=at.scale * at.chunk_scale)
            self.at = replace(at, n=at.n // at.per_chunk, n_ff=at.n_ff_chunk)
        self.fn, self.blk = at.activation or ops.config.arch.activation, f"blk.{layer}.ffn"
        self.gated = ops.config.arch.gated
        self.n_slots = at.n_used * self.steps.plan.n_tokens

    def route(self, scores: Rows) -> tuple[Buffer, Buffer]:
        """The experts of each slot, i32, and their weights, f32."""
        at, rows = self.routed, self.ops.floats(scores)
        # What is chosen by alone: see ``exp_probs_b`` in models/ffns/experts.py.
        bias = f"{self.blk.rpartition('.')[0]}.exp_probs_b.bias"
        last = f"{self.blk}_down_{self.exps}"
        has_bias, scales = self.steps.has(bias), f"{last}.scale"
        own = self.steps.has(scales) and not self.has_factor(last)
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

    def alike(self, both: list[ExpertMatrix]) -> list[tuple[str, list[ExpertMatrix]]]:
        """Matrices of one format as one step, with its name."""
        if not self.gated:
            return [("up", both)]
        steps = self.steps
        kinds = {
            (
                steps.weights.format(f"{each.name}.weight").name,
                steps.has(f"{each.name}.bias"),
                self.has_factor(each.name),
            )
            for each in both
        }
        if len(kinds) == 1:
            return [("gate_up", both)]
        return [("gate", both[:1]), ("up", both[1:])]

    def has_factor(self, name: str) -> bool:
        """Whether a product is multiplied. What comes last is so by the experts' weights, unless a
        bias is added before.
        """
        steps, last = self.steps, f"{self.blk}_down_{self.exps}"
        if name != last:
            return steps.has_factor(name)
        return steps.has(f"{last}.scale") and steps.has(f"{last}.bias")

    def format(self, matrices: list[ExpertMatrix]) -> Format:
        return self.steps.weights.format(f"{matrices[0].name}.weight")

    def fields(self, matrices: list[ExpertMatrix]) -> dict[str, Any]:
        """What every kernel of their product has."""
        name = matrices[0].name
        return {
            "segments": len(matrices),
            "bias": self.steps.has(f"{name}.bias"),
            "factor": self.has_factor(name),
            "experts": self.at.n_used,
        }

    def first_rows(self, branch: Branch, both: list[ExpertMatrix]) -> tuple[Buffer, int]:
        """For the rows of the first products side by side, and the columns of one."""
        pitch = round_up(self.at.n_ff, COLUMNS)
        return Buffer(f"{branch.label}.gate_up", branch.n_rows, len(both) * pitch * 4), pitch

    def gate(
        self, branch: Branch, down: ExpertMatrix, x: Buffer, up: int, act: ActivationLayout
    ) -> tuple[Buffer, Buffer]:
        """What the gate lets through, or the activation gives; and in f32, where an adapter wants
        it so.
        """
        plain = ActivationLayout("f32", act.k)
        if act == plain or not self.adapted([down]):
            made = self._pack(branch, self.fn, x, up, act)
            return made, made
        floats = self._pack(branch, self.fn, x, up, plain)
        return self._pack(branch, "copy", floats, 0, act), floats

    def _pack(self, branch: Branch, fn: str, x: Buffer, up: int, act: ActivationLayout) -> Buffer:
        layout, counted = (act.kind, act.k, act.group, act.sub), branch.rows is not None
        per = branch.block if counted else self.at.n_used
        spec = Pack(fn, *layout, self.gated or fn == "copy", per, counted, act.unit)
        out = self.packed(branch, self.fn + (".pack" if fn == "copy" else ""), act)
        grid = Grid(spec.slices * per // act.together, "rows" if counted else "n_tokens")
        given: dict[str, Any] = {"x": x, "out": out, "up": up, "rows": branch.rows}
        self.steps.emit(out.name, spec, grid, stride=x.row_bytes // 4, **given)
        return out

    def packed(self, branch: Branch, name: str, act: ActivationLayout) -> Buffer:
        """For its rows, whole groups."""
        return Buffer(f"{branch.label}.{name}", branch.n_rows // act.group, act.group_bytes, "u1")

    def adapted(self, matrices: list[ExpertMatrix]) -> bool:
        """Whether any adapter adds to them."""
        return self.ops.adapted([each.name for each in matrices])

    def adapt(
        self,
        branch: Branch,
        matrices: list[ExpertMatrix],
        x: Rows | Buffer,
        y: Buffer,
        first: int = 0,
    ) -> None:
        """Add what adapters make of ``x``, a row of each token or one for each of the branch's, to
        ``y``'s rows from ``first`` on.
        """
        if not self.adapted(matrices):
            return
        from treadle.plan.lowering.lora import (
            emit_experts_lora,  # no plan without adapters needs it
        )

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
        """``x``: a row for each of the branch's, or ``of_tokens``; ``first``: of ``y``'s rows."""
        steps, at, heights = self.steps, self.at, [each.height for each in matrices]
        strips = spec.strips(heights, steps.isa.lanes)
        stems = [each.name for each in matrices]
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
            used=at.n_used / at.n,
            met=branch.met,
            n_flops=2 * spec.k * sum(heights) * at.n_used,
            shape=(sum(heights), spec.k),
            x=x,
            y=y,
            stride=y.row_bytes // 4,
            tiles=branch.tiles,
            w=[steps.weight(f"{stem}.weight") for stem in stems],
            bias=[steps.vector(f"{stem}.bias") for stem in stems] if spec.bias else None,
            factor=[steps.factor(stem) for stem in stems] if spec.factor else None,
            rows=heights,
            column=columns,
            pitch=[each.pitch for each in matrices],
            **given,
        )
