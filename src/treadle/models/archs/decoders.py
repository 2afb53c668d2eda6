"""Decoders that have neither experts alone nor states: Llama and its kin."""

from __future__ import annotations

from treadle.models.archs.arch import (
    ALIBI,
    BIASES,
    EMBD_NORM_BIAS,
    EXPERTS_NORM,
    FFN_NORM,
    LOCAL_BASE,
    OUTPUT_AND_BIAS,
    OUTPUT_NORM,
    PATTERN,
    POSITIONS,
    POST_ATTENTION,
    POST_NORM,
    PRE_NORM,
    QK_NORM,
    QKV_BIAS,
    SINKS,
    SUB_NORMS,
    WINDOW,
    Arch,
)

DECODERS = (
    # Llama 1 to 3, Mistral, TinyLlama; Mixtral
    Arch("llama", rope="norm", keys=((EXPERTS_NORM, True),)),
    Arch("mistral3", rope="norm"),  # Ministral 3
    Arch("qwen2", needs=QKV_BIAS),
    Arch("qwen3", needs=QK_NORM),
    Arch("qwen2vl", needs=QKV_BIAS, pictures=True),  # Qwen2-VL, Qwen2.5-VL
    Arch("qwen3vl", needs=QK_NORM, pictures=True),
    Arch("gemma", activation="gelu", embd_scale=True),
    Arch(
        "gemma2",
        activation="gelu",
        needs=POST_NORM,
        keys=(
            (WINDOW, 4096),
            (PATTERN, 2),
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
        ),
        embd_scale=True,
        width_scaled=frozenset({46}),
    ),
    # Gemma 2 without the norms behind products; llama.cpp has none
    Arch(
        "vaultgemma",
        activation="gelu",
        keys=(
            (WINDOW, 4096),
            (PATTERN, 2),
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
        ),
        embd_scale=True,
    ),
    Arch(
        "gemma3",
        activation="gelu",
        needs=QK_NORM | POST_NORM,
        keys=((WINDOW, 0), (PATTERN, 6), (LOCAL_BASE, 10000.0)),
        embd_scale=True,
        width_scaled=frozenset({62}),
    ),
    Arch(
        "gemma4",
        graph="gemma4",
        activation="gelu",
        needs=QK_NORM | POST_NORM,
        keys=(("attention.scale", 1.0), (EXPERTS_NORM, True)),
        embd_scale=True,
        names=(("ffn_gate_inp.scale", "ffn_gate_inp_norm.weight"),),
    ),
    Arch(
        "gemma3n",
        graph="gemma3n",
        activation="gelu",
        needs=QK_NORM | POST_NORM,
        keys=(("attention.scale", 1.0), (PATTERN, 5), (LOCAL_BASE, 10000.0)),
        embd_scale=True,
    ),
    Arch("smollm3", rope="norm", nope="fourth"),
    Arch("granite", rope="norm", nope="told", divide_logits=True),
    # With experts or without
    Arch(
        "granite_swa",
        rope="norm",
        needs=SINKS,
        keys=((EXPERTS_NORM, True),),
        divide_logits=True,
    ),
    Arch("olmo2", needs=QK_NORM | POST_NORM, lacks=PRE_NORM),  # and OLMo 3
    Arch(
        "exaone4",
        needs=QK_NORM | POST_NORM,
        lacks=PRE_NORM,
        keys=((WINDOW, 0), (PATTERN, 4)),
        nope="global",
    ),
    Arch("seed_oss", needs=QKV_BIAS | POST_ATTENTION, lacks=FFN_NORM),
    Arch("arcee", rope="norm", activation="relu2", gated=False),
    Arch("apertus", graph="apertus", gated=False, needs=QK_NORM),
    Arch("bitnet", needs=SUB_NORMS),
    Arch("bitnet-b1.58", activation="relu2", needs=SUB_NORMS),  # Microsoft's name of its 2B-4T
    Arch("internlm2", rope="norm"),
    Arch("chatglm", rope="norm"),  # ChatGLM 3, GLM-4-9B
    Arch("exaone"),  # EXAONE 3, 3.5, Deep
    Arch("minicpm", graph="minicpm", rope="norm", divide_logits=True),
    Arch("baichuan", graph="baichuan", rope="norm"),  # 7B; 13B
    Arch("pangu-embedded"),
    Arch("phi3", keys=((WINDOW, 0), (PATTERN, 0))),
    Arch("glm4", rope="norm", needs=POST_NORM),
    Arch("ernie4_5", rope="norm"),
    Arch("hunyuan-dense", needs=QK_NORM, norm_last=True),
    Arch("hunyuan_vl", needs=QK_NORM, norm_last=True, pictures=True),
    Arch("command-r", rope="norm", norm="layer", lacks=FFN_NORM),
    Arch(
        "cohere2",
        rope="norm",
        norm="layer",
        lacks=FFN_NORM,
        keys=((PATTERN, 4),),
        nope="global",
    ),
    Arch("stablelm", norm="layer", lacks=FFN_NORM),
    Arch("starcoder2", activation="gelu", gated=False, norm="layer"),
    Arch("nemotron", activation="relu2", gated=False, norm="layer"),
    Arch("jais2", activation="relu2", gated=False, norm="layer"),
    Arch("gptneox", activation="gelu_erf", gated=False, norm="layer"),  # Pythia
    Arch(
        "gpt2",
        rope="none",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=POSITIONS,
    ),
    Arch(
        "phi2",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=OUTPUT_AND_BIAS,
        lacks=FFN_NORM,
    ),
    Arch(
        "falcon",
        activation="gelu_erf",
        gated=False,
        norm="layer",
        lacks=FFN_NORM,
    ),
    Arch(
        "starcoder",
        rope="none",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=POSITIONS,
    ),
    Arch("olmo", rope="norm", norm="bare", lacks=PRE_NORM | OUTPUT_NORM),
    Arch(
        "bloom",
        rope="none",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=EMBD_NORM_BIAS,
        keys=((ALIBI, 8.0),),
    ),
    Arch("mpt", rope="none", activation="gelu_erf", gated=False, norm="layer"),
    Arch("refact", rope="none", keys=((ALIBI, 8.0),)),
    Arch("orion", norm="layer"),
    Arch("codeshell", activation="gelu", gated=False, norm="layer", needs=BIASES),
)
