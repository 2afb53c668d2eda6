"""The pieces graphs are made of: norms, products, activations, each emitted as labelled steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.kernels.act import BLOCK
from treadle.kernels.choice import (
    GEMV_TOKENS,
    VECTOR_TOKENS,
    Table,
    gated,
    matmul,
    narrowed,
    tokens_per_item,
)
from treadle.kernels.elementwise import Norm, Pack
from treadle.kernels.gemm import Gemm
from treadle.kernels.matmul import COLUMNS, Matmul
from treadle.kernels.spec import Grid, round_up
from treadle.models.weights import Weights
from treadle.plan import Arg, Buffer, Const, Plan, Step

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.isa.isa import Isa
    from treadle.kernels.act import Act
    from treadle.kernels.gated import Gated
    from treadle.kvcache import KVCache
    from treadle.models.config import Config

TILE_ROWS = 8  # query rows of an attention tile in a prefill
# The same on matrix registers: many rows share a page's unpacking. Fewer where so large tiles would
# be too few for many cores; how many cores there are has no say, for it must not change a bit.
MATRIX_TILE_ROWS, ENOUGH_TILES = (128, 64), 64


class Graph:
    """One plan under construction, with what its steps need to know."""

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
        table: Table,
    ) -> None:
        if config.head_dim != config.head_dim_v:
            raise UnsupportedError(
                f"heads with {config.head_dim} dims for keys and {config.head_dim_v} for values"
            )
        self.config, self.weights, self.cache, self.isa = config, weights, cache, isa
        self.n_threads, self.deterministic, self.table = n_threads, deterministic, table
        shared = config.n_head // config.n_head_kv
        decoding = n_tokens in GEMV_TOKENS and not deterministic
        # Not where bits must be a row's own: few tokens are met by vectors.
        self.matrix_attention = (
            isa.matrix is not None
            and n_tokens > VECTOR_TOKENS
            and not deterministic
            and config.head_dim % BLOCK == 0
            and cache.kv != "f32"
        )
        rows = TILE_ROWS
        if self.matrix_attention:
            most, fewer = MATRIX_TILE_ROWS
            rows = most if n_tokens * config.n_head >= most * ENOUGH_TILES else fewer
        tile = 1 if decoding else max(1, rows // shared)
        self.plan = Plan(n_tokens, n_outputs, query_tile=tile, split_keys=decoding)
        self.plan.tensors = frozenset(weights.gguf.tensors)
        self.plan.tensors_ignored = frozenset(config.ignored)
        if config.rope_factors is not None:
            self.plan.tensors_used.add("rope_freqs.weight")  # in the rope tables of every run
        self.rows, self.out_rows = self._rows_for(n_tokens), self._rows_for(n_outputs)

    def _normed(self, label: str, norm: str, x: Buffer, names: list[str]) -> dict[Act, Buffer]:
        """The normed input in every layout that the products of ``names`` want (one, unless formats
        are mixed).
        """
        out: dict[Act, Buffer] = {}
        for name in names:
            act = self._matmul_of(name, self.config.n_embd).layout()
            if act in out:
                continue
            suffix = "" if not out else f".{act.kind}_group{act.group}_sub{act.sub}"
            out[act] = self._acts(f"{label}.norm{suffix}", act, self.rows)
            self._step(
                f"{label}.norm{suffix}",
                Norm(act.kind, act.k, act.group, self.config.norm_eps, sub=act.sub),
                (x, self._floats_const(norm), out[act], None, self._stride(self.config.n_embd)),
                reads=(x,),
                writes=(out[act],),
                grid=act.grid(1, "n_tokens"),
            )
        return out

    def _products(
        self,
        label: str,
        joint: str,
        names: list[str],
        heights: list[int],
        h: dict[Act, Buffer],
        k: int,
    ) -> tuple[Buffer, list[int]]:
        """Products of one input into neighbouring columns; those of the same format and biases are
        one step.
        """
        columns = [0]
        for height in heights:
            columns.append(columns[-1] + round_up(height, COLUMNS))
        y = self._floats(f"{label}.{joint}", columns.pop())
        groups: dict[tuple[str, bool], list[int]] = {}
        for j, name in enumerate(names):
            key = (self.weights.format(f"{name}.weight").name, self._has(f"{name}.bias"))
            groups.setdefault(key, []).append(j)
        for members in groups.values():
            part = [names[j] for j in members]
            spec = self._matmul_of(
                part[0], k, segments=len(part), bias=self._has(f"{part[0]}.bias")
            )
            stem = "_".join(name.rpartition("_")[2] for name in part)
            self._product(
                f"{label}.{joint if len(groups) == 1 else stem}",
                spec,
                part,
                [heights[j] for j in members],
                [columns[j] for j in members],
                h[spec.layout()],
                y,
                None,
                self.plan.n_tokens,
            )
        return y, columns

    def _activated(
        self, label: str, fn: str, names: list[str], h: dict[Act, Buffer], to: str
    ) -> Buffer:
        """``fn(gate) * up`` of the products of ``names``, as the product with ``to`` wants it: one
        step where tokens are many and the two matrices alike, else one more.
        """
        k, (m, _) = self.config.n_embd, self.weights.tensor(f"{names[0]}.weight").shape
        spec = self._gated(names, fn, k, m, to)
        if spec is None:
            gate_up, columns = self._products(label, "gate_up", names, [m, m], h, k)
            return self._packed(f"{label}.{fn}", fn, gate_up, [to], m, columns[1])
        out = self._acts(f"{label}.{fn}", spec.result(), self.rows)
        x, n_tokens = h[spec.layout()], self.plan.n_tokens
        self._product(f"{label}.gate_up_{fn}", spec, names, [m, m], [0, 0], x, out, None, n_tokens)
        return out

    def _gated(self, names: list[str], fn: str, k: int, m: int, to: str) -> Gated | None:
        """The kernel that does both products and the activation, if there is one."""
        fmt, other = (self.weights.format(f"{name}.weight") for name in names)
        biased = any(self._has(f"{name}.bias") for name in names)
        if fmt.name != other.name or biased or not isinstance(self._matmul_of(names[0], k), Gemm):
            return None
        out, n = self._matmul_of(to, m).layout(), self._family(self.plan.n_tokens)
        return gated(fmt, self.isa, k, m, fn, out, n, self.table)

    def _packed(self, label: str, fn: str, x: Buffer, names: list[str], k: int, up: int) -> Buffer:
        act = self._matmul_of(names[0], k).layout()
        out = self._acts(label, act, self.rows)
        spec = Pack(fn, act.kind, k, act.group, act.sub)
        self._step(
            label,
            spec,
            (x, out, x.row_bytes // 4, up),
            reads=(x,),
            writes=(out,),
            grid=act.grid(spec.slices, "n_tokens"),
        )
        return out

    def _added(self, label: str, name: str, h: Buffer, x: Buffer, post_norm: str) -> Buffer:
        """``x + W h``, or ``x + norm(W h)`` where the layer has a norm after the product."""
        k = self.weights.tensor(f"{name}.weight").shape[1]
        post = f"{post_norm}.weight"
        n_embd = self.config.n_embd
        spec = self._matmul_of(
            name, k, bias=self._has(f"{name}.bias"), residual=not self._has(post)
        )
        y = self._floats(label, n_embd)
        self._product(
            label,
            spec,
            [name],
            [n_embd],
            [0],
            h,
            y,
            x if spec.residual else None,
            self.plan.n_tokens,
        )
        if spec.residual:
            return y
        out = self._floats(f"{label}.post", n_embd)
        self._step(
            f"{label}.post_norm",
            Norm("f32", n_embd, 1, self.config.norm_eps, add=True),
            (y, self._floats_const(post), out, x, self._stride(n_embd)),
            reads=(y, x),
            writes=(out,),
            grid=Grid(1, "n_tokens"),
        )
        return out

    def _product(
        self,
        label: str,
        spec: Matmul,
        names: list[str],
        heights: list[int],
        columns: list[int],
        h: Buffer,
        y: Buffer,
        residual: Buffer | None,
        n_tokens: int,
    ) -> None:
        spec = narrowed(spec, heights, self.isa.lanes, self.n_threads)
        strips = spec.strips(heights, self.isa.lanes)
        tokens = tokens_per_item(spec, strips, n_tokens, self.n_threads)
        grid = Grid(strips, spec.count, tokens)
        args: list[Arg] = [h, residual, y, y.row_bytes // 4, tokens]
        for name, height, column in zip(names, heights, columns, strict=True):
            bias = self._floats_const(f"{name}.bias") if spec.bias else None
            args += [*self._weight(f"{name}.weight"), bias, height, column]
        n_bytes = sum(self.weights.tensor(f"{name}.weight").n_bytes for name in names)
        self._step(
            label,
            spec,
            tuple(args),
            reads=(h, residual) if residual else (h,),
            writes=(y,),
            grid=grid,
            n_bytes=n_bytes,
            n_flops=2 * spec.k * sum(heights),
            shape=(sum(heights), spec.k),
        )

    def _matmul(self, fmt: Format, k: int, n: int, **fields: bool | int) -> Matmul:
        return matmul(fmt, self.isa, k, self._family(n), self.table, **fields)

    def _family(self, n: int) -> int:
        """The number of tokens that kernels are chosen for. One family for every batch where that
        must not change bits: what else is in it cannot change how a sum is taken.
        """
        return GEMV_TOKENS[-1] + 1 if self.deterministic else n

    def _matmul_of(self, name: str, k: int, **fields: bool | int) -> Matmul:
        return self._matmul(self.weights.format(f"{name}.weight"), k, self.plan.n_tokens, **fields)

    def _step(
        self,
        label: str,
        spec: object,
        args: tuple[Arg, ...],
        *,
        grid: Grid,
        reads: tuple[Buffer, ...] = (),
        writes: tuple[Buffer, ...] = (),
        chunk: int = 1,
        n_bytes: int = 0,
        n_flops: int = 0,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.plan.emit(Step(label, spec, args, reads, writes, grid, chunk, shape, n_bytes, n_flops))  # type: ignore[arg-type]

    def _floats(self, name: str, columns: int, rows: int | None = None) -> Buffer:
        return Buffer(name, self.rows if rows is None else rows, self._stride(columns) * 4)

    def _acts(self, name: str, act: Act, rows: int) -> Buffer:
        return Buffer(name, 1, act.n_bytes(rows), "u1")

    def _rows_for(self, n: int) -> int:
        """Rows of a buffer: a tile writes whole groups of tokens, also past the last one."""
        exact = self.table.only_gemv(n) and not self.deterministic
        return n if exact else round_up(n, 64) + 64

    def _stride(self, columns: int) -> int:
        return round_up(columns, COLUMNS)

    def _has(self, name: str) -> bool:
        return name in self.weights.gguf.tensors

    def _weight(self, name: str) -> tuple[Const, ...]:
        self.plan.tensors_used.add(name)
        return self.weights[name]

    def _floats_const(self, name: str) -> Const:
        self.plan.tensors_used.add(name)
        return self.weights.floats(name)

    def _optional_floats(self, name: str) -> Const | None:
        return self._floats_const(name) if self._has(name) else None
