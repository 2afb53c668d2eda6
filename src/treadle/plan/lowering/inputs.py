"""Inputs of a run: tokens, output rows, sequences, pages, attention items, rope tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.kernels.run_state import (
    ITEM,
    LORA,
    MERGE,
    PAGE,
    PART,
    PART_PAGES,
    QUERIES,
    SAMPLED,
    numbered,
)
from treadle.plan.plan import Input

if TYPE_CHECKING:
    from treadle.kvcache.cache import KVCache
    from treadle.plan.plan import Plan

I32, I64, F32 = (np.dtype(name) for name in ("i4", "i8", "f4"))


def inputs_of(plan: Plan, cache: KVCache, rope_dims: Sequence[int]) -> dict[str, Input]:
    """Return the inputs of a plan's runs, keyed by the field of RUN_STATE that locates each; and
    ``pages``, the page lists that attention items point into. ``rope_dims``: the number of rotated
    dims of each rope table.
    """
    n = plan.n_tokens
    pools = [pool for pool in cache.pools if pool.layers]
    cross = getattr(cache, "cross", ())  # a tower's cache has none
    result = {
        "tokens": Input(I32, (n,)),
        "output_rows": Input(I32, (plan.n_outputs,)),
        "parts": Input(PART, (n,)),
    }
    if any(pool.spec.unit for pool in pools):
        result["part_pages"] = Input(PART_PAGES, (n,))
    for i, pool in enumerate((*pools, *cross)):
        n_partials = cache.max_partials(n, pool) if plan.few_tokens else 0
        result[numbered("kv_indices", i)] = Input(I64, (n,))
        result[numbered("attn_items", i)] = Input(ITEM, (n,))
        result[numbered("attn_few", i)] = Input(ITEM, (n + n_partials,))
        result[numbered("attn_merges", i)] = Input(MERGE, (n,))
    for i, dims in enumerate(rope_dims):
        result[numbered("rope", i)] = Input(F32, (n, 2, dims // 2))
    pages = len(pools) * -(-cache.n_ctx // PAGE)
    pages += sum(-(-pool.spec.n_keys // PAGE) for pool in cross)
    result["pages"] = Input(I64, (n, pages))
    return result


def lora_inputs(n_tokens: int, n_scales: int) -> dict[str, Input]:
    """Return the inputs for adapters and control vectors: ``lora_scales``, rows of ``n_scales``
    scales, one row per sequence or run of tokens, and ``loras``, records that point into them.
    """
    scales = Input(F32, (n_tokens, n_scales))
    return {"loras": Input(LORA, (n_tokens,)), "lora_scales": scales}


def sampled_inputs(n_outputs: int, n_vocab: int) -> dict[str, Input]:
    """Return the inputs for the queries of samplers: ``masks``, one bit per token of the
    vocabulary, for each of ``n_outputs`` outputs; and ``sampled``, records that point into them.
    """
    masks = Input(np.dtype("u8"), (n_outputs, -(-n_vocab // 64)))
    return {"sampled": Input(SAMPLED, (QUERIES * n_outputs,)), "masks": masks}
