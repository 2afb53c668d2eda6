"""Shared parts of the expert lowerings (``experts.py``): routing, products by expert, the gate
between them, adapters.
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
from treadle.models.ops import tensor_of
from treadle.plan.plan import Buffer

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.models.config import Experts
    from treadle.models.ops import Rows, TensorName
    from treadle.plan.lowering.deferred import Branch, ExpertMatrix
    from treadle.plan.lowering.materialize import Materializer


class Mixture:
    """The mixture of experts of one layer."""

    def __init__(
        self, ops: Materializer, label: str, layer: int, at: Experts, chunks: bool
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
        self.fn = at.activation or ops.config.arch.activation
        self.blk = f"blk.{layer}.ffn"
        self.gated = ops.config.arch.gated
        self.n_choices = at.n_used * self.steps.plan.n_tokens

    def route(self, scores: Rows) -> tuple[Buffer, Buffer]:
        """Emit the router; return each choice's expert, i32, and its weight, f32."""
        at = self.routed
        rows = self.ops.floats(scores)
        # A bias for the choice only, not the weights: ``exp_probs_b`` in models/ffns/experts.py.
        bias = f"{self.blk.rpartition('.')[0]}.exp_probs_b.bias"
        last = f"{self.blk}_down_{self.exps}"
        has_bias = self.steps.has(bias)
        scales = f"{last}.scale"
        own = self.steps.has(scales) and not self.has_factor(last)
        if own and self.ops.adapted([last]):
            # NVFP4's scale applies to the weights only, Gemma 4's to the expert's output.
            why = f"the products are scaled by {scales}, and the adapter's must not be"
            raise UnsupportedError(
                f"{self.steps.weights.gguf.path}: {last}.weight: LoRA is not supported here: {why}"
            )
        chosen = Buffer(f"{self.label}.chosen", self.n_choices, 4, "i4")
        weights = Buffer(f"{self.label}.weights", self.n_choices, 4)
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
        """Group the matrices into steps, by name: one step if their formats, biases and factors
        match.
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
        """Return whether a product is multiplied by a factor.

        That of ``down`` is folded into the experts' weights, unless a bias is added before.
        """
        steps = self.steps
        last = f"{self.blk}_down_{self.exps}"
        if stem != last:
            return steps.has_factor(stem)
        return steps.has(f"{last}.scale") and steps.has(f"{last}.bias")

    def format(self, matrices: list[ExpertMatrix]) -> Format:
        return self.steps.weights.format(tensor_of(matrices[0].stem, "weight"))

    def fields(self, matrices: list[ExpertMatrix]) -> dict[str, Any]:
        """Return the fields that all kernels for these matrices have."""
        stem = matrices[0].stem
        return {
            "segments": len(matrices),
            "bias": self.steps.has(tensor_of(stem, "bias")),
            "factor": self.has_factor(stem),
            "experts": self.at.n_used,
        }

    def first_rows(self, branch: Branch, both: list[ExpertMatrix]) -> tuple[Buffer, int]:
        """Return the buffer of the first products, side by side, and the columns of each."""
        pitch = round_up(self.at.n_ff, COLUMNS)
        return Buffer(f"{branch.label}.gate_up", branch.n_rows, len(both) * pitch * 4), pitch

    def gate(
        self, branch: Branch, down: ExpertMatrix, x: Buffer, up: int, act: ActivationLayout
    ) -> tuple[Buffer, Buffer]:
        """Return the gated or activated rows in the layout ``act``, and in f32 where an adapter
        needs them.
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
        """Return a buffer for the branch's rows, in whole groups."""
        return Buffer(f"{branch.label}.{name}", branch.n_rows // act.group, act.group_bytes, "u1")

    def adapted(self, matrices: list[ExpertMatrix]) -> bool:
        """Return whether any adapter adds to their products."""
        return self.ops.adapted([each.stem for each in matrices])

    def adapt(
        self,
        branch: Branch,
        matrices: list[ExpertMatrix],
        x: Rows | Buffer,
        y: Buffer,
        first: int = 0,
    ) -> None:
        """Add the adapters' products of ``x`` to the rows of ``y`` from ``first`` on.

        ``x``: one row per token, or as a Buffer one per row of the branch.
        """
        if not self.adapted(matrices):
            return
        from treadle.plan.lowering.lora import (
            emit_experts_lora,  # only plans with adapters need it
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
        """Emit products. ``x``: one row per row of the branch, or ``of_tokens`` per token;
        ``first``: the first row in ``y``.
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
            used=at.n_used / at.n,
            met=branch.met,
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
