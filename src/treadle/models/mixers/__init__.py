"""Mixers: how tokens learn of each other, one small file each."""

from __future__ import annotations

from treadle.models.mixers.attention import ATTENTION, ATTENTION_GATE, ATTENTION_QKV, FUSED, GATE
from treadle.models.structure import Late, Sublayer

SOFTPLUS = "attention_softplus"  # a matrix makes a gate of what attention gives
SOFTPLUS_HEADS = "attention_softplus_heads"  # one value for each head

MIXERS = Late[Sublayer](
    __name__,
    {"attention": ATTENTION, FUSED: ATTENTION_QKV, GATE: ATTENTION_GATE},
    late={
        "attention_shared": "attention.ATTENTION_SHARED",
        "attention_keys": "attention.ATTENTION_KEYS",
        "attention_head_norms": "attention.ATTENTION_HEAD_NORMS",
        SOFTPLUS: "softplus.SOFTPLUS",
        SOFTPLUS_HEADS: "softplus.SOFTPLUS_HEADS",
        "latent": "latent.LATENT",
        "latent_q": "latent.LATENT_Q",
        "shortconv": "shortconv.SHORTCONV",
        "mamba2": "mamba2.MAMBA2",
        "attention_mamba2": "beside.ATTENTION_MAMBA2",
        "delta": "delta.DELTA",
        "delta_grouped": "delta.DELTA_GROUPED",
    },
)
