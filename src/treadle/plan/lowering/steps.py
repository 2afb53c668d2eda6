"""Steps: a plan under construction, with its buffers, constants and kernels."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.page_layout import kv_formats
from treadle.kernels.attention.work_item import WORD_DIMS
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.select import TunedTable, matmul, narrowed, tokens_per_item
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.run_state import GEMV_TOKENS, round_up
from treadle.kernels.spec import Grid, Spec
from treadle.models.archs import LORA_A, LORA_B
from treadle.models.ops import tensor_of
from treadle.models.rope import FACTORS, LONG, SHORT
from treadle.plan.lowering.inputs import inputs_of, lora_inputs
from treadle.plan.plan import ANY, Buffer, Const, Plan, Step
from treadle.plan.weights import factor_of, tensor_of_slice

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.activation_layout import ActivationLayout
    from treadle.kvcache.cache import KVCache
    from treadle.models.config import Config
    from treadle.models.ops import TensorName
    from treadle.plan.weights import Weights

TILE_ROWS = 8  # query rows of an attention tile in a prefill
FEW_TOKENS = GEMV_TOKENS[-1]  # of a sequence; the queries of more tokens are tiled
# Rows of wide tiles, which share the unpacking of a page. A smaller size applies where larger
# tiles would be too few for many cores. It ignores the number of cores, which must not change bits.
WIDE_ROWS = (512, 128, 64)
# Matrices whose inputs are rounded less in plans for few tokens: rounding to 8 bits before them
# makes two thirds of a text's divergence from float32 (docs/kernels.md). Those of a layer share one
# input.
FINE = frozenset(
    {
        "output",
        "token_embd",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "attn_gate",
        "attn_q_a",
        "attn_kv_a_mqa",
        "attn_kv",
        "attn_compressor_kv",
        "attn_compressor_gate",
        "indexer_compressor_kv",
        "indexer_compressor_gate",
    }
)
ENOUGH_TILES = 64


class Steps:
    """A plan under construction, for one model, cache and machine."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        cache: KVCache,
        isa: Isa,
        n_tokens: int,
        n_outputs: int,
        n_threads: int,
        deterministic: bool,
        table: TunedTable,
        *,
        int16: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cache = cache
        self.isa = isa
        self.n_threads = n_threads
        self.deterministic = deterministic
        self.table = table
        self.int16 = int16
        self.scarce = False
        self.taps: tuple[int, ...] = ()  # layers before which the states are outputs
        self.wants: Buffer | None = None  # each token's scale of each adapter, for experts
        # One tiling for all layers, as a run's attention items are built per pool.
        attending = [layer for layer in config.layers if layer.n_head_kv]
        shared = max((layer.n_head // layer.n_head_kv for layer in attending), default=1)
        n_head = min((layer.n_head for layer in attending), default=1)
        # Not in deterministic mode: few tokens use vector kernels, whose bits differ.
        dims = [n for at in attending for n in (at.head_dim, at.head_dim_v)]
        kinds = kv_formats(cache.kv)
        packed = any(fmt.packed for fmt in kinds)
        exact = any(fmt.name == "f32" for fmt in kinds)
        plain = (
            not deterministic
            and not any(at.latent or at.indexer or at.relative for at in attending)
            and not (config.alibi or config.n_buckets)
            and not packed
        )
        coarse = plain and (int16 or not exact)  # 16 bits of keys and values are enough
        matrix = isa.matrix
        words = isa.dot_words is not None and coarse and not any(n % WORD_DIMS for n in dims)
        wide = coarse and not any(n % BLOCK for n in dims)
        self.matrix_attention = wide and matrix is not None and n_tokens > matrix.vector_tokens
        words = words and (int16 or (wide and matrix is None))
        self.word_attention = words and not self.matrix_attention and n_tokens > isa.lanes
        rows = TILE_ROWS
        if self.matrix_attention or self.word_attention:
            n_rows = n_tokens * n_head
            rows = next((n for n in WIDE_ROWS if n_rows >= n * ENOUGH_TILES), WIDE_ROWS[-1])
        elif isa.simt is not None and not deterministic:
            narrow = not exact and not packed and kinds[0] is kinds[1]
            added = config.alibi or config.n_buckets  # to scores
            apart = bool(added) or any(at.latent or at.indexer or at.relative for at in attending)
            if narrow and not apart and not any(n % 16 or n > isa.simt.tile_dims for n in dims):
                rows = isa.simt.tile_rows
        # Deterministic mode has no path for few tokens: bits must not depend on the chunk size.
        few = 0 if deterministic else FEW_TOKENS
        tile = max(1, rows // shared)
        self.plan = Plan(n_tokens, n_outputs, query_tile=tile, few_tokens=few)
        self.plan.inputs = inputs_of(self.plan, cache, [rope.dims for rope in config.ropes])
        if weights.n_scales:
            self.plan.inputs |= lora_inputs(n_tokens, weights.n_scales)
        self.plan.tensors = frozenset(weights.gguf.tensors)
        self.plan.tensors_ignored = frozenset(config.ignored)
        # The host builds the rope tables of every run from these.
        self.plan.tensors_used |= self.plan.tensors & {FACTORS, SHORT, LONG}
        if config.switch is not None:  # plans with adapters pack these (``lora.py``)
            within = (name for name in self.plan.tensors if name.endswith((LORA_A, LORA_B)))
            self.plan.tensors_used.update(within)

    # -- kernels ----------------------------------------------------------------------------------

    def matmul(
        self,
        stem: TensorName,
        k: int,
        *,
        outputs: bool = False,
        per: int = 1,
        **fields: bool | int,
    ) -> Matmul:
        """Return the kernel for products with the matrix ``stem`` of ``k`` columns, chosen by the
        matrix' format and the plan's size. ``outputs``: inputs have a row per output, not per
        token; ``per``: rows per token (or output); ``fields``: further fields of the kernel.
        """
        n = self.plan.n_outputs if outputs else self.plan.n_tokens
        if per > 1:
            fields["per"] = per
            n = next((size for size in GEMV_TOKENS if n * per <= size), n * per)
        fmt = self.weights.format(tensor_of(stem, "weight"))
        alone = self.deterministic
        fine = tensor_of_slice(stem).rpartition(".")[2] in FINE
        more: dict[str, Any] = {"outputs": outputs, "fine": fine, **fields}
        return matmul(fmt, self.isa, k, n, self.table, alone=alone, int16=self.int16, **more)

    def multiply(
        self,
        label: str,
        spec: Matmul,
        stems: list[TensorName],
        heights: list[int],
        columns: list[int],
        x: Buffer,
        y: Buffer,
        residual: Buffer | None = None,
    ) -> None:
        """Emit a step that multiplies ``x`` by each of the matrices ``stems``, plus ``residual`` if
        given. ``heights``, ``columns``: rows of each matrix, and where its products begin in ``y``.
        """
        n_tokens = (self.plan.n_outputs if spec.outputs else self.plan.n_tokens) * spec.per
        spec = narrowed(spec, heights, self.isa.lanes, self.n_threads, n_tokens)
        strips = spec.strips(heights, self.isa.lanes)
        tokens = lcm(tokens_per_item(spec, strips, n_tokens, self.n_threads), spec.per)
        biases = [self.vector(tensor_of(stem, "bias")) for stem in stems] if spec.bias else None
        factors = [self.factor(stem) for stem in stems] if spec.factor else None
        self.emit(
            label,
            spec,
            Grid(strips, spec.count, tokens // spec.per),
            n_bytes=sum(self.weights.n_bytes(tensor_of(stem, "weight")) for stem in stems),
            n_flops=2 * spec.k * sum(heights) * spec.per,
            shape=(sum(heights), spec.k),
            x=x,
            residual=residual,
            y=y,
            stride=y.row_bytes // 4 // spec.per,
            tokens=tokens,
            w=[self.weight(tensor_of(stem, "weight")) for stem in stems],
            bias=biases,
            factor=factors,
            rows=heights,
            column=columns,
        )

    def emit(
        self,
        label: str,
        spec: Spec,
        grid: Grid,
        n_bytes: int = 0,
        n_flops: int = 0,
        shape: tuple[int, ...] = (),
        query_counts: range = ANY,
        read_share: float = 1.0,
        rows_per_expert: range = ANY,
        **args: Any,
    ) -> None:
        """Append a step to the plan. Keyword arguments that are not fields of ``Step`` (``args``)
        are the kernel's arguments, by the names that it declares.
        """
        self.plan.emit(
            Step(
                label,
                spec,
                args,
                grid,
                shape,
                n_bytes,
                n_flops,
                query_counts,
                read_share,
                rows_per_expert,
            )
        )

    def row_of(self, name: str) -> dict[str, Any]:
        """Return the fields of ``Step`` for a step that reads one row of the matrix ``name`` per
        token: ``n_bytes`` and ``read_share``.
        """
        return {"n_bytes": self.weights.n_bytes(name), "read_share": 1 / self.weights.n_rows(name)}

    # -- memory -----------------------------------------------------------------------------------

    def floats(self, name: str, width: int, *, outputs: bool = False, per: int = 1) -> Buffer:
        """Return a new buffer of f32 rows of at least ``width`` values, one per token (``outputs``:
        per output). ``per``: number of rows that a product writes side by side for each.
        """
        n_rows = -(-self._n_rows(outputs, per) // per)
        return Buffer(name, n_rows, per * round_up(width, COLUMNS) * 4)

    def activations(
        self, name: str, act: ActivationLayout, *, outputs: bool = False, per: int = 1
    ) -> Buffer:
        """Return a new buffer for rows in the layout ``act``, ``per`` rows per token (``outputs``:
        per output).
        """
        n_groups = -(-self._n_rows(outputs, per) // act.group)
        return Buffer(name, n_groups, act.group_bytes, "u1")

    def _n_rows(self, outputs: bool, per: int) -> int:
        """Return the number of rows of a buffer with ``per`` rows per token (``outputs``: per
        output), and room after the last one: a tile writes whole groups of tokens.
        """
        n = (self.plan.n_outputs if outputs else self.plan.n_tokens) * per
        exact = self.table.only_gemv(n) and not self.deterministic
        return n if exact else round_up(n, 64) + 64

    def has(self, name: TensorName) -> bool:
        name = tensor_of_slice(name)
        return name in self.weights.gguf.tensors and name not in self.plan.tensors_ignored

    def weight(self, name: TensorName) -> tuple[Const, ...]:
        """Return a matrix of the file, or derived from it, as constants, one for each array of its
        format; the plan counts its tensor as used.
        """
        if name not in self.weights.derived:
            self.plan.tensors_used.add(tensor_of_slice(name))
        return self.weights[name]

    def has_factor(self, stem: TensorName) -> bool:
        """Return whether the products of the matrix ``stem`` are multiplied by a factor."""
        return factor_of(stem) in self.config.factors

    def factor(self, stem: TensorName) -> Const:
        """Return the factor of the products with the matrix ``stem``: one value, or one per expert.
        Rows of a matrix have the factor of the whole matrix.
        """
        return self.vector(factor_of(stem))

    def vector(self, name: TensorName, scale: float = 1.0, *, turned: int = 0) -> Const:
        """Return a vector (norm, bias) as f32, times ``scale``. ``turned``: as in
        ``Weights.floats``.
        """
        self.plan.tensors_used.add(tensor_of_slice(name))
        return self.weights.floats(name, scale, turned=turned)
