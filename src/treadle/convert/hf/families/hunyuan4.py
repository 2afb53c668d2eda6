"""Family row of Hunyuan 4 (``hy_v4``): DeepSeek V3.2's layers with several residual streams, and
with sinks and gates in attention.

RoPE rows of queries and keys stay in the checkpoint's order: neighbours are pairs, as in Tencent's
llama.cpp, vLLM and MLX. transformers 5.24 rotates halves of the same rows, which is not what the
published weights were trained with. In a folder whose config.json has ``rope_interleave`` false,
the two halves are the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES
from treadle.convert.hf.families.experts import PACKED_EXPERTS
from treadle.convert.hf.families.streams import STREAM_NAMES, stream_rules
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.limits import LIMIT
from treadle.models.graphs.nextn import STREAM_PARTS
from treadle.models.graphs.streams.independent import MAGNITUDE
from treadle.models.graphs.streams.parts import EPSILON, N_STREAMS
from treadle.models.load import ROPE_KEY

_GLM = DEEPSEEK_FAMILIES["glm_moe_dsa"]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of DeepSeek V3.2's layers, of the streams, and of the limit of SwiGLU."""
    limit = keys.number("swiglu_limit", 0.0, lo=0.0)
    made = {
        **_GLM.more(keys, n_layer),
        N_STREAMS: keys.integer("hc_mult", 4, lo=2),
        MAGNITUDE: f32(keys.number("hc_magnitude", 2.0, lo=0.0)),
        EPSILON: f32(keys.number("hc_eps", 1e-6, lo=0.0, hi=1.0)),
    }
    if limit:
        made[LIMIT] = [f32(limit)] * n_layer
    if not keys.flag("rope_interleave", True):
        made[ROPE_KEY] = "neox"
    for key, expected in (("gating_type", "elementwise"), ("gated_mla", True)):
        if keys.get(key) not in (None, expected):
            keys.refuse(key, f"is {keys.get(key)!r:.60}: treadle supports {expected!r}")
    return made


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that rename the tensors of residual streams and sinks, and those of attention
    and experts. A folder has one of three names for a tensor: that of transformers' classes, that
    of published folders, or the one that transformers 5.24 writes.
    """
    moved = stream_rules(
        "{half}_hc.{part}",
        "hc_{sub}_layer.hc_pre.hc_{part}",
        "hc_pre.hc_{sub}_layer.hc_{part}",
    )
    for part in STREAM_PARTS:
        for name in (f"hc_{part}", f"hc_head_{part}"):  # outside layers
            moved.append(DerivationRule((name,), {f"{part}.weight": same}))
    sinks = {"self_attn.sinks.weight": same}
    return (
        *_GLM.derived(keys),
        *PACKED_EXPERTS,
        *moved,
        DerivationRule(("self_attn.sinks",), sinks),
        DerivationRule(("self_attn.learnable_sink_param",), sinks),
    )


_NAMES: Names = {
    **_GLM.names,
    **{k.replace("gate_proj", "linear_gate"): to for k, to in _GLM.names.items()},
    **dict.fromkeys(("self_attn.gate_proj", "self_attn.linear_gate"), "attn_gate"),
    "self_attn.sinks": "attn_sinks",
    **STREAM_NAMES,
    **{f"hc_head.{part}": f"output_hc_{part}" for part in STREAM_PARTS},
    **{f"hc_pre.hc_head.{part}": f"output_hc_{part}" for part in STREAM_PARTS},
}
HUNYUAN4_FAMILIES = {
    "hy_v4": replace(
        _GLM,
        arch="hy_v4",
        defaults={
            **_GLM.defaults,
            "rms_norm_eps": 1e-5,
            "vocab_size": 120832,
            "max_position_embeddings": 262144,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 768,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.827,
            "index_n_heads": 16,
            "index_topk_freq": 4,
            "swiglu_limit": 10.0,
            "num_key_value_heads": 32,
        },
        names=_NAMES,
        only={},
        derived=_rules,
        more=_keys,
    ),
}
