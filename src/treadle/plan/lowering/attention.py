"""Attention steps: tiles of queries, single queries of sequences with few tokens in the batch, and
the merge of results over parts of a long history.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.relative_bias import biases_by_distance
from treadle.kernels.run_state import PAGE, WORD_BYTES, numbered
from treadle.kernels.spec import Grid
from treadle.models.archs import REACH
from treadle.plan.plan import Buffer, Const

if TYPE_CHECKING:
    from treadle.kvcache.page_pool import Pool
    from treadle.plan.lowering.steps import Steps


def emit_attention(
    steps: Steps,
    label: str,
    layer: int,
    qkv: Buffer,
    sinks: str = "",
    distances: str = "",
    chosen: Buffer | None = None,
    rel_logits: Buffer | None = None,
    *,
    pool: Pool | None = None,
) -> Buffer:
    """Emit attention of the queries in ``qkv``, which are normed and rotated already, over the
    layer's pages. Return f32 ``[N, n_head * head_dim_v]``.

    sinks, distances: as in ``Ops.attend``.
    chosen: bits of the keys that an indexer chose for each token; None: all keys.
    rel_logits: each query's biases of scores by distance; None: no biases.
    pool: for cross attention, the pages of an encoder's rows; None: the layer's own pages.
    """
    at = steps.config.layers[layer]
    source = at.kv_from if pool is None else layer
    cross = pool is not None
    pool = pool or steps.cache.pool_of(source)
    words = -(-steps.cache.n_ctx // PAGE)
    spec = Attention(
        steps.cache.kv,
        at.n_head,
        at.n_head_kv,
        at.head_dim,
        steps.plan.query_tile,
        0 if at.chunked or cross else at.window,  # items begin at chunk boundaries
        pool.index,
        steps.config.attn_softcap,
        steps.matrix_attention,
        at.head_dim_v,
        pool.causal,
        bool(sinks),
        at.latent is not None,
        0.0 if cross else steps.config.alibi,
        steps.word_attention,
        REACH if distances else 0,
        not cross and steps.config.with_media and steps.config.media.spans_in(at.window),
        chosen.row_bytes // (words * WORD_BYTES) if chosen else 0,
        at.relative.reach if rel_logits and at.relative else 0,
    )
    out = steps.floats(f"{label}.out", at.n_head * at.head_dim_v)
    scores = steps.vector(f"{sinks}.weight") if sinks else None
    given: dict[str, Any] = {
        "qkv": qkv,
        "sinks": scores,
        "distances": _biases_by_distance(steps, distances, pool.causal) if distances else None,
        "pool": pool.const,
        "out": out,
        "stride": qkv.row_bytes // 4,
        "out_stride": out.row_bytes // 4,
        "page_bytes": pool.cell_bytes,
        "layer_off": pool.layer_off(source),
    }
    if chosen is not None:
        given |= {"chosen": chosen, "chosen_stride": words}
    if rel_logits is not None:
        given["rel_logits"] = rel_logits
    most = steps.plan.n_tokens
    few = steps.plan.few_tokens
    if most > few:
        count = numbered("n_attn_items", pool.index)
        grid = Grid(spec.n_groups, count)
        many = range(few + 1, most + 1)
        steps.emit(label, spec, grid, query_counts=many, few=0, **given)
    if few:
        one = replace(spec, tokens=1, matrix=False, words=False)
        n_partials = steps.cache.max_partials(most, pool)
        partials = Buffer(f"{label}.partials", n_partials, one.partial_values * 4)
        steps.emit(
            label if most <= few else f"{label}.few",
            one,
            Grid(one.n_groups, numbered("n_attn_few", pool.index)),
            query_counts=range(few + 1),
            few=1,
            partials=partials,
            **given,
        )
        steps.emit(
            f"{label}.merge",
            Merge(one.n_groups, one.heads, one.tokens, at.head_dim_v, pool.index, bool(sinks)),
            Grid(one.n_groups, numbered("n_attn_merges", pool.index)),
            partials=partials,
            out=out,
            out_stride=out.row_bytes // 4,
            sinks=scores,
        )
    if spec.page.values.fmt.rotated:
        from treadle.kernels.attention.hadamard import Rotate

        back = Rotate(at.head_dim_v, at.n_head)
        grid = Grid(at.n_head, "n_tokens")
        steps.emit(f"{label}.rotate", back, grid, x=out, stride=out.row_bytes // 4)
    return out


def _biases_by_distance(steps: Steps, stem: str, causal: bool) -> Const:
    """Return the biases of scores for each distance up to REACH and each head
    (``relative_bias.py``), made of the biases by bucket in the tensor ``stem``. ``causal``: queries
    see no later keys. All plans and layers share one copy.
    """
    name = f"{stem}.weight"
    steps.plan.tensors_used.add(name)
    key = f"{name}:by distance"
    if key not in steps.weights.consts:
        made = biases_by_distance(steps.weights.tensor(name).dequantize(), REACH, causal=causal)
        return steps.weights.numbers(key, made.ravel().tolist())
    (found,) = steps.weights.consts[key]
    return found
