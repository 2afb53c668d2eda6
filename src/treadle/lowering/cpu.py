"""The CPU's lowering: which kernels a graph's ops become, in which layouts and tiles.

Most ops are put off until their result is used, and what uses it decides: a norm is written in the
layout that the product after it wants, an addition becomes a product's residual, products of one
input are one step, and so are rotation, norms of heads and the way into the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.kernels.act import Act
from treadle.kernels.attention import Attention
from treadle.kernels.attention_item import SPLIT
from treadle.kernels.choice import SHIPPED, Table, gated
from treadle.kernels.elementwise import Embed, Norm, Pack
from treadle.kernels.gemm import Gemm
from treadle.kernels.matmul import COLUMNS
from treadle.kernels.merge import Merge
from treadle.kernels.pooling import Pooling
from treadle.kernels.rope import RopeStore
from treadle.kernels.spec import Grid, numbered, round_up
from treadle.lowering.steps import Steps
from treadle.lowering.values import (
    Floats,
    GateUp,
    Normed,
    Outputs,
    Product,
    Products,
    Roped,
    Value,
    of_outputs,
)
from treadle.models.graphs import GRAPHS
from treadle.models.ops import Ops, Rows
from treadle.plan import Buffer, Plan

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kvcache import KVCache
    from treadle.lowering.weights import Weights
    from treadle.models.config import Config


def build_plan(
    config: Config,
    weights: Weights,
    cache: KVCache,
    isa: Isa,
    n_tokens: int,
    n_outputs: int,
    *,
    n_threads: int,
    deterministic: bool = False,
    table: Table = SHIPPED,
    output: str = "logits",
) -> Plan:
    """The plan for batches of up to ``n_tokens`` tokens that want ``output`` of up to
    ``n_outputs``; ``table``: this machine's own tiles.
    """
    graph = GRAPHS[config.arch.graph]
    steps = Steps(config, weights, cache, isa, n_tokens, n_outputs, n_threads, deterministic, table)
    ops = CpuOps(steps)
    if output not in graph.outputs:
        have = f"a model of the graph {config.arch.graph!r} has {', '.join(graph.outputs)}"
        raise UnsupportedError(f"no {output}: {have}")
    graph.outputs[output](ops, graph.build(ops))
    plan = steps.plan
    if output != next(iter(graph.outputs)):  # tensors of the first output alone
        rows = {row.name for row in graph.rows} & plan.tensors
        plan.tensors_ignored |= rows - plan.tensors_used
    plan.place()
    return plan


# Ops beside the common ones, by name: ``word(ops, label, *rows, **given)`` gives rows.
WORDS: dict[str, Callable[..., Rows]] = {}


class CpuOps(Ops):
    """The ops of one plan, as steps."""

    def __init__(self, steps: Steps) -> None:
        self.config, self.steps = steps.config, steps

    def has(self, name: str) -> bool:
        return self.steps.has(name)

    # -- ops --------------------------------------------------------------------------------------

    def embed(self, label: str, weight: str, scale: float) -> Rows:
        steps = self.steps
        fmt, width = steps.weights.format(f"{weight}.weight"), self.config.n_embd
        x = steps.floats("x", width)
        steps.emit(
            label,
            Embed(fmt.name, width, scale),
            Grid(1, "n_tokens"),
            w=steps.weight(f"{weight}.weight"),
            x=x,
            stride=x.row_bytes // 4,
            n_bytes=fmt.row_bytes(width),
            shape=(width,),
        )
        return Floats(label, width, x)

    def norm(
        self, label: str, x: Rows, weight: str, *, heads: int = 1, centred: bool = False
    ) -> Rows:
        return Normed(label, x.width, x, weight, heads, centred, outputs=of_outputs(x))

    def linears(self, label: str, x: Rows, weights: Sequence[str]) -> list[Rows]:
        heights = [self.steps.weights.tensor(f"{name}.weight").shape[0] for name in weights]
        of, outputs = Products(label, x, list(weights), heights), of_outputs(x)
        return [Product(label, n, of, i, outputs=outputs) for i, n in enumerate(heights)]

    def gated(self, label: str, gate: Rows, up: Rows, fn: str) -> Rows:
        return GateUp(label, gate.width, gate, up, fn)

    def rope(self, label: str, x: Rows, table: int) -> Rows:
        return Roped(label, x.width, x, table)

    def outputs(self, x: Rows) -> Rows:
        return Outputs(x.label, x.width, x, outputs=True)

    def pool(self, label: str, x: Rows, how: str, *, unit: bool = False) -> Rows:
        rows, out = self.floats(x), self.steps.floats(label, x.width, outputs=True)
        self.steps.emit(
            label,
            Pooling(how, x.width, unit),
            Grid(1, "n_parts"),
            x=rows,
            out=out,
            stride=rows.row_bytes // 4,
            out_stride=out.row_bytes // 4,
        )
        return Floats(label, x.width, out)

    def call(self, word: str, label: str, *rows: Rows, **given: Any) -> Rows:
        if word not in WORDS:
            raise UnsupportedError(f"{label}: the CPU has no {word!r}")
        return WORDS[word](self, label, *rows, **given)

    def result(self, name: str, x: Rows) -> None:
        self.steps.plan.outputs[name] = self.floats(x)

    def add(self, x: Rows, h: Rows) -> Rows:
        """A product adds ``x`` by itself, and so does a norm behind one."""
        steps, residual = self.steps, self.floats(x)
        if residual.row_bytes != steps.floats("", x.width).row_bytes:
            raise UnsupportedError(
                f"{x.label}: a sum of rows of {x.width}, no multiple of {COLUMNS}"
            )
        if isinstance(h, Product) and h.of.y is None and len(h.of.names) == 1:
            return Floats(h.label, h.width, self._multiply(h.of, residual))
        if not isinstance(h, Normed) or h.heads > 1:
            raise UnsupportedError(f"{h.label}: an addition to what is neither product nor norm")
        y, out = self.floats(h.x), steps.floats(h.label, h.width)
        self._norm_step(h.label, h, Act("f32", h.width), y, out, residual)
        return Floats(h.label, h.width, out)

    def attend(self, label: str, layer: int, q: Rows, k: Rows, v: Rows) -> Rows:
        steps, config, at = self.steps, self.config, self.config.layers[layer]
        pool, qkv = steps.cache.pool_of(at.kv_from), self._rotated(layer, q, k, v)
        spec = Attention(
            steps.cache.kv,
            at.n_head,
            at.n_head_kv,
            at.head_dim,
            steps.plan.query_tile,
            at.window,
            pool.index,
            config.attn_softcap,
            steps.matrix_attention,
            at.head_dim_v,
            at.causal,
        )
        width = at.n_head * at.head_dim_v
        out = steps.floats(f"{label}.out", width)
        split, n_tokens = steps.plan.split_keys, steps.plan.n_tokens
        n_partials = steps.cache.max_partials(n_tokens, SPLIT) if split else 1
        partials = Buffer(f"{label}.partials", n_partials, spec.partial_values * 4)
        steps.emit(
            label,
            spec,
            Grid(spec.n_groups, numbered("n_attn_items", pool.index)),
            qkv=qkv,
            pool=pool.const,
            out=out,
            partials=partials,
            stride=qkv.row_bytes // 4,
            out_stride=out.row_bytes // 4,
            page_bytes=pool.cell_bytes,
            layer_off=pool.layer_off(at.kv_from),
        )
        if split:
            steps.emit(
                f"{label}.merge",
                Merge(spec.n_groups, spec.heads, spec.tokens, at.head_dim_v, pool.index),
                Grid(spec.n_groups, numbered("n_attn_merges", pool.index)),
                partials=partials,
                out=out,
                out_stride=out.row_bytes // 4,
            )
        return Floats(label, width, out)

    # -- how values are made ----------------------------------------------------------------------

    def floats(self, x: Rows) -> Buffer:
        """``x`` in f32, from the first column on."""
        buffer, column = self._place(x)
        if column:
            raise UnsupportedError(f"{x.label}: one of several products, by itself")
        return buffer

    def _place(self, x: Rows) -> tuple[Buffer, int]:
        """``x`` in f32, and the column where it begins."""
        if isinstance(x, Product):
            return self._multiply(x.of), x.of.columns[x.index]
        if isinstance(x, Floats):
            return x.buffer, 0
        if isinstance(x, Normed) and x.heads == 1:
            return self._activations(x, Act("f32", x.width)), 0
        raise UnsupportedError(f"{x.label}: its rows as plain floats")

    def _activations(self, x: Rows, act: Act) -> Buffer:
        """``x`` in the layout ``act``."""
        assert isinstance(x, Value)
        if act not in x.acts:
            if isinstance(x, Normed) and x.heads == 1:
                x.acts[act] = self._norm(x, act)
            elif isinstance(x, GateUp):
                x.acts[act] = self._gate(x, act)
            else:
                floats = self.floats(x)
                x.acts[act] = self._pack(f"{x.label}.pack", "copy", floats, act, 0)
        return x.acts[act]

    def _norm(self, x: Normed, act: Act) -> Buffer:
        steps, source = self.steps, x.x.x if isinstance(x.x, Outputs) else x.x
        label = x.label + (f".{act.kind}_group{act.group}_sub{act.sub}" if x.acts else "")
        out = steps.activations(label, act, outputs=x.outputs)
        self._norm_step(label, x, act, self.floats(source), out)
        return out

    def _norm_step(
        self,
        label: str,
        x: Normed,
        act: Act,
        rows: Buffer,
        out: Buffer,
        residual: Buffer | None = None,
    ) -> None:
        steps, bias = self.steps, f"{x.weight}.bias"
        biased = steps.has(bias)
        spec = Norm(
            act.kind,
            act.k,
            act.group,
            self.config.norm_eps,
            add=residual is not None,
            outputs=x.outputs,
            sub=act.sub,
            centred=x.centred,
            bias=biased,
        )
        steps.emit(
            label,
            spec,
            act.grid(1, "n_outputs" if x.outputs else "n_tokens"),
            x=rows,
            w=steps.vector(f"{x.weight}.weight"),
            out=out,
            residual=residual,
            stride=rows.row_bytes // 4,
            bias=steps.vector(bias) if biased else None,
        )

    def _pack(self, label: str, fn: str, x: Buffer, act: Act, up: int) -> Buffer:
        out = self.steps.activations(label, act)
        spec = Pack(fn, act.kind, act.k, act.group, act.sub)
        grid = act.grid(spec.slices, "n_tokens")
        self.steps.emit(label, spec, grid, x=x, out=out, stride=x.row_bytes // 4, up=up)
        return out

    def _gate(self, x: GateUp, act: Act) -> Buffer:
        """Both products and the activation in one step, where tokens are many and the two matrices
        alike; else one more step.
        """
        steps, gate, up = self.steps, x.gate, x.up
        if not (
            isinstance(gate, Product)
            and isinstance(up, Product)
            and gate.of is up.of
            and (gate.index, up.index) == (0, 1)
        ):
            raise UnsupportedError(f"{x.label}: gate and up that are no products of one input")
        of, names = gate.of, gate.of.names
        spec = steps.matmul(names[0], of.x.width)
        formats = {steps.weights.format(f"{name}.weight").name for name in names}
        biased = any(steps.has(f"{name}.bias") for name in names)
        if of.y is None and len(formats) == 1 and not biased and isinstance(spec, Gemm):
            fmt, n = steps.weights.format(f"{names[0]}.weight"), steps.family(steps.plan.n_tokens)
            both = gated(fmt, steps.isa, of.x.width, x.width, x.fn, act, n, steps.table)
            if both is not None:
                h = self._activations(of.x, both.layout())
                out = steps.activations(x.label, both.result())
                steps.multiply(f"{of.label}_{x.fn}", both, names, of.heights, [0, 0], h, out)
                return out
        return self._pack(x.label, x.fn, self.floats(gate), act, self._place(up)[1])

    def _multiply(self, of: Products, residual: Buffer | None = None) -> Buffer:
        """Make products: those of the same format and biases are one step."""
        steps, outputs = self.steps, of_outputs(of.x)
        if of.y is not None:
            return of.y
        width = 0
        for height in of.heights:
            of.columns.append(width)
            width += round_up(height, COLUMNS)
        groups: dict[tuple[str, bool], list[int]] = {}
        inputs = []
        for j, name in enumerate(of.names):
            layout = steps.matmul(name, of.x.width, outputs=outputs).layout()
            inputs.append(self._activations(of.x, layout))
            key = steps.weights.format(f"{name}.weight").name, steps.has(f"{name}.bias")
            groups.setdefault(key, []).append(j)
        of.y = steps.floats(of.label, width, outputs=outputs)
        for (_, bias), members in groups.items():
            part = [of.names[j] for j in members]
            spec = steps.matmul(
                part[0],
                of.x.width,
                segments=len(part),
                bias=bias,
                residual=residual is not None,
                outputs=outputs,
            )
            label = of.label
            if len(groups) > 1:
                stem = "_".join(name.rpartition("_")[2] for name in part)
                label = f"{label.rpartition('.')[0]}.{stem}"
            steps.multiply(
                label,
                spec,
                part,
                [of.heights[j] for j in members],
                [of.columns[j] for j in members],
                inputs[members[0]],
                of.y,
                residual,
            )
        return of.y

    def _rotated(self, layer: int, q: Rows, k: Rows, v: Rows) -> Buffer:
        """Rotate queries and keys in place, and put keys and values into their pages."""
        steps, config, at = self.steps, self.config, self.config.layers[layer]
        if not (isinstance(q, Roped) and isinstance(k, Roped) and q.table == k.table):
            raise UnsupportedError(f"L{layer}: queries and keys without a rope that they share")
        norms = [
            steps.vector(f"{x.weight}.weight") if isinstance(x, Normed) else None
            for x in (q.x, k.x)
        ]
        sources = [x.x if isinstance(x, Normed) else x for x in (q.x, k.x)]
        (qkv, q_column), (kept, k_column), (other, v_column) = map(self._place, (*sources, v))
        if not (qkv is kept is other) or q_column or (norms[0] is None) != (norms[1] is None):
            raise UnsupportedError(f"L{layer}: queries, keys and values that do not lie together")
        pool = steps.cache.pool_of(layer)
        steps.emit(
            q.label,
            RopeStore(
                config.arch.rope,
                steps.cache.kv,
                at.n_head,
                at.n_head_kv,
                at.head_dim,
                config.ropes[q.table].dims,
                config.attn_scale,
                config.norm_eps if norms[0] else 0.0,
                pool.index,
                q.table,
                at.head_dim_v,
            ),
            Grid(at.n_head_kv, "n_tokens"),
            qkv=qkv,
            q_norm=norms[0],
            k_norm=norms[1],
            pool=pool.const,
            stride=qkv.row_bytes // 4,
            k_column=k_column,
            v_column=v_column,
            page_bytes=pool.cell_bytes,
            layer_off=pool.layer_off(layer),
        )
        return qkv
