"""Mixers: sublayers that pass information between tokens, such as attention; one file each.

A file's ``build(g, i, h)`` adds the steps of layer ``i`` to the plan of ``g``; ``h``: the layer's
states after its norm, f32 ``[N, n_embd]``. In formulas, names such as ``output`` and ``k_b`` stand
for products with the layer's matrices of these names.

::

    names.py         names of the kinds of attention

    attention.py        attention over the tokens before, or a window of them
    sinks.py            with required sinks (MiMo V2)
    softplus.py         with a required gate (Laguna, Step 3.5, LFM 3, Spark X2.5)
    distances.py        with a relative bias for each layer (T5)
    post_norm.py        with a norm after it and none before (OLMo Hybrid)
    block_convolved.py  between convolutions within a drafted block (DFlash 2)
    relative.py         with biases by distance that each query makes (Inkling)
    blocks.py           over blocks of keys that an indexer chooses
    cross.py            over an encoder's rows
    linear.py           one matrix in place of attention (Nemotron 51B)

    latent.py        multi-head latent attention (DeepSeek V2)
    gated_latent.py  with gates (Kimi K3), and sinks (Hunyuan 4)
    indexed.py       over keys that a lightning indexer chooses (DeepSeek V3.2)
    norm_gated.py    with gates of all norms (GigaChat 3.5), and a delta net like that
    rank_gated.py    with gates made of the query rank (A.X K2)
    pooled.py        over units of keys that an indexer chooses (GLM-5.3-Flash)
    compressed.py    over rows of tokens, and rows of units of tokens (DeepSeek V4)

    shortconv.py               short convolution (LFM2)
    mamba1.py, mamba2.py       Mamba
    parallel.py                attention and Mamba-2 in parallel (Falcon-H1)
    delta.py, delta_signed.py  gated delta net (Qwen 3.5, OLMo Hybrid)
    kda.py                     Kimi Delta Attention
    wkv.py                     RWKV-7
"""

from __future__ import annotations

from treadle.models.mixers.attention import ATTENTION, ATTENTION_GATE, ATTENTION_QKV
from treadle.models.mixers.names import (
    BLOCK_CONVOLVED,
    BLOCKS,
    FUSED,
    GATE,
    GATE_INDEXED,
    INDEX_SHARED,
    INDEXED,
    OWN_DISTANCES,
    POOLED,
    POST_NORM,
    RELATIVE,
    ROWS,
    ROWS_AND_CHOSEN_UNITS,
    ROWS_AND_UNITS,
    SIGMOID_FUSED,
    SIGMOID_HEADS,
    SINKS,
    SINKS_FUSED,
    SOFTPLUS,
    SOFTPLUS_HEADS,
)
from treadle.models.structure import LazyConstants, Sublayer

MIXERS = LazyConstants[Sublayer](
    __name__,
    {"attention": ATTENTION, FUSED: ATTENTION_QKV, GATE: ATTENTION_GATE},
    lazy={
        "attention_shared": "attention.ATTENTION_SHARED",
        "attention_keys": "attention.ATTENTION_KEYS",
        "attention_head_norms": "attention.ATTENTION_HEAD_NORMS",
        OWN_DISTANCES: "distances.DISTANCES",
        SOFTPLUS: "softplus.SOFTPLUS",
        SOFTPLUS_HEADS: "softplus.SOFTPLUS_HEADS",
        "linear": "linear.LINEAR",
        SIGMOID_HEADS: "softplus.SIGMOID_HEADS",
        SIGMOID_FUSED: "softplus.SIGMOID_FUSED",
        SINKS: "sinks.SINKS",
        SINKS_FUSED: "sinks.SINKS_QKV",
        "latent": "latent.LATENT",
        "latent_q": "latent.LATENT_Q",
        "latent_kv_b": "latent.LATENT_KV_B",
        "latent_q_kv_b": "latent.LATENT_Q_KV_B",
        BLOCKS: "blocks.ATTENTION_BLOCKS",
        BLOCK_CONVOLVED: "block_convolved.ATTENTION_BLOCK_CONVOLVED",
        GATE_INDEXED: "blocks.GATE_INDEXED_BLOCKS",
        INDEXED: "indexed.LATENT_INDEXED",
        INDEX_SHARED: "indexed.LATENT_INDEX_SHARED",
        POOLED: "pooled.LATENT_POOLED",
        RELATIVE: "relative.RELATIVE",
        ROWS: "compressed.ROWS",
        ROWS_AND_UNITS: "compressed.ROWS_AND_UNITS",
        ROWS_AND_CHOSEN_UNITS: "compressed.ROWS_AND_CHOSEN_UNITS",
        "latent_ranked_indexed": "rank_gated.LATENT_RANKED_INDEXED",
        "latent_gated": "gated_latent.LATENT_GATED",
        "latent_gated_indexed": "gated_latent.LATENT_GATED_INDEXED",
        "latent_gated_shared": "gated_latent.LATENT_GATED_SHARED",
        "latent_wide": "gated_latent.LATENT_WIDE",
        "latent_wide_q": "gated_latent.LATENT_WIDE_Q",
        "latent_wide_kv_b": "gated_latent.LATENT_WIDE_KV_B",
        "latent_wide_q_kv_b": "gated_latent.LATENT_WIDE_Q_KV_B",
        "shortconv": "shortconv.SHORTCONV",
        "mamba2": "mamba2.MAMBA2",
        "mamba1": "mamba1.MAMBA1",
        "attention_mamba2": "parallel.ATTENTION_MAMBA2",
        "delta": "delta.DELTA",
        "delta_grouped": "delta.DELTA_GROUPED",
        "kda": "kda.KDA",
        "kda_signed": "kda.KDA",
        "kda_bounded": "kda.KDA_BOUNDED",
        "kda_floored": "kda.KDA_FLOORED",
        "kda_whole": "kda.KDA_WHOLE",
        "wkv": "wkv.WKV",
        "wkv_first": "wkv.WKV_FIRST",
        POST_NORM: "post_norm.ATTENTION_POST_NORM",
        "delta_signed": "delta_signed.DELTA_SIGNED",
        "delta_sigmoid": "norm_gated.DELTA_SIGMOID",
        "latent_norm_gated": "norm_gated.LATENT_NORM_GATED",
    },
)
