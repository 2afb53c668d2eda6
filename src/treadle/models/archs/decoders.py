"""Decoders that have neither experts alone nor states: Llama and its kin."""

from __future__ import annotations

from treadle.models.archs.arch import (
    EXPERTS_NORM,
    FFN_NORM,
    LOCAL_BASE,
    PATTERN,
    POSITIONS,
    POST_ATTENTION,
    POST_NORM,
    PRE_NORM,
    QK_NORM,
    QKV_BIAS,
    SINKS,
    WINDOW,
    Arch,
)

DECODERS = (
    # Llama 1 to 3, Mistral, TinyLlama; Mixtral
    Arch("llama", rope="norm", keys=((EXPERTS_NORM, True),)),
    Arch("mistral3", rope="norm"),  # Ministral 3
    Arch("qwen2", needs=QKV_BIAS),
    Arch("qwen3", needs=QK_NORM),
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
    Arch("phi3", keys=((WINDOW, 0), (PATTERN, 0))),
    Arch("glm4", rope="norm", needs=POST_NORM),
    Arch("ernie4_5", rope="norm"),
    Arch("hunyuan-dense", needs=QK_NORM, norm_last=True),
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
)
