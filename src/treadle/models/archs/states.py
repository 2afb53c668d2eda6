"""Models whose layers keep states."""

from __future__ import annotations

from treadle.models.archs.arch import (
    EXPERTS_GATING,
    EXPERTS_NORM,
    EXPERTS_ROUTED,
    FFN_NORM,
    LFM2_NAMES,
    POST_ATTENTION,
    QK_NORM,
    SSM_NORMS,
    Arch,
)

STATES = (
    Arch(
        "lfm2",
        needs=QK_NORM,
        state="shortconv",
        names=LFM2_NAMES,
    ),
    Arch(
        "lfm2moe",
        needs=QK_NORM,
        keys=((EXPERTS_GATING, 2), (EXPERTS_NORM, True)),
        state="shortconv",
        names=LFM2_NAMES,
    ),
    Arch("mamba2", rope="none", mixer="mamba2", state="mamba2"),
    Arch("mamba", rope="none", mixer="mamba1", state="mamba1"),
    Arch(
        "jamba",
        rope="none",
        needs=SSM_NORMS,
        keys=((EXPERTS_ROUTED, True),),
        state="mamba1",
    ),
    Arch(
        "falcon-h1",
        mixer="attention_mamba2",
        state="mamba2",
        names=(("ffn_norm", "ffn_norm.weight"),),
    ),
    Arch(
        "qwen35",
        needs=QK_NORM | POST_ATTENTION,
        lacks=FFN_NORM,
        mixer="attention_gate",
        state="delta",
        nextn="normed",
    ),
    Arch(
        "qwen35moe",
        needs=QK_NORM | POST_ATTENTION,
        lacks=FFN_NORM,
        keys=((EXPERTS_NORM, True),),
        mixer="attention_gate",
        state="delta",
        nextn="normed",
    ),
    Arch(
        "qwen3next",
        needs=QK_NORM | POST_ATTENTION,
        lacks=FFN_NORM,
        keys=((EXPERTS_NORM, True),),
        mixer="attention_gate",
        state="delta_grouped",
        nextn="normed",
    ),
    Arch(
        "granitehybrid",
        rope="norm",
        keys=((EXPERTS_NORM, True),),
        nope="told",
        divide_logits=True,
        state="mamba2",
    ),
    Arch(
        "nemotron_h",
        graph="halves",
        rope="none",
        activation="relu2",
        gated=False,
        state="mamba2",
    ),
    Arch(
        "nemotron_h_moe",
        graph="halves",
        rope="none",
        activation="relu2",
        gated=False,
        keys=((EXPERTS_GATING, 2),),
        state="mamba2",
    ),
)
