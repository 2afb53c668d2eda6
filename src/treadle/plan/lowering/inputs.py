"""What a run of a plan is given: tokens, rows, parts, pages, attention's items, rotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.kernels.attention.merge_splits import MERGE
from treadle.kernels.attention.page_layout import PAGE
from treadle.kernels.attention.work_item import ITEM
from treadle.kernels.elementwise.top_logits import LOOKS, SAMPLED
from treadle.kernels.spec import LORA, PART, numbered
from treadle.plan.plan import Input

if TYPE_CHECKING:
    from treadle.kvcache.cache import KVCache
    from treadle.plan.plan import Plan

I32, I64, F32 = (np.dtype(name) for name in ("i4", "i8", "f4"))


def inputs_of(plan: Plan, cache: KVCache, rope_dims: Sequence[int]) -> dict[str, Input]:
    """By the field of RUN_STATE that tells where they are; and ``pages``, which items point into.

    ``rope_dims``: of each rope table.
    """
    n, pools = plan.n_tokens, [pool for pool in cache.pools if pool.layers]
    made = {
        "tokens": Input(I32, (n,)),
        "output_rows": Input(I32, (plan.n_outputs,)),
        "parts": Input(PART, (n,)),
    }
    for i, pool in enumerate(pools):
        n_partials = cache.max_partials(n, pool.window) if plan.few_tokens else 0
        made[numbered("kv_slots", i)] = Input(I64, (n,))
        made[numbered("attn_items", i)] = Input(ITEM, (n,))
        made[numbered("attn_few", i)] = Input(ITEM, (n + n_partials,))
        made[numbered("attn_merges", i)] = Input(MERGE, (n,))
    for i, dims in enumerate(rope_dims):
        made[numbered("rope", i)] = Input(F32, (n, 2, dims // 2))
    made["pages"] = Input(I64, (n, len(pools), -(-cache.n_ctx // PAGE)))
    return made


def lora_inputs(n_tokens: int, n_adapters: int) -> dict[str, Input]:
    """What says how much of which adapter rows want; ``lora_scales`` are what it points into, those
    of a part.
    """
    scales = Input(F32, (n_tokens, n_adapters))
    return {"loras": Input(LORA, (n_tokens,)), "lora_scales": scales}


def sampled_inputs(n_outputs: int, n_vocab: int) -> dict[str, Input]:
    """What says how samplers look at logits; ``masks`` are what it points into, a bit for each
    token.
    """
    masks = Input(np.dtype("u8"), (n_outputs, -(-n_vocab // 64)))
    return {"sampled": Input(SAMPLED, (LOOKS * n_outputs,)), "masks": masks}
