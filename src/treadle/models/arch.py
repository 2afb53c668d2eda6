"""Arch: the record of an architecture's traits."""

from __future__ import annotations

from typing import Literal

from treadle.base.fast_classes import dataclass

FFN_NORM = frozenset({"ffn_norm.weight"})
PRE_NORM = FFN_NORM | {"attn_norm.weight"}
POST_ATTENTION = frozenset({"post_attention_norm.weight"})
POST_NORM = POST_ATTENTION | {"post_ffw_norm.weight"}
QK_NORM = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
BIASES = frozenset(
    f"{stem}.bias"
    for stem in ("attn_norm", "attn_output", "ffn_norm", "ffn_up", "ffn_down", "output_norm")
)
OUTPUT_AND_BIAS = frozenset({"output.weight", "output.bias"})
OUTPUT_NORM = frozenset({"output_norm.weight"})
EMBEDDINGS = frozenset({"token_embd.weight"})
NORMS_AFTER_SUMS = frozenset({"attn_output_norm.weight", "layer_output_norm.weight"})
LFM2_NAMES = (("token_embd_norm.weight", "output_norm.weight"),)
EMBD_NORM = frozenset({"token_embd_norm.weight"})
EMBD_NORM_BIAS = EMBD_NORM | {"token_embd_norm.bias"}
TYPES = frozenset({"token_types.weight"})
POSITIONS = frozenset({"position_embd.weight"})
DISTANCES = frozenset({"blk.0.attn_rel_b.weight"})
ENCODER_DISTANCES = frozenset({"enc.blk.0.attn_rel_b.weight"})
GATE = frozenset({"ffn_gate.weight"})
ENCODER_GATE = frozenset({"enc.ffn_gate.weight"})
SSM_NORMS = frozenset({"ssm_dt_norm.weight", "ssm_b_norm.weight", "ssm_c_norm.weight"})
WKV_BIASES = frozenset({"attn_norm.bias", "output_norm.bias", "output.weight"})
WKV_GATE = frozenset(f"time_mix_{n}" for n in ("g1.weight", "g2.weight", "ln.weight", "ln.bias"))
SUB_NORMS = frozenset({"attn_sub_norm.weight", "ffn_sub_norm.weight"})
SINKS = frozenset({"attn_sinks.weight"})
# Matrices that adapters within a model (Granite Switch) add to.
LORA_A = "_lora_a.weight"  # endings of the tensors of adapters within a model
LORA_B = "_lora_b.weight"
SWITCHED_MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down"),
)
LAYER_SCALE = frozenset({"layer_output_scale.weight"})
PER_LAYER = frozenset({"per_layer_model_proj.weight", "per_layer_proj_norm.weight"})
QKV_BIAS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})

RopePairs = Literal["norm", "neox", "none"]
ROPES: tuple[RopePairs, ...] = ("norm", "neox")

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
ROPE_PATTERN = "attention.rope_pattern"  # a flag for each layer
ROPE_HALVED = "rope.dimension_halved"  # in layers without a window; not in GGUF files
ROPE_SECTIONED = "rope.halved_by_sections"  # M-RoPE files rotate halves; not in GGUF files
INDEX_HALVED = "attention.indexer.rope_halved"  # its pairs are halves; not in GGUF files
YARN_TRUNCATE = "rope.scaling.yarn_truncate"  # transformers'; not in GGUF files
ALIBI = "attention.max_alibi_bias"
BUCKETS = "attention.relative_buckets_count"
N_BUCKETS = range(4, 257)  # allowed numbers of buckets
REACH = 128  # tokens: all longer distances share a bucket; GGUF has no key for it
SCALE = "attention.scale"
TEMPERATURE = "attention.temperature_scale"
TEMPERATURE_LENGTH = "attention.temperature_length"
EXPERTS_NORM = "expert_weights_norm"
LEADING_DENSE = "leading_dense_block_count"
EXPERTS_MEAN = "expert_shared_mean"  # treadle's; not in GGUF files
EXPERTS_GATING = "expert_gating_func"
EXPERTS_JITTER = "router_jitter_noise"  # transformers'; not in GGUF files
POST_EPS = "post_norm_epsilon"  # of norms after products; not in GGUF files
VALUE_NORMED = "attention.value_normed"  # by a norm without weights; not in GGUF files
N_OWN = "embedding_length_per_layer_input"
EMBD_NORMED = "embedding_normed"  # by a norm without weights; not in GGUF files
GATE_LIMITED = "swiglu_clamp_first"  # gates are limited, then activated; not in GGUF files
EXPERTS_ROUTED = "moe_by_router"  # layers with a router have experts; not in GGUF files


