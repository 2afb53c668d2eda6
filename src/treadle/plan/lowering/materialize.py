"""Materialisation of deferred values: on first use, buffers are allocated and steps emitted, in the
layout that the consumer wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.kernels.activation_layout import BLOCK, ActivationLayout
from treadle.kernels.elementwise.elementwise import Norm, Pack
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.select import gated
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Grid
from treadle.models.lora import EMBEDDINGS, TYPES
from treadle.models.ops import tensor_of
from treadle.plan.lowering.deferred import (
    ActivationOf,
    ExpertSum,
    Floats,
    GateUp,
    NormOf,
    OutputRows,
    Product,
    Products,
    StepOutput,
    Value,
    is_per_output,
)
from treadle.plan.weights import tensor_of_slice

if TYPE_CHECKING:
    from treadle.models.config import Config
    from treadle.models.ops import Rows, TensorName
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.plan import Buffer


class Materializer:
    """Materialises the deferred values of one plan."""

    config: Config
    steps: Steps

    def floats(self, x: Rows) -> Buffer:
        """Return ``x`` as f32 rows that begin at column 0. Raises UnsupportedError if it begins
        elsewhere.
        """
        buffer, column = self.place(x)
        if column:
            raise UnsupportedError(
                f"{x.label}: one product of a fused group cannot be used alone here"
            )
        return buffer

    def place(self, x: Rows) -> tuple[Buffer, int]:
        """Return ``x`` as f32 rows in a buffer, and the column where they begin. Raises
        UnsupportedError for rows that exist only in a product's layout.
        """
        if isinstance(x, Product):
            return self._multiply(x.of), x.of.columns[x.index]
        if isinstance(x, Floats):
            return x.buffer, x.column
        if isinstance(x, (GateUp, ActivationOf)) or (isinstance(x, NormOf) and x.heads == 1):
            return self.activations(x, ActivationLayout("f32", x.width)), 0
        if isinstance(x, ExpertSum):
            return self.combine(x), 0
        if isinstance(x, NormOf):
            rows, column = self.place(x.x)
            self.column_norm(x, rows, column)
            return rows, column
        raise UnsupportedError(f"{x.label}: cannot be materialised as f32 rows")

    def column_norm(self, x: NormOf, rows: Buffer, column: int) -> None:
        """Emit the norm ``x`` on ``rows``: of ``x.heads`` equal parts of each row, in place, from
        ``column`` on.
        """
        from treadle.kernels.elementwise.column_norm import ColumnNorm

        bias = f"{x.weight}.bias"
        biased = self.steps.has(bias)
        self.steps.emit(
            x.label,
            ColumnNorm(x.width // x.heads, x.eps, x.heads, x.centred, biased, x.own),
            Grid(x.heads, "n_tokens"),
            x=rows,
            w=self.steps.vector(f"{x.weight}.weight", x.scale),
            stride=rows.row_bytes // 4,
            column=column,
            bias=self.steps.vector(bias, x.scale) if biased else None,
        )

    def combine(self, x: ExpertSum, residual: Buffer | None = None) -> Buffer:
        """Emit the weighted sum of experts' rows, with the shared expert, plus ``residual`` if
        given. Return f32 rows.
        """
        from treadle.kernels.moe.dispatch import Combine

        shared, gate = (*x.shared, None, None)[:2]
        out = self.steps.floats(x.label, x.width)
        spec = Combine(
            x.width,
            x.n_used,
            places=x.places is not None,
            residual=residual is not None,
            shared=shared is not None,
            gate=gate is not None,
            mean=x.mean and shared is not None,
        )
        self.steps.emit(
            f"{x.label}.combine",
            spec,
            Grid(spec.pieces, "n_tokens"),
            y=x.y,
            weights=x.weights,
            places=x.places,
            residual=residual,
            shared=shared,
            gate=gate,
            out=out,
            stride=out.row_bytes // 4,
            gate_stride=gate.row_bytes // 4 if gate else 0,
        )
        return out

    def activations(self, x: Rows, act: ActivationLayout) -> Buffer:
        """Return ``x`` in the layout ``act``; the steps are emitted once for each layout."""
        assert isinstance(x, Value)
        if act not in x.acts:
            if isinstance(x, NormOf) and x.heads == 1:
                x.acts[act] = self._norm(x, act)
            elif isinstance(x, GateUp):
                x.acts[act] = self._gate(x, act)
            elif isinstance(x, StepOutput):
                x.acts[act] = x.make(act)
            elif isinstance(x, ActivationOf):
                x.acts[act] = self._pack(x.label, x.fn, self.floats(x.x), act)
            else:
                rows, column = self.place(x)
                label = f"{x.label}.pack{column or ''}{_nth(x, act)}"
                if column:
                    x.acts[act] = self._pack_columns(label, rows, act, column)
                else:
                    x.acts[act] = self._pack(label, "copy", rows, act)
        return x.acts[act]

    def _pack_columns(self, label: str, rows: Buffer, act: ActivationLayout, column: int) -> Buffer:
        """Emit a step that writes ``act.k`` columns of ``rows``, from ``column`` on, in the layout
        ``act``: one of several products side by side.
        """
        from treadle.kernels.attention.latent_steps import PackHeads  # few models need it

        out = self.steps.activations(label, act)
        self.steps.emit(
            label,
            PackHeads(act.kind, act.k, act.group, 1, act.sub, unit=act.unit),
            act.grid(1, "n_tokens"),
            x=rows,
            out=out,
            stride=rows.row_bytes // 4,
            column=column,
            pitch=0,
            head_bytes=0,
        )
        return out

    def _norm(self, x: NormOf, act: ActivationLayout) -> Buffer:
        steps = self.steps
        source = x.x.x if isinstance(x.x, OutputRows) else x.x
        label = x.label + _nth(x, act)
        out = steps.activations(label, act, outputs=x.outputs)
        self._norm_step(label, x, act, self.floats(source), out)
        return out

    def summand(self, x: Rows) -> Buffer:
        """Return ``x`` as f32 rows that are padded like a product's, so that a product can add
        them.
        """
        wide = self.steps.floats(f"{x.label}.rows", x.width)
        act = ActivationLayout("f32", x.width)
        if not isinstance(x, NormOf) or act.group_bytes == wide.row_bytes:
            return self.floats(x)
        if x.wide is None:
            x.wide = wide
            self._norm_step(f"{x.label}.rows", x, act, self.floats(x.x), wide, rows_out=True)
        return x.wide

    def _norm_step(
        self,
        label: str,
        x: NormOf,
        act: ActivationLayout,
        rows: Buffer,
        out: Buffer,
        residual: Buffer | None = None,
        *,
        rows_out: bool = False,
        gain: str = "",
    ) -> None:
        steps = self.steps
        bias = f"{x.weight}.bias"
        biased = steps.has(bias)
        weight = steps.vector(f"{x.weight}.weight", x.scale) if x.weight else None
        if not x.weight and x.scale != 1.0:
            each = [x.scale] * (x.width + COLUMNS)
            weight = steps.weights.numbers(f"{x.width} times {x.scale}", each)
        spec = Norm(
            act.kind,
            act.k,
            act.group,
            x.eps,
            add=residual is not None,
            outputs=x.outputs,
            sub=act.sub,
            centred=x.centred,
            weight=weight is not None,
            bias=biased,
            rows=rows_out,
            unit=act.unit,
            gain=bool(gain),
        )
        steps.emit(
            label,
            spec,
            act.grid(1, "n_outputs" if x.outputs else "n_tokens"),
            x=rows,
            w=weight,
            out=out,
            residual=residual,
            stride=rows.row_bytes // 4,
            bias=steps.vector(bias, x.scale) if biased else None,
            gain=steps.vector(f"{gain}.weight") if gain else None,
        )

    def _pack(
        self,
        label: str,
        fn: str,
        x: Buffer,
        act: ActivationLayout,
        up: int | None = None,
        apart: Buffer | None = None,
    ) -> Buffer:
        """Emit ``fn(x)`` in the layout ``act``. If ``up`` is given, it is multiplied by the values
        from column ``up`` on of ``apart``, or of ``x`` if ``apart`` is None.
        """
        out = self.steps.activations(label, act)
        gated = up is not None or fn == "copy"
        more: dict[str, Any] = {"unit": act.unit, "apart": apart is not None}
        spec = Pack(fn, act.kind, act.k, act.group, act.sub, gated, **more)
        given: dict[str, Any] = {"x": x, "out": out, "up": up or 0, "apart": apart}
        if apart is not None:
            given["apart_stride"] = apart.row_bytes // 4
        grid = act.grid(spec.slices, "n_tokens")
        self.steps.emit(label, spec, grid, stride=x.row_bytes // 4, **given)
        return out

    def _gate(self, x: GateUp, act: ActivationLayout) -> Buffer:
        """Emit ``fn(gate) * up`` in the layout ``act``.

        For many tokens, if gate and up are products with matrices of one format, this is one step
        with both products; else an activation step. Gate and up may be any rows.
        """
        steps = self.steps
        gate = x.gate
        up = x.up
        if not (
            isinstance(gate, Product)
            and isinstance(up, Product)
            and gate.of is up.of
            and (gate.index, up.index) == (0, 1)
        ):
            apart, column = self.place(up)
            return self._pack(x.label, x.fn, self.floats(gate), act, column, apart)
        of = gate.of
        stems = gate.of.stems
        spec = steps.matmul(stems[0], of.x.width)
        formats = {steps.weights.format(tensor_of(stem, "weight")).name for stem in stems}
        more = any(steps.has(tensor_of(stem, "bias")) or steps.has_factor(stem) for stem in stems)
        alike = len(formats) == 1 and not more and not self.adapted(stems)
        if of.y is None and alike and isinstance(spec, Gemm):
            fmt = steps.weights.format(tensor_of(stems[0], "weight"))
            given = fmt, steps.isa, of.x.width, x.width, x.fn, act, steps.plan.n_tokens, steps.table
            both = gated(*given, alone=steps.deterministic, int16=steps.int16)
            if both is not None:
                h = self.activations(of.x, both.layout())
                out = steps.activations(x.label, both.result())
                steps.multiply(f"{of.label}_{x.fn}", both, stems, of.heights, [0, 0], h, out)
                return out
        return self._pack(x.label, x.fn, self.floats(gate), act, self.place(up)[1])

    def _multiply(self, of: Products, residual: Buffer | None = None) -> Buffer:
        """Emit the products ``of``, plus ``residual`` if given. Matrices with the same format, bias
        and factor share one step. Return the buffer of all products.
        """
        steps = self.steps
        outputs = is_per_output(of.x)
        if of.y is not None:
            return of.y
        width = 0
        for height in of.heights:
            of.columns.append(width)
            width += round_up(height, COLUMNS)
        layouts = [steps.matmul(stem, of.x.width, outputs=outputs).layout() for stem in of.stems]
        rows = self._rows(of, layouts) if self.adapted(of.stems) else None
        groups: dict[tuple[str, bool, bool], list[int]] = {}
        inputs = []
        for j, stem in enumerate(of.stems):
            inputs.append(self.activations(of.x, layouts[j]))
            kind = steps.weights.format(tensor_of(stem, "weight")).name
            key = kind, steps.has(tensor_of(stem, "bias")), steps.has_factor(stem)
            groups.setdefault(key, []).append(j)
        of.y = steps.floats(of.label, width, outputs=outputs)
        for (_, bias, factor), members in groups.items():
            stems = [of.stems[j] for j in members]
            spec = steps.matmul(
                stems[0],
                of.x.width,
                segments=len(stems),
                bias=bias,
                factor=factor,
                residual=residual is not None,
                outputs=outputs,
            )
            label = of.label
            if len(groups) > 1:
                suffix = "_".join(str(stem).rpartition("_")[2] for stem in stems)
                label = f"{label.rpartition('.')[0]}.{suffix}"
            steps.multiply(
                label,
                spec,
                stems,
                [of.heights[j] for j in members],
                [of.columns[j] for j in members],
                inputs[members[0]],
                of.y,
                residual,
            )
        if rows is not None:
            from treadle.plan.lowering.lora import emit_lora  # only plans with adapters need it

            emit_lora(steps, of, rows, of.y)
        return of.y

    def adapted(self, stems: Sequence[TensorName]) -> bool:
        """Return whether an adapter adds to the products of any of the matrices ``stems``."""
        names: set[TensorName] = {f"{tensor_of_slice(stem)}.weight" for stem in stems}
        names |= {tensor_of(stem, "weight") for stem in stems}
        names.discard(EMBEDDINGS)  # tied output matrix
        return any(not names.isdisjoint(ranks) for ranks in self.steps.weights.adapters)

    def adapted_tables(self, weight: str) -> list[str]:
        """Return the embedding tables to be adapted: ``weight``, and the type table if its single
        row is added to all tokens; none if no adapter adds to them.
        """
        weights = self.steps.weights
        tables = [weight]
        is_first = f"{weight}.weight" == EMBEDDINGS and self.steps.has(TYPES)
        if is_first and weights.n_rows(TYPES) == 1:
            tables.append(TYPES.removesuffix(".weight"))
        met = [f"{name}.weight" in ranks for ranks in weights.adapters for name in tables]
        return tables if any(met) else []

    def _rows(self, of: Products, layouts: Sequence[ActivationLayout]) -> Buffer:
        """Return the input of the products ``of`` as f32 rows, and pack each of ``layouts`` from
        these, so that the op that makes the input is emitted once.
        """
        x = of.x
        assert isinstance(x, Value)
        if isinstance(x, Floats) and not x.column and not x.width % BLOCK:
            return x.buffer
        rows = self.activations(x, ActivationLayout("f32", x.width))
        for i, layout in enumerate(dict.fromkeys(layouts)):
            if layout not in x.acts:
                label = f"{of.label}.pack{i or ''}"
                x.acts[layout] = self._pack(label, "copy", rows, layout)
        return rows


def _nth(x: Value, act: ActivationLayout) -> str:
    """Return a suffix that makes the label of the step that writes ``x`` in the layout ``act``
    unique: "" for the first layout of these rows.
    """
    return f".{act.kind}_group{act.group}_sub{act.sub}" if x.acts else ""
