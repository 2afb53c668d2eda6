"""Mixture-of-experts decoders."""

from __future__ import annotations

from treadle.models.archs.arch import (
    EXPERTS_GATING,
    EXPERTS_JITTER,
    EXPERTS_MEAN,
    EXPERTS_NORM,
    EXPERTS_ROUTED,
    FFN_NORM,
    GATE_LIMITED,
    INDEX_HALVED,
    LEADING_DENSE,
    LOCAL_BASE,
    PATTERN,
    POST_ATTENTION,
    POST_NORM,
    PRE_NORM,
    QK_NORM,
    QKV_BIAS,
    ROPE_HALVED,
    TEMPERATURE,
    TEMPERATURE_LENGTH,
    WINDOW,
    YARN_TRUNCATE,
    Arch,
)

MIXTURES = (
    Arch("qwen2moe", needs=QKV_BIAS),
    Arch("qwen3moe", needs=QK_NORM, keys=((EXPERTS_NORM, True),)),
    Arch(
        "qwen3vlmoe",
        needs=QK_NORM,
        keys=((EXPERTS_NORM, True),),
        pictures=True,
        interleaved=True,
    ),
    Arch(
        "granitemoe",
        rope="norm",
        keys=((EXPERTS_NORM, True),),
        nope="told",
        divide_logits=True,
    ),
    Arch("olmoe", needs=QK_NORM),
    Arch("flex_olmo", needs=QK_NORM | POST_NORM, lacks=PRE_NORM),  # not in llama.cpp
    Arch("bailingmoe", rope="norm"),  # Ling-lite, Ling-Coder
    Arch("bailingmoe2", needs=QK_NORM, keys=((EXPERTS_GATING, 2),)),  # Ling and Ring 2
    Arch("dots1", needs=QK_NORM, keys=((EXPERTS_GATING, 2),)),
    Arch("deepseek", rope="norm"),  # DeepSeekMoE 16B
    Arch(  # Trinity
        "afmoe",
        needs=QK_NORM | POST_NORM | {"attn_gate.weight"},
        keys=((PATTERN, 4), (EXPERTS_GATING, 2)),
        embd_scale=True,
        nope="global",
    ),
    Arch(  # Step 3.5 and 3.7
        "step35",
        needs=QK_NORM,
        keys=(
            (LOCAL_BASE, 10000.0),
            (ROPE_HALVED, True),
            (EXPERTS_GATING, 2),
            (EXPERTS_ROUTED, True),
        ),
        mixer="attention_sigmoid",
    ),
    Arch(  # MiMo V2
        "mimo2",
        keys=(
            (LOCAL_BASE, 10000.0),
            (EXPERTS_GATING, 2),
            (EXPERTS_NORM, True),
            (EXPERTS_ROUTED, True),
        ),
        mixer="attention_sinks",
    ),
    Arch(  # K-EXAONE
        "exaone-moe",
        needs=QK_NORM,
        keys=((PATTERN, 4), (EXPERTS_GATING, 2)),
        nope="global",
    ),
    Arch(
        "glm4moe",
        needs=POST_ATTENTION,
        lacks=FFN_NORM,
        keys=((EXPERTS_GATING, 2),),
        nextn="plain",
    ),
    # DeepSeek V2 and V3, GLM-4.7-Flash
    Arch("deepseek2", rope="norm", mixer="latent", nextn="plain"),
    # DeepSeek V3.2, GLM-5: keys that an indexer chooses
    Arch(
        "deepseek32",
        rope="norm",
        mixer="latent_indexed",
        keys=((EXPERTS_GATING, 2), (INDEX_HALVED, True)),
    ),
    Arch(
        "glm-dsa",
        rope="norm",
        mixer="latent_indexed",
        keys=((EXPERTS_GATING, 2),),
    ),
    Arch(
        "dots3note",
        graph="dots3",
        rope="norm",
        mixer="latent_indexed",
        needs=frozenset({"attn_gate.weight", "attn_k_norm.weight"}),
        keys=((EXPERTS_GATING, 2),),
    ),
    Arch(  # Hunyuan 4
        "hy_v4",
        graph="independent",
        rope="norm",
        mixer="latent_indexed",
        keys=((EXPERTS_GATING, 2), (GATE_LIMITED, True)),
    ),
    Arch("minicpm3", graph="minicpm", mixer="latent_kv_b", divide_logits=True),
    Arch("plm", rope="norm", activation="relu2", gated=False, mixer="latent_kv_b"),
    Arch("mistral4", rope="norm", mixer="latent"),
    Arch(  # DeepSeek V4
        "deepseek4",
        graph="compressed",
        rope="norm",
        keys=((EXPERTS_GATING, 4), (EXPERTS_NORM, True), (GATE_LIMITED, True)),
        mixer="rows",
        nextn="streams",
    ),
    Arch(
        "minimax-m2",
        needs=QK_NORM,
        keys=((EXPERTS_GATING, 2), (EXPERTS_NORM, True)),
    ),
    Arch(
        "minimax-m3",
        graph="blocks",
        activation="swiglu_clamped",
        needs=QK_NORM,
        keys=((EXPERTS_GATING, 2), (EXPERTS_NORM, True)),
    ),
    # With LayerNorm or RMS norm
    Arch(
        "cohere2moe",
        rope="norm",
        norm="told",
        lacks=FFN_NORM,
        keys=((PATTERN, -4), (EXPERTS_GATING, 2), (EXPERTS_MEAN, True)),
        nope="sparse",
    ),
    Arch(
        "mellum",
        needs=QK_NORM,
        keys=((WINDOW, 0), (PATTERN, 4), (LOCAL_BASE, 0.0), (EXPERTS_NORM, True)),
    ),
    Arch(  # no layer has the one FFN whose width its files may omit
        "maple",
        needs=QK_NORM,
        keys=((EXPERTS_NORM, True), (GATE_LIMITED, True), ("feed_forward_length", 1)),
        nope="global",
    ),
    Arch(
        "laguna",
        needs=QK_NORM,
        keys=((WINDOW, 0), (PATTERN, -4), (LOCAL_BASE, 0.0), (EXPERTS_GATING, 2)),
        mixer="attention_softplus",
    ),
    # Hunyuan 3
    Arch(
        "hy_v3",
        needs=QK_NORM,
        keys=((EXPERTS_GATING, 2), (LEADING_DENSE, -1)),
        names=(("exp_probs_b", "exp_probs_b.bias"),),
        nextn="normed",
    ),
    Arch(
        "gpt-oss",
        activation="swiglu_clamped",
        needs=POST_ATTENTION | {"attn_sinks.weight"},
        lacks=FFN_NORM,
        keys=((PATTERN, 2), (EXPERTS_GATING, 3), (YARN_TRUNCATE, False)),
    ),
    Arch(
        "llama4",
        graph="llama4",
        rope="norm",
        keys=(
            (WINDOW, 8192),
            (PATTERN, 4),
            (TEMPERATURE, 0.1),
            (TEMPERATURE_LENGTH, 8192),
        ),
        nope="fourth",
    ),
    Arch("ernie4_5-moe", rope="norm", keys=((EXPERTS_NORM, True),)),
    Arch("hunyuan-moe", needs=QK_NORM, keys=((EXPERTS_NORM, True),), norm_last=True),
    Arch(  # Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE
        "phimoe",
        graph="phimoe",
        norm="layer",
        keys=((WINDOW, 0), (PATTERN, 0), (EXPERTS_JITTER, 0.01)),
    ),
    Arch(
        "dbrx",
        norm="layer",
        keys=((EXPERTS_NORM, True),),
        names=(("attn_output_norm.weight", "ffn_norm.weight"),),
    ),
    Arch(  # Grok-1, whose files may omit these numbers, and Grok-2
        "grok",
        graph="grok",
        activation="gelu",
        needs=POST_NORM,
        keys=(
            ("embedding_scale", 78.38367176906169),
            ("attention.output_scale", 0.08838834764831845),
            ("attn_logit_softcapping", 30.0),
            ("logit_scale", 0.5773502691896257),
            ("rope.scaling.yarn_beta_fast", 8.0),
        ),
        names=(
            ("attn_output_norm.weight", "post_attention_norm.weight"),
            ("layer_output_norm.weight", "post_ffw_norm.weight"),
        ),
    ),
    Arch(
        "smallthinker",
        graph="early",
        activation="relu",
        keys=((WINDOW, 0), (PATTERN, -4), (EXPERTS_NORM, True)),
        nope="global",
    ),
    Arch("grovemoe", graph="grove", needs=QK_NORM, keys=((EXPERTS_NORM, True),)),
)
