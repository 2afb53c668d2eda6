"""The decoder's forward pass, written down as steps. One graph serves every row of ``archs.ARCHS``.

Data flow of a layer, with shapes for N tokens::

    x [N, n_embd]  -norm->  h  -qkv->  qkv [N, q | k | v]  -rope->  q in place, k and v into pages
    qkv  -attn->  [N, n_head * head_dim]  -output->  x + ...
    x    -norm->  h  -gate_up->  [N, gate | up]  -act->  h  -down->  x + ...

Labels are GGUF stems: ``blk.5.ffn_down.weight`` is ``L5.ffn.down``; products that share their input
are one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.kernels.attention import Attention
from treadle.kernels.attention_item import SPLIT
from treadle.kernels.choice import SHIPPED, Table
from treadle.kernels.elementwise import Embed, Norm
from treadle.kernels.merge import Merge
from treadle.kernels.rope import RopeStore
from treadle.kernels.spec import Grid
from treadle.models.archs import layer_window
from treadle.models.graph import Graph
from treadle.models.weights import Weights
from treadle.plan import Buffer, Plan

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kvcache import KVCache
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
) -> Plan:
    """The plan for batches of up to ``n_tokens`` tokens that want logits of up to ``n_outputs``;
    ``table``: this machine's own tiles.
    """
    plan = _Decoder(
        config, weights, cache, isa, n_tokens, n_outputs, n_threads, deterministic, table
    ).build()
    plan.place()
    return plan


class _Decoder(Graph):
    def build(self) -> Plan:
        config = self.config
        x = self._floats("x", config.n_embd)
        fmt = self.weights.format("token_embd.weight")
        self._step(
            "token_embd",
            Embed(fmt.name, config.n_embd, config.embd_scale),
            (*self._weight("token_embd.weight"), x, self._stride(config.n_embd)),
            writes=(x,),
            grid=Grid(1, "n_tokens"),
            n_bytes=fmt.row_bytes(config.n_embd),
            shape=(config.n_embd,),
        )
        for i in range(config.n_layer):
            x = self._attention(i, x)
            x = self._ffn(i, x)
        self._output(x)
        return self.plan

    # -- layers ---------------------------------------------------------------------------------

    def _attention(self, i: int, x: Buffer) -> Buffer:
        config, names = self.config, [f"blk.{i}.attn_{n}" for n in ("q", "k", "v")]
        dims, n_head, n_kv = config.head_dim, config.n_head, config.n_head_kv
        heights = [n_head * dims, n_kv * dims, n_kv * dims]
        h = self._normed(f"L{i}.attn", f"blk.{i}.attn_norm.weight", x, names)
        qkv, columns = self._products(f"L{i}.attn", "qkv", names, heights, h, config.n_embd)
        self._rope(i, qkv, columns)
        out = self._attend(i, qkv)
        packed = self._packed(
            f"L{i}.attn.pack", "copy", out, [f"blk.{i}.attn_output"], n_head * dims, 0
        )
        return self._added(
            f"L{i}.attn.output", f"blk.{i}.attn_output", packed, x, f"blk.{i}.post_attention_norm"
        )

    def _rope(self, i: int, qkv: Buffer, columns: list[int]) -> None:
        """Rotate queries and keys in place, and put keys and values into their pages."""
        config, pool, n_kv = self.config, self.cache.pool_of(i), self.config.n_head_kv
        q_norm = self._optional_floats(f"blk.{i}.attn_q_norm.weight")
        k_norm = self._optional_floats(f"blk.{i}.attn_k_norm.weight")
        self._step(
            f"L{i}.attn.rope",
            RopeStore(
                config.arch.rope,
                self.cache.kv,
                config.n_head,
                n_kv,
                config.head_dim,
                config.rope_dims,
                config.attn_scale,
                config.norm_eps if q_norm else 0.0,
                bool(layer_window(config, i)),
            ),
            (
                qkv,
                q_norm,
                k_norm,
                pool.const,
                qkv.row_bytes // 4,
                columns[1],
                columns[2],
                pool.page_bytes,
                pool.layer_off(i),
            ),
            reads=(qkv,),
            writes=(qkv,),
            grid=Grid(n_kv, "n_tokens"),
        )

    def _attend(self, i: int, qkv: Buffer) -> Buffer:
        """Attention over the pages, f32 ``[N, n_head * head_dim]``."""
        config, pool, window = self.config, self.cache.pool_of(i), layer_window(self.config, i)
        dims, n_head, n_kv, local = config.head_dim, config.n_head, config.n_head_kv, bool(window)
        stride = qkv.row_bytes // 4
        tokens = self.plan.query_tile
        spec = Attention(
            self.cache.kv,
            n_head,
            n_kv,
            dims,
            tokens,
            window,
            local,
            config.attn_softcap,
            self.matrix_attention,
        )
        out = self._floats(f"L{i}.attn.out", n_head * dims)
        n_partials = (
            self.cache.max_partials(self.plan.n_tokens, SPLIT) if self.plan.split_keys else 1
        )
        partials = Buffer(f"L{i}.attn.partials", n_partials, spec.partial_values * 4)
        suffix = "_local" if local else ""
        self._step(
            f"L{i}.attn",
            spec,
            (
                qkv,
                pool.const,
                out,
                partials,
                stride,
                out.row_bytes // 4,
                pool.page_bytes,
                pool.layer_off(i),
            ),
            reads=(qkv,),
            writes=(out, partials),
            grid=Grid(spec.n_groups, f"n_attn_items{suffix}"),
        )
        if self.plan.split_keys:
            self._step(
                f"L{i}.attn.merge",
                Merge(spec.n_groups, spec.heads, tokens, dims, local),
                (partials, out, out.row_bytes // 4),
                reads=(partials,),
                writes=(out,),
                grid=Grid(spec.n_groups, f"n_attn_merges{suffix}"),
            )
        return out

    def _ffn(self, i: int, x: Buffer) -> Buffer:
        config = self.config
        names = [f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"]
        h = self._normed(f"L{i}.ffn", f"blk.{i}.ffn_norm.weight", x, names)
        down = f"blk.{i}.ffn_down"
        packed = self._activated(f"L{i}.ffn", config.arch.activation, names, h, down)
        return self._added(f"L{i}.ffn.down", down, packed, x, f"blk.{i}.post_ffw_norm")

    def _output(self, x: Buffer) -> None:
        config = self.config
        name = "token_embd" if config.tied else "output"
        fmt = self.weights.format(f"{name}.weight")
        spec = self._matmul(fmt, config.n_embd, self.plan.n_outputs, outputs=True)
        act = spec.layout()
        h = self._acts("output_norm", act, self.out_rows)
        self._step(
            "output_norm",
            Norm(act.kind, act.k, act.group, config.norm_eps, outputs=True, sub=act.sub),
            (x, self._floats_const("output_norm.weight"), h, None, self._stride(config.n_embd)),
            reads=(x,),
            writes=(h,),
            grid=act.grid(1, "n_outputs"),
        )
        logits = self._floats("logits", config.n_vocab, self.out_rows)
        self._product(
            "output", spec, [name], [config.n_vocab], [0], h, logits, None, self.plan.n_outputs
        )
