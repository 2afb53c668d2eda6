"""Models that generate text of what an encoder has read."""

from __future__ import annotations

from treadle.models.archs.arch import (
    BUCKETS,
    DISTANCES,
    ENCODER_DISTANCES,
    ENCODER_GATE,
    GATE,
    SCALE,
    Arch,
)

ENCODER_DECODERS = (
    Arch(
        "t5",
        graph="encoder_decoder",
        rope="none",
        activation="gelu",
        needs=DISTANCES | ENCODER_DISTANCES,
        lacks=GATE | ENCODER_GATE,
        keys=((BUCKETS, 32), (SCALE, 1.0)),
        names=(
            ("cross_attn_o.weight", "cross_attn_output.weight"),
            ("attn_o.weight", "attn_output.weight"),
            ("dec.output_norm.weight", "output_norm.weight"),
            ("dec.blk.", "blk."),
        ),
        encoder="t5encoder",
    ),
)
