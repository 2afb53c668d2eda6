"""Mixers: sublayers that pass information between tokens, such as attention; one file each."""

from __future__ import annotations

from treadle.models.mixers.attention import ATTENTION, ATTENTION_GATE, ATTENTION_QKV
from treadle.models.mixers.names import (
    BEHIND,
    BLOCKS,
    FUSED,
    GATE,
    GATE_INDEXED,
    INDEX_SHARED,
    INDEXED,
    OWN_DISTANCES,
    SIGMOID_FUSED,
    SIGMOID_HEADS,
    SINKS,
    SINKS_FUSED,
    SOFTPLUS,
    SOFTPLUS_HEADS,
)
from treadle.models.structure import LateConstants, Sublayer

MIXERS = LateConstants[Sublayer](
    __name__,
    {"attention": ATTENTION, FUSED: ATTENTION_QKV, GATE: ATTENTION_GATE},
    late={
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
        GATE_INDEXED: "blocks.GATE_INDEXED_BLOCKS",
        INDEXED: "indexed.LATENT_INDEXED",
        INDEX_SHARED: "indexed.LATENT_INDEX_SHARED",
        "latent_gated": "gated_latent.LATENT_GATED",
        "latent_gated_indexed": "gated_latent.LATENT_GATED_INDEXED",
        "latent_gated_shared": "gated_latent.LATENT_GATED_SHARED",
        "shortconv": "shortconv.SHORTCONV",
        "mamba2": "mamba2.MAMBA2",
        "mamba1": "mamba1.MAMBA1",
        "attention_mamba2": "parallel.ATTENTION_MAMBA2",
        "delta": "delta.DELTA",
        "delta_grouped": "delta.DELTA_GROUPED",
        "kda": "kda.KDA",
        "kda_bounded": "kda.KDA_BOUNDED",
        "wkv": "wkv.WKV",
        "wkv_first": "wkv.WKV_FIRST",
        BEHIND: "behind.ATTENTION_BEHIND",
        "delta_signed": "delta_signed.DELTA_SIGNED",
    },
)
