"""Architectures: a graph's name and a row of named traits each.

A trait says how the data flow differs from Llama's; what a tensor's presence can say is no trait
(biases, q/k norms, norms after the products, fused matrices, tied output, rope factors: optional
rows of ``models/mixers`` and ``models/ffns``), nor what a key can: whether there are experts.
"""

from __future__ import annotations

from typing import Literal

from treadle.record import dataclass

FFN_NORM = frozenset({"ffn_norm.weight"})
PRE_NORM = FFN_NORM | {"attn_norm.weight"}
POST_ATTENTION = frozenset({"post_attention_norm.weight"})
POST_NORM = POST_ATTENTION | {"post_ffw_norm.weight"}
QK_NORM = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
OUTPUT_NORM = frozenset({"output_norm.weight"})
BEHIND = frozenset({"attn_output_norm.weight", "layer_output_norm.weight"})
LFM2_NAMES = (("token_embd_norm.weight", "output_norm.weight"),)
EMBD_NORM = frozenset({"token_embd_norm.weight"})
EMBD_NORM_BIAS = EMBD_NORM | {"token_embd_norm.bias"}
TYPES = frozenset({"token_types.weight"})
POSITIONS = frozenset({"position_embd.weight"})
QKV_BIAS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})

RopePairs = Literal["norm", "neox", "none"]
ROPES: tuple[RopePairs, ...] = ("norm", "neox")

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
YARN_TRUNCATE = "rope.scaling.yarn_truncate"  # transformers'; no GGUF file says it
ALIBI = "attention.max_alibi_bias"
EXPERTS_NORM = "expert_weights_norm"
EXPERTS_GATING = "expert_gating_func"


@dataclass(frozen=True)
class Arch:
    """The traits of one architecture, named as GGUF's ``general.architecture`` names it.

    graph: how data flows, a name in ``models.graphs.GRAPHS``.
    rope: which elements of a head turn together: ``norm`` is (2i, 2i+1), ``neox`` (i, i + dims/2).
    activation: of the FFN, a name in ``kernels.activation.ACTIVATIONS``.
    gated: the activation is on a gate; else on the one product before ``ffn_down``.
    norm: ``rms``, or ``layer`` for LayerNorm.
    needs: optional tensors that every sound file of this architecture has.
    lacks: tensors that other architectures need, and this one's files may do without: in all
        layers at once, or with "blk.N." in front in that one alone.
    keys: the values of keys that files lack, mostly llama.cpp's. Who has a pattern of windows must
        have a window, unless it is 0 here: sound files of some sizes leave it out.
    embd_scale: token embeddings are multiplied by sqrt(n_embd).
    nope: layers without a rope: ``global``, those that see everything where the file has a window
        (even if no layer has it), every ``fourth``, or all where the file ``told`` so.
    norm_last: q/k norms come behind the rope.
    divide_logits: by ``logit_scale``, where others multiply.
    width_scaled: layer counts of the sizes whose attention scale is 1/sqrt(n_embd / n_head)
        where the others have 1/sqrt(head_dim): Gemma's 27B say so in no key.
    mixer: of layers with keys and values, a name in ``models.mixers.MIXERS``.
    state: of those that have none and keep a state instead.
    names: tensors that files call otherwise, "blk.N." cut off: their name, and that of the graph.
    nextn: which states the layers read that predict further tokens: those behind the last layer,
        ``plain`` or ``normed``; "": treadle has none of this architecture's.
    """

    name: str
    graph: str = "decoder"
    rope: RopePairs = "neox"
    activation: str = "silu"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    keys: tuple[tuple[str, float], ...] = ()
    embd_scale: bool = False
    nope: Literal["", "global", "fourth", "told"] = ""
    norm_last: bool = False
    divide_logits: bool = False
    width_scaled: frozenset[int] = frozenset()
    mixer: str = "attention"
    state: str = ""
    names: tuple[tuple[str, str], ...] = ()
    nextn: Literal["", "plain", "normed"] = ""


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        # Llama 1 to 3, Mistral, TinyLlama; Mixtral
        Arch("llama", rope="norm", keys=((EXPERTS_NORM, True),)),
        Arch("mistral3", rope="norm"),  # Ministral 3
        Arch("qwen2", needs=QKV_BIAS),
        Arch("qwen3", needs=QK_NORM),
        Arch("qwen2moe", needs=QKV_BIAS),
        Arch("qwen3moe", needs=QK_NORM, keys=((EXPERTS_NORM, True),)),
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
        Arch(
            "granitemoe",
            rope="norm",
            keys=((EXPERTS_NORM, True),),
            nope="told",
            divide_logits=True,
        ),
        Arch("olmoe", needs=QK_NORM),
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
        Arch(
            "glm4moe",
            needs=POST_ATTENTION,
            lacks=FFN_NORM,
            keys=((EXPERTS_GATING, 2),),
            nextn="plain",
        ),
        # DeepSeek V2 and V3, GLM-4.7-Flash
        Arch("deepseek2", rope="norm", mixer="latent", nextn="plain"),
        Arch(
            "minimax-m2",
            needs=QK_NORM,
            keys=((EXPERTS_GATING, 2), (EXPERTS_NORM, True)),
        ),
        Arch(
            "gpt-oss",
            activation="swiglu_clamped",
            needs=POST_ATTENTION | {"attn_sinks.weight"},
            lacks=FFN_NORM,
            keys=((PATTERN, 2), (EXPERTS_GATING, 3), (YARN_TRUNCATE, False)),
        ),
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
        Arch("ernie4_5", rope="norm"),
        Arch("ernie4_5-moe", rope="norm", keys=((EXPERTS_NORM, True),)),
        Arch("hunyuan-dense", needs=QK_NORM, norm_last=True),
        Arch("hunyuan-moe", needs=QK_NORM, keys=((EXPERTS_NORM, True),), norm_last=True),
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
}