@dataclass(frozen=True)
class Arch:
    """The traits of one architecture, named as in GGUF's ``general.architecture``.

    graph: the data flow, a name in ``models.graphs.GRAPHS``.
    rope: the elements of a head that form pairs: ``norm``: (2i, 2i+1), ``neox``: (i, i + dims/2).
    activation: of the FFN, a name in ``kernels/activations.py``.
    gated: the FFN's activation is applied to a gate; else to the single product before
        ``ffn_down``.
    norm: ``rms``, ``layer`` for LayerNorm, ``bare`` for LayerNorm without weights, ``bare_rms`` for
        RMS norm without weights, or ``told``: RMS norm if the file has the key of its epsilon, else
        LayerNorm.
    needs: optional tensors that every valid file of this architecture has.
    lacks: tensors that other architectures need and files of this one may lack: in all layers, or,
        if named with "blk.N.", in that layer only.
    keys: defaults of keys that files lack, mostly llama.cpp's. A file with a pattern of windows
        must have a window, unless it is 0 here, since valid files of some sizes omit it.
    embd_scale: token embeddings are multiplied by sqrt(n_embd).
    nope: layers without rope: ``global``: those without a window, if the file has a window (even if
        no layer uses it); ``sparse``: those of them that have experts; ``fourth``: every fourth;
        ``told``: all, if the file has the key ``rope.scaling.finetuned`` and it is false.
    norm_last: q/k norms are applied after the rope.
    divide_logits: logits are divided by the file's key ``logit_scale``, not multiplied.
    width_scaled: numbers of layers of the sizes whose attention scale is 1/sqrt(n_embd / n_head)
        instead of 1/sqrt(head_dim): the 27B sizes of Gemma, whose files have no key for it.
    mixer: mixer of layers with keys and values, a name in ``models.mixers.MIXERS``.
    state: mixer of layers without keys and values, mostly a recurrence.
    names: tensors with other names in files, without "blk.N.": pairs of the file's name and the
        graph's; a name that ends with a dot is a prefix.
    nextn: the states that layers for multi-token prediction read: those after the last layer
        (``plain``), the same after the model's last norm (``normed``), or all streams of states
        (``streams``); "": such layers are not supported.
    pictures: a text file alone, without its projector, says that the models read pictures.
    spans: layers in which the tokens of one picture attend to each other in both directions:
        ``all``, or those with a ``window``.
    causal_widths: ``n_embd`` of the sizes whose pictures have causal attention although ``spans``
        is set. Files have no key for it; llama.cpp tells these sizes by their width too.
    interleaved: the components of a position (time, row, column) alternate over the pairs of a head
        (Qwen3-VL); else each has consecutive pairs.
    encoder: the architecture of the encoder that reads prompts, whose tensors' names begin with
        "enc."; "": there is none.
    """

    name: str
    graph: str = "decoder"
    rope: RopePairs = "neox"
    activation: str = "silu"
    gated: bool = True
    norm: Literal["rms", "layer", "bare", "bare_rms", "told"] = "rms"
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    keys: tuple[tuple[str, float], ...] = ()
    embd_scale: bool = False
    nope: Literal["", "global", "sparse", "fourth", "told"] = ""
    norm_last: bool = False
    divide_logits: bool = False
    width_scaled: frozenset[int] = frozenset()
    mixer: str = "attention"
    state: str = ""
    names: tuple[tuple[str, str], ...] = ()
    nextn: Literal["", "plain", "normed", "streams"] = ""
    pictures: bool = False
    spans: Literal["", "all", "window"] = ""
    causal_widths: frozenset[int] = frozenset()
    interleaved: bool = False
    encoder: str = ""
