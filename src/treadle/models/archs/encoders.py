"""Encoders: texts to vectors and scores."""

from __future__ import annotations

from treadle.models.archs.arch import (
    ALIBI,
    BEHIND,
    EMBD_NORM,
    EMBD_NORM_BIAS,
    LOCAL_BASE,
    OUTPUT_NORM,
    PATTERN,
    POSITIONS,
    POST_NORM,
    PRE_NORM,
    QK_NORM,
    TYPES,
    Arch,
)

ENCODERS = (
    Arch(
        "bert",
        graph="encoder",
        rope="none",
        activation="gelu_erf",
        gated=False,
        norm="layer",
        needs=POSITIONS | EMBD_NORM_BIAS | TYPES | BEHIND,
        lacks=PRE_NORM | OUTPUT_NORM,
    ),
    Arch(
        "jina-bert-v2",
        graph="encoder",
        rope="none",
        activation="gelu_erf",
        norm="layer",
        needs=EMBD_NORM_BIAS | TYPES | BEHIND,
        lacks=PRE_NORM | OUTPUT_NORM,
        keys=((ALIBI, 8.0),),
    ),
    Arch(
        "jina-bert-v3",
        graph="encoder",
        activation="gelu_erf",
        gated=False,
        norm="layer",
        needs=EMBD_NORM_BIAS | TYPES | BEHIND,
        lacks=PRE_NORM | OUTPUT_NORM,
    ),
    Arch(
        "neo-bert",
        graph="encoder",
        rope="norm",
        names=(("enc.output_norm.weight", "output_norm.weight"),),
    ),
    Arch(  # treadle's own name: llama.cpp has no such model
        "gte",
        graph="encoder",
        activation="gelu_erf",
        norm="layer",
        needs=EMBD_NORM_BIAS | TYPES | BEHIND,
        lacks=PRE_NORM | OUTPUT_NORM,
    ),
    Arch(
        "nomic-bert",
        graph="encoder",
        norm="layer",
        needs=EMBD_NORM_BIAS | TYPES | BEHIND,
        lacks=PRE_NORM | OUTPUT_NORM,
    ),
    Arch(
        "nomic-bert-moe",
        graph="encoder",
        activation="gelu_erf",
        gated=False,
        norm="layer",
        needs=EMBD_NORM_BIAS | TYPES | BEHIND,
        lacks=PRE_NORM | OUTPUT_NORM,
    ),
    Arch(
        "modern-bert",
        graph="encoder",
        activation="gelu_erf",
        norm="layer",
        needs=EMBD_NORM,
        lacks=frozenset({"blk.0.attn_norm.weight"}),  # token_embd_norm is in its place
        keys=((PATTERN, -3), (LOCAL_BASE, 10000.0)),
    ),
    Arch(
        "gemma-embedding",
        graph="encoder",
        activation="gelu",
        needs=QK_NORM | POST_NORM,
        keys=((PATTERN, 6), (LOCAL_BASE, 10000.0)),
        embd_scale=True,
    ),
    Arch("eurobert", graph="encoder"),
)
