"""The lowering of the CPU and CUDA devices: chooses kernels, layouts and tiles for a graph's ops.

Most ops are deferred until their result is used, and the consumer decides: a norm is written in the
layout of the next product, an addition becomes a product's residual, products of one input are one
step, and so are rope, head norms and the store into the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.elementwise.elementwise import Embed
from treadle.kernels.matmul.select import SHIPPED, TunedTable
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Grid
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import TAPPED, tap_name
from treadle.models.keys import ENC
from treadle.models.mixers.cross import STORED
from treadle.models.ops import Ops, Rows, tensor_of
from treadle.plan.lowering.attention import emit_attention
from treadle.plan.lowering.deferred import (
    ActivationOf,
    Chosen,
    ExpertSum,
    Floats,
    GateUp,
    NormOf,
    OutputRows,
    Product,
    Products,
    RopeOf,
    is_per_output,
    unwrap,
)
from treadle.plan.lowering.logits import emit_result
from treadle.plan.lowering.materialize import Materializer
from treadle.plan.lowering.steps import Steps
from treadle.plan.plan import Buffer, Plan

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kvcache.cache import KVCache
    from treadle.models.config import Config
    from treadle.models.ops import TensorName
    from treadle.plan.weights import Weights


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
    table: TunedTable = SHIPPED,
    output: str = "logits",
    scarce: bool = False,
    int16: bool = False,
    lowering: Callable[[Steps], PlanOps] | None = None,
) -> Plan:
    """Return the plan for batches of up to ``n_tokens`` tokens, with up to ``n_outputs`` rows of
    ``output``, one of the graph's outputs.

    deterministic: a text's results depend neither on how it is split into batches nor on the
    other texts in them.
    table: this machine's tuned tiles.
    scarce: memory does not hold the model, so experts are paged in during a run.
    int16: as in ``Device.plan``.
    lowering: makes the ops in place of ``PlanOps``, for plans with hooks.

    Raises UnsupportedError for an output or an op that the graph or the device lacks.
    """
    graph = GRAPHS[config.arch.graph]
    sizes = n_tokens, n_outputs, n_threads
    steps = Steps(config, weights, cache, isa, *sizes, deterministic, table, int16=int16)
    steps.scarce = scarce
    steps.taps = config.taps if output == TAPPED else ()
    ops = (lowering or PlanOps)(steps)
    if output not in graph.outputs:
        name = config.arch.name
        has = ", ".join(graph.outputs)
        if output == "logits":
            why = f"{name} does not generate text; its outputs are {has}"
            raise UnsupportedError(f"no logits: {why}: use Model.embed or treadle embed")
        raise UnsupportedError(f"no {output}: the outputs of {name} are {has}")
    graph.outputs[output](ops, graph.build(ops))
    plan = steps.plan
    if output != next(iter(graph.outputs)):  # unused: tensors of the first output only
        rows = {row.name for row in graph.rows} & plan.tensors
        plan.tensors_ignored |= rows - plan.tensors_used
    if graph.apart:
        plan.tensors_ignored |= plan.tensors - plan.tensors_used
    if config.stage is not None:
        stems = tuple(f"blk.{i}." for i in config.stage)
        others = {name for name in plan.tensors if not name.startswith(stems)}
        plan.tensors_ignored |= others - plan.tensors_used
    if config.encoder is not None:  # the encoder's plans, and that of its rows' keys and values
        others = {n for n in plan.tensors if n.startswith(ENC) or any(s in n for s in STORED)}
        plan.tensors_ignored |= others - plan.tensors_used
    plan.place()
    return plan


# Additional ops by name: ``word(ops, label, *rows, **given)`` returns rows. Those in other modules
# (``OP_MODULES``) are imported when a model needs them.
WORDS: dict[str, Callable[..., Rows]] = {}
_RECURRENT = (
    *("convolution", "gated_convolution", "block_convolution"),
    *("rates", "mamba2", "delta", "delta_apart"),
    *("silu_gate", "sigmoid_gate", "softplus_gate", "halves"),
    *("part_convolution", "channel_rates", "channel_delta", "normed_gate"),
    *("selective", "columns_norm", "residual_convolution"),
)
_ELEMENTWISE = (
    *(
        "clamped",
        "capped",
        "tempered",
        "multiplied",
        "normed_heads",
        "normed_times",
        "weighed",
        "xielu",
    ),
    *("embedded_beside", "embedded_before", "concatenated", "projected_streams"),
    *("spread", "take", "join", "predict", "correct", "add_beside", "laurel", "sparse_gate"),
)
_STREAMS = (
    *("repeated", "normed_streams", "mixed_streams", "add_to_streams", "ngrams", "output_rows"),
    *("sum_of_streams", "spread_to_streams"),
    *("stream_weights", "weighed_streams", "blended_streams"),
)
_COMPRESSED = (*("units_stored", "units_chosen", "rows_chosen", "rows_attended", "rows_stored"),)
OP_MODULES = {
    "experts": "treadle.plan.lowering.experts",
    **dict.fromkeys(("latent", "by_head"), "treadle.plan.lowering.latent"),
    **dict.fromkeys(("chosen", "moving_mean"), "treadle.plan.lowering.indexer"),
    **dict.fromkeys(_STREAMS, "treadle.plan.lowering.streams"),
    "attention_residual": "treadle.plan.lowering.attention_residuals",
    **dict.fromkeys(_COMPRESSED, "treadle.plan.lowering.compressed"),
    **dict.fromkeys(_RECURRENT, "treadle.plan.lowering.recurrent"),
    **dict.fromkeys(_ELEMENTWISE, "treadle.plan.lowering.elementwise"),
    "media_rows": "treadle.plan.lowering.media",
    **dict.fromkeys(("cross_attend", "cross_store"), "treadle.plan.lowering.cross"),
    "relative_logits": "treadle.plan.lowering.relative_logits",
    "kv_store": "treadle.plan.lowering.kv_store",
    "clustered": "treadle.plan.lowering.clusters",
    **dict.fromkeys(("token_shift", "wkv_keys", "wkv", "wkv_out"), "treadle.plan.lowering.wkv"),
}


class PlanOps(Materializer, Ops):
    """The ops of one plan, implemented as steps for CPU and CUDA devices."""

    def __init__(self, steps: Steps) -> None:
        self.config = steps.config
        self.steps = steps
        self._shared_rows: dict[str, Rows] = {}

    def has(self, name: str) -> bool:
        return self.steps.has(name)

    # -- ops --------------------------------------------------------------------------------------

    def embed(self, label: str, weight: str, scale: float) -> Rows:
        steps = self.steps
        fmt = steps.weights.format(f"{weight}.weight")
        n_rows, width = steps.weights.tensor(f"{weight}.weight").shape
        rows = n_rows if n_rows < self.config.n_vocab else 0
        x = steps.floats("x", width)
        steps.emit(
            label,
            Embed(fmt.name, width, scale, rows),
            Grid(1, "n_tokens"),
            w=steps.weight(f"{weight}.weight"),
            x=x,
            stride=x.row_bytes // 4,
            **steps.row_of(f"{weight}.weight"),
            shape=(width,),
        )
        if names := self.adapted_tables(weight):
            from treadle.plan.lowering.lora import emit_embedding_lora

            emit_embedding_lora(steps, label, names, x, width, scale)
        return Floats(label, width, x)

    def given(self, label: str, width: int) -> Rows:
        x = self.steps.plan.takes[label] = self.steps.floats(label, width)
        return Floats(label, width, x)

    def add_rows(self, label: str, x: Rows, weight: str, *, by: str) -> Rows:
        rows = self.floats(x)
        self.steps.emit(
            label,
            AddRows(x.width, by),
            Grid(1, "n_parts"),
            x=rows,
            w=self.steps.vector(f"{weight}.weight"),
            stride=rows.row_bytes // 4,
        )
        return Floats(label, x.width, rows)

    def norm(
        self,
        label: str,
        x: Rows,
        weight: str,
        *,
        heads: int = 1,
        centred: bool = False,
        scale: float = 1.0,
        eps: float | None = None,
        own: bool = False,
    ) -> Rows:
        eps = self.config.norm_eps if eps is None else eps
        outputs = is_per_output(x)
        of = x.width, x, weight, heads, centred, scale, eps
        return NormOf(label, *of, own=own, outputs=outputs)

    def linears(self, label: str, x: Rows, weights: Sequence[TensorName]) -> list[Rows]:
        if self.config.bounds:
            # Few towers have them.
            from treadle.plan.lowering.clamped_products import bounded_products

            return bounded_products(self, label, x, weights)
        return self.products(label, x, weights)

    def products(self, label: str, x: Rows, weights: Sequence[TensorName]) -> list[Rows]:
        """Return ``x W^T (+ bias)`` for each of the matrices ``weights``, without the clamps of
        ``linears``.
        """
        heights = [self.steps.weights.n_rows(tensor_of(stem, "weight")) for stem in weights]
        of = Products(label, x, list(weights), heights)
        outputs = is_per_output(x)
        return [Product(label, n, of, i, outputs=outputs) for i, n in enumerate(heights)]

    def gated(self, label: str, gate: Rows, up: Rows, fn: str) -> Rows:
        return GateUp(label, gate.width, gate, up, fn)

    def activate(self, label: str, x: Rows, fn: str) -> Rows:
        return ActivationOf(label, x.width, x, fn)

    def rope(self, label: str, x: Rows, table: int) -> Rows:
        return RopeOf(label, x.width, x, table)

    def outputs(self, x: Rows) -> Rows:
        return OutputRows(x.label, x.width, x, outputs=True)

    def pool(self, label: str, x: Rows, how: str, *, unit: bool = False) -> Rows:
        from treadle.kernels.elementwise.pooling import Pooling  # only embeddings need it

        rows = self.floats(x)
        out = self.steps.floats(label, x.width, outputs=True)
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
        result: Rows = self._word(word, label)(self, label, *rows, **given)
        return result

    def halves(self, label: str, x: Rows, heads: int) -> tuple[Rows, Rows]:
        first, second = self._word("halves", label)(self, label, x, heads)
        return first, second

    def _word(self, word: str, label: str) -> Callable[..., Any]:
        if word in WORDS:
            return WORDS[word]
        if word not in OP_MODULES:
            raise UnsupportedError(f"{label}: the CPU device does not support {word!r}")
        result: Callable[..., Any] = getattr(import_module(OP_MODULES[word]), word)
        return result

    def result(self, name: str, x: Rows) -> None:
        emit_result(self.steps, name, x, self.floats(x))

    def columns(self, x: Rows, first: int, n: int) -> Rows:
        rows, column = self.place(x)
        return Floats(x.label, n, rows, column + first)

    def once(self, label: str, make: Callable[[Ops], Rows]) -> Rows:
        if label not in self._shared_rows:
            self._shared_rows[label] = make(self)
        return self._shared_rows[label]

    def add(self, x: Rows, h: Rows, *, gain: str = "") -> Rows:
        """Return ``x + h``, fused into the step that computes ``h`` if that is a product, a sum of
        experts or a norm; else as a separate step. ``gain`` is supported with a norm only.
        """
        steps = self.steps
        residual = self.summand(x)
        if residual.row_bytes != steps.floats("", x.width).row_bytes:
            raise UnsupportedError(
                f"{x.label}: a sum of rows of {x.width}, expected a multiple of {COLUMNS}"
            )
        if gain and not (isinstance(h, NormOf) and h.heads == 1):
            raise UnsupportedError(f"{h.label}: a scaled sum is supported with a norm only")
        if isinstance(h, Product) and h.of.y is None and len(h.of.stems) == 1:
            return Floats(h.label, h.width, self._multiply(h.of, residual))
        if isinstance(h, ExpertSum):
            return Floats(h.label, h.width, self.combine(h, residual))
        out = steps.floats(h.label, h.width)
        if isinstance(h, NormOf) and h.heads == 1:
            act = ActivationLayout("f32", h.width)
            self._norm_step(h.label, h, act, self.floats(h.x), out, residual, gain=gain)
            return Floats(h.label, h.width, out)
        rows = self.floats(h)
        stride = out.row_bytes // 4
        if rows.row_bytes != out.row_bytes:
            raise UnsupportedError(f"{h.label}: a sum with a part of wider rows is not supported")
        grid = Grid(1, "n_tokens")
        steps.emit(f"{h.label}.add", Add(h.width), grid, x=residual, h=rows, out=out, stride=stride)
        return Floats(h.label, h.width, out)

    def tapped(self, i: int) -> bool:
        return i in self.steps.taps

    def layer(self, i: int, x: Rows) -> Rows:
        if i not in self.steps.taps:
            return x
        buffer = self.summand(x) if isinstance(x, NormOf) else self.floats(x)
        self.steps.plan.outputs[tap_name(i)] = buffer
        return Floats(x.label, x.width, buffer)

    def steer(self, label: str, x: Rows, *, layer: int) -> Rows:
        if not self.steps.weights.directions:
            return x
        from treadle.plan.lowering.control import emit_control  # few models have control vectors

        return emit_control(self, label, x, layer)

    def attend(
        self,
        label: str,
        layer: int,
        q: Rows,
        k: Rows | None = None,
        v: Rows | None = None,
        *,
        sinks: str = "",
        distances: str = "",
        chosen: Rows | None = None,
        rel_logits: Rows | None = None,
    ) -> Rows:
        at = self.config.layers[layer]
        own = (k is not None, v is not None)
        pool = self.steps.cache.pool_of(at.kv_from)
        if own != (at.kv_from == layer,) * 2 or (at.window, at.causal) != (
            pool.window,
            pool.causal,
        ):
            raise UnsupportedError(
                f"L{layer}: its keys and values, window or mask do not match the KV cache of layer "
                f"{at.kv_from}"
            )
        qkv = self._rotated(label, layer, q, k, v)
        return self.attention(label, layer, qkv, sinks, distances, chosen, rel_logits)

    def attention(
        self,
        label: str,
        layer: int,
        qkv: Buffer,
        sinks: str = "",
        distances: str = "",
        chosen: Rows | None = None,
        rel_logits: Rows | None = None,
    ) -> Rows:
        """Return the attention of the queries in ``qkv``, which are normed and rotated already,
        over the layer's pages; the other arguments as in ``Ops.attend``.
        """
        bits = chosen.bits if isinstance(chosen, Chosen) else None
        biases = self.floats(rel_logits) if rel_logits else None
        out = emit_attention(self.steps, label, layer, qkv, sinks, distances, bits, biases)
        at = self.config.layers[layer]
        return Floats(label, at.n_head * at.head_dim_v, out)

    def _rotated(self, label: str, layer: int, q: Rows, k: Rows | None, v: Rows | None) -> Buffer:
        """Emit the norm and rope of queries and keys, in place, and the store of keys and values.
        Return the buffer that has all three side by side.

        A layer that reads another layer's keys and values has queries only: ``k`` and ``v`` are
        None.
        """
        steps = self.steps
        config = self.config
        at = self.config.layers[layer]
        ways = [unwrap(x) for x in (q, k) if x is not None]
        v_norm = v if isinstance(v, NormOf) else None
        v = v_norm.x if v_norm else v
        places = [self.place(x) for x in (*(way.source for way in ways), v) if x is not None]
        qkv, q_column = places[0]
        q_way = ways[0]
        k_way = ways[-1]
        if any(x is not qkv for x, _ in places) or q_column or not q_way.has_same_kinds(k_way):
            raise UnsupportedError(
                f"L{layer}: queries, keys and values are not in one buffer, or queries and keys "
                "differ in norm or rope"
            )
        if v_norm is not None and (v_norm.weight or v_norm.centred or v_norm.heads != at.n_head_kv):
            raise UnsupportedError(
                f"{v_norm.label}: expected an RMSNorm of each head without weights"
            )
        norms = [way.norm for way in ways]
        if norms[0] is not None and (
            norms[0].heads == 1 < at.n_head or self._needs_norm_step(norms)
        ):
            if q_way.norm_last:
                raise UnsupportedError(
                    f"{norms[0].label}: expected an RMSNorm of each head after the rope, without "
                    "bias and with the same weights for all heads"
                )
            for norm, (_, column) in zip(norms, places, strict=False):
                assert norm is not None
                self.column_norm(norm, qkv, column)
            norms = [None] * len(norms)
        rope = None if k_way.table is None else config.ropes[k_way.table]
        if rope is not None and config.ropes[q_way.table or 0].dims != rope.dims:
            raise UnsupportedError(f"L{layer}: rope dims differ between queries and keys")
        q_norm, *k_norms = (x and steps.vector(f"{x.weight}.weight", x.scale) for x in norms)
        pool = None
        kept = dict[str, Any]()
        if k is not None:
            pool = steps.cache.pool_of(layer)
            (k_column, v_column) = (at for _, at in places[1:])
            kept = {
                "k_norm": k_norms[0],
                "pool": pool.const,
                "k_column": k_column,
                "v_column": v_column,
                "page_bytes": pool.cell_bytes,
                "layer_off": pool.layer_off(layer),
            }
        steps.emit(
            f"{label}.store" if rope is None else f"{label}.rope",
            RopeStore(
                config.arch.rope if rope else "none",
                steps.cache.kv,
                at.n_head,
                at.n_head_kv,
                at.head_dim,
                rope.dims if rope else 0,
                config.attn_scale,
                norms[0].eps if norms[0] else None,
                pool.index if pool else 0,
                k_way.table or 0,
                at.head_dim_v,
                queries_only=k is None,
                norm_last=q_way.norm_last,
                q_table=-1 if q_way.table is None or q_way.table == k_way.table else q_way.table,
                v_eps=v_norm.eps if v_norm else None,
            ),
            Grid(at.n_head_kv, "n_tokens", whole=min(PAGE, self.steps.plan.n_tokens)),
            qkv=qkv,
            q_norm=q_norm,
            stride=qkv.row_bytes // 4,
            **kept,
        )
        return qkv

    def _needs_norm_step(self, norms: Sequence[NormOf | None]) -> bool:
        """Return whether a norm cannot be part of the rope step: a LayerNorm, or one with a bias or
        with weights for each head.
        """
        return any(x and (x.centred or x.own or self.steps.has(f"{x.weight}.bias")) for x in norms)
