"""What a row of an architecture can say."""

from __future__ import annotations

from typing import Literal

from treadle.base.fast_dataclass import dataclass

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
BEHIND = frozenset({"attn_output_norm.weight", "layer_output_norm.weight"})
LFM2_NAMES = (("token_embd_norm.weight", "output_norm.weight"),)
EMBD_NORM = frozenset({"token_embd_norm.weight"})
EMBD_NORM_BIAS = EMBD_NORM | {"token_embd_norm.bias"}
TYPES = frozenset({"token_types.weight"})
POSITIONS = frozenset({"position_embd.weight"})
DISTANCES = frozenset({"blk.0.attn_rel_b.weight"})
GATE = frozenset({"ffn_gate.weight"})
SSM_NORMS = frozenset({"ssm_dt_norm.weight", "ssm_b_norm.weight", "ssm_c_norm.weight"})
WKV_BIASES = frozenset({"attn_norm.bias", "output_norm.bias", "output.weight"})
WKV_GATE = frozenset(f"time_mix_{n}" for n in ("g1.weight", "g2.weight", "ln.weight", "ln.bias"))
SUB_NORMS = frozenset({"attn_sub_norm.weight", "ffn_sub_norm.weight"})
SINKS = frozenset({"attn_sinks.weight"})
QKV_BIAS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})

RopePairs = Literal["norm", "neox", "none"]
ROPES: tuple[RopePairs, ...] = ("norm", "neox")

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
LOCAL_BASE = "rope.freq_base_swa"
ROPE_PATTERN = "attention.rope_pattern"  # a flag for each layer
ROPE_HALVED = "rope.dimension_halved"  # without a window; no GGUF file says it
ROPE_SECTIONED = "rope.halved_by_sections"  # a file of M-RoPE turns halves; no GGUF file says it
YARN_TRUNCATE = "rope.scaling.yarn_truncate"  # transformers'; no GGUF file says it
ALIBI = "attention.max_alibi_bias"
BUCKETS = "attention.relative_buckets_count"
N_BUCKETS = range(4, 257)  # that there can be
REACH = 128  # tokens: all distances from there on are in one bucket; GGUF has no key for it
SCALE = "attention.scale"
TEMPERATURE = "attention.temperature_scale"
TEMPERATURE_LENGTH = "attention.temperature_length"
EXPERTS_NORM = "expert_weights_norm"
LEADING_DENSE = "leading_dense_block_count"
EXPERTS_MEAN = "expert_shared_mean"  # treadle's; no GGUF file says it
EXPERTS_GATING = "expert_gating_func"
EXPERTS_JITTER = "router_jitter_noise"  # transformers'; no GGUF file says it
EXPERTS_ROUTED = "moe_by_router"  # layers with a router have experts; no GGUF file says it


@dataclass(frozen=True)
class Arch:
    """The traits of one architecture, named as GGUF's ``general.architecture`` names it.

    graph: how data flows, a name in ``models.graphs.GRAPHS``.
    rope: which elements of a head turn together: ``norm`` is (2i, 2i+1), ``neox`` (i, i + dims/2).
    activation: of the FFN, a name in ``kernels.activation.ACTIVATIONS``.
    gated: the activation is on a gate; else on the one product before ``ffn_down``.
    norm: ``rms``, ``layer`` for LayerNorm, ``bare`` for LayerNorm without weights, ``bare_rms`` for
        RMS norms without, or as the file ``told`` by whose epsilon it has.
    needs: optional tensors that every sound file of this architecture has.
    lacks: tensors that other architectures need, and this one's files may do without: in all
        layers at once, or with "blk.N." in front in that one alone.
    keys: the values of keys that files lack, mostly llama.cpp's. Who has a pattern of windows must
        have a window, unless it is 0 here: sound files of some sizes leave it out.
    embd_scale: token embeddings are multiplied by sqrt(n_embd).
    nope: layers without a rope: ``global``, those that see everything where the file has a window
        (even if no layer has it), ``sparse``, those of them that have experts, every ``fourth``,
        or all where the file ``told`` so.
    norm_last: q/k norms come behind the rope.
    divide_logits: by ``logit_scale``, where others multiply.
    width_scaled: layer counts of the sizes whose attention scale is 1/sqrt(n_embd / n_head)
        where the others have 1/sqrt(head_dim): Gemma's 27B say so in no key.
    mixer: of layers with keys and values, a name in ``models.mixers.MIXERS``.
    state: of those that have none, and mostly keep a state instead.
    names: tensors that files call otherwise, "blk.N." cut off: their name, and that of the graph;
        or, with a dot behind them, how names of tensors begin.
    nextn: which states the layers read that predict further tokens: those behind the last layer,
        ``plain`` or ``normed``; "": treadle has none of this architecture's.
    pictures: its models read pictures too. treadle computes text alone, of which the three
        numbers of a token's position (M-RoPE) are one and the same.
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
    nextn: Literal["", "plain", "normed"] = ""
    pictures: bool = False
