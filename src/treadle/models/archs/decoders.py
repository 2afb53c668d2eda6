"""Dense decoders, such as Llama; some of them may have experts."""

from __future__ import annotations

from treadle.models.arch import (
    ALIBI,
    BIASES,
    EMBD_NORM_BIAS,
    EMBD_NORMED,
    EMBEDDINGS,
    EXPERTS_NORM,
    FFN_NORM,
    LOCAL_BASE,
    OUTPUT_AND_BIAS,
    OUTPUT_NORM,
    PATTERN,
    POSITIONS,
    POST_ATTENTION,
    POST_EPS,
    POST_NORM,
    PRE_NORM,
    QK_NORM,
    QKV_BIAS,
    ROPE_SECTIONED,
    SINKS,
    SUB_NORMS,
    SWITCHED_MATRICES,
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
    Arch("qwen3vl", needs=QK_NORM, pictures=True, interleaved=True),
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
    # Gemma 2 without the norms after products; not in llama.cpp
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
        spans="all",
    ),
    Arch(
        "gemma4",
        graph="gemma4",
        activation="gelu",
        needs=QK_NORM | POST_NORM,
        keys=(("attention.scale", 1.0), (EXPERTS_NORM, True)),
        embd_scale=True,
        names=(("ffn_gate_inp.scale", "ffn_gate_inp_norm.weight"),),
        spans="window",
        causal_widths=frozenset({1536, 2560}),  # E2B and E4B
        nextn="normed",
    ),
    Arch(  # a drafter of Gemma 4
        "gemma4-assistant",
        graph="assistant",
        activation="gelu",
        needs=frozenset({"attn_q_norm.weight", "layer_output_scale.weight"}) | POST_NORM,
        keys=(("attention.scale", 1.0),),
    ),
    # Drafters that read states from between a model's layers
    Arch("eagle3", graph="eagle3", rope="norm", lacks=EMBEDDINGS),
    Arch("dflash", graph="dflash", needs=QK_NORM | {"enc.output_norm.weight"}, lacks=EMBEDDINGS),
    Arch(
        "gemma3n",
        graph="gemma3n",
        activation="gelu",
        needs=QK_NORM | POST_NORM,
        keys=(("attention.scale", 1.0), (PATTERN, 5), (LOCAL_BASE, 10000.0)),
        embd_scale=True,
    ),
    Arch("smollm3", rope="norm", nope="fourth"),
    Arch(
        "muse-glimmer",
        rope="norm",
        needs=QK_NORM | POST_NORM | {"attn_gate.weight"},
        keys=((PATTERN, 4), (POST_EPS, 1e-8), (EMBD_NORMED, True)),
        nope="global",
    ),
    Arch("granite", rope="norm", nope="told", divide_logits=True),
    # Granite 4 with adapters that control tokens choose
    Arch(
        "graniteswitch",
        graph="switched",
        rope="norm",
        nope="told",
        divide_logits=True,
        names=tuple(
            (f"{name}.lora_{side}", f"{name}_lora_{side}.weight")
            for name in SWITCHED_MATRICES
            for side in "ab"
        ),
    ),
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
    Arch(  # Spark X2.5; its activation is transformers' gelu
        "spark2_5",
        activation="gelu_erf",
        keys=((LOCAL_BASE, 0.0),),
        mixer="attention_sigmoid",
    ),
    Arch("arcee", rope="norm", activation="relu2", gated=False),
    Arch("nanbeige", graph="nanbeige", rope="norm"),  # Nanbeige 4.2
    Arch(  # not in llama.cpp
        "nanochat",
        graph="nanochat",
        activation="relu2",
        gated=False,
        norm="bare_rms",
        lacks=PRE_NORM | OUTPUT_NORM,
        keys=(("final_logit_softcapping", 15.0), (EMBD_NORMED, True)),
    ),
    Arch(
        "hrm_text",
        graph="hrm",
        norm="bare_rms",
        needs=frozenset({"attn_gate.weight"}),
        lacks=PRE_NORM | OUTPUT_NORM,
        names=(("hrm.z_l_init", "hrm_z_l_init.weight"),),
    ),
    Arch(
        "talkie",
        graph="talkie",
        norm="bare_rms",
        needs=frozenset({"attn_q_gain.weight", "output.weight"}),
        lacks=PRE_NORM | OUTPUT_NORM,
        keys=((EMBD_NORMED, True),),
        names=(
            ("layer_output_scale.weight", "embd_skip.weight"),
            ("attn_q_norm.weight", "attn_q_gain.weight"),
        ),
    ),
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
    Arch("glm4", rope="norm", needs=POST_NORM, keys=((ROPE_SECTIONED, True),)),
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
    Arch("cohere-compass", norm="layer", lacks=FFN_NORM),  # not in llama.cpp
    Arch("stablelm", norm="layer", lacks=FFN_NORM),
    Arch("starcoder2", activation="gelu", gated=False, norm="layer"),
    Arch("nemotron", activation="relu2", gated=False, norm="layer"),
    Arch("jais2", activation="relu2", gated=False, norm="layer"),
    Arch("deci", graph="thinned", rope="norm", state="linear"),  # Nemotron 49B, 51B, 253B; DeciLM
    Arch("openelm", needs=QK_NORM),
    Arch("qwen", graph="qwen"),
    Arch("maincoder", rope="norm", needs=QK_NORM, norm_last=True),
    Arch(  # and CodeGen; llama.cpp has only the name
        "gptj",
        rope="norm",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=OUTPUT_AND_BIAS,
        lacks=FFN_NORM,
    ),
    Arch("jais", graph="jais", rope="none", norm="layer", keys=((ALIBI, 8.0),)),
    Arch("gptneox", activation="gelu_erf", gated=False, norm="layer"),  # Pythia
    Arch(
        "gpt2",
        rope="none",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=POSITIONS,
    ),
    Arch(  # not in llama.cpp
        "gptneo",
        rope="none",
        activation="gelu",
        gated=False,
        norm="layer",
        needs=POSITIONS,
        keys=((WINDOW, 256), (PATTERN, -2)),
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
