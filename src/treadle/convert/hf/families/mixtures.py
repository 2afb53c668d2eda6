"""Family rows of models with experts, and the keys of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import GPT_OSS_ROPE, f32
from treadle.convert.hf.tensor_names import (
    HUNYUAN_EXPERTS,
    LLAMA,
    LLAMA_EXPERTS,
    Names,
    experts_123,
)
from treadle.convert.hf.windows import (
    all_but_every,
    every_layer,
    every_layer_if_used,
    every_other_lower,
)
from treadle.convert.sources.derived_tensors import (
    MXFP4,
    DerivationRule,
    Rows,
    flat,
    lower,
    mxfp4_blocks,
    same,
    turned,
    upper,
)
from treadle.files.keys import MetadataReader
from treadle.models.archs import ARCHS, EXPERTS_GATING, EXPERTS_NORM
from treadle.models.graphs.experts import EVERY_N

# GGUF's keys, and the names in families.
_COUNTS = {
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "moe_top_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
    ),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    EVERY_N: (EVERY_N,),
}
_OF_FEW = ("n_group", "topk_group")  # transformers ignores them elsewhere


def expert_keys(keys: MetadataReader, family: Family, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of a family's experts."""
    result: dict[str, Any] = {name: _count(keys, word) for name, word in expert_words(keys).items()}
    if not result.get("expert_count"):  # no experts in this model
        return {}
    usual = dict(ARCHS[family.arch].keys)
    if EXPERTS_GATING in usual:
        result[EXPERTS_GATING] = int(usual[EXPERTS_GATING])
    if "norm_topk_prob" in keys.defaults:
        result[EXPERTS_NORM] = keys.flag("norm_topk_prob", False)
    scaled = "routed_scaling_factor" in keys.defaults
    if scaled and keys.get("routed_scaling_factor") not in (None, False):
        result["expert_weights_scale"] = f32(keys.number("routed_scaling_factor", lo=0.0))
    last = keys.integer("moe_layer_end_index", -1, lo=-1)
    if last not in (-1, n_layer - 1):
        keys.refuse(
            "moe_layer_end_index", f"is {last}: treadle supports experts only up to the last layer"
        )
    return result


def expert_words(keys: MetadataReader) -> dict[str, str]:
    """Return config.json's names of GGUF's expert keys, for those that it has."""
    found = {}
    for name, words in _COUNTS.items():
        own = [word for word in words if word not in _OF_FEW or word in keys.defaults]
        said = {word: keys.values.get(word) for word in own}  # false is Hunyuan's
        given = [word for word, value in said.items() if value is not None and value is not False]
        given += [word for word in own if keys.defaults.get(word) is not None]
        found[name] = next(iter(given), "")
    return {name: word for name, word in found.items() if word}


def _count(keys: MetadataReader, word: str) -> int:
    """Return a count; Hunyuan gives one per layer."""
    given = keys.get(word)
    if not isinstance(given, list) or not given:
        return keys.integer(word, lo=0)
    if any(each != given[0] for each in given):
        keys.refuse(word, "differs from layer to layer: treadle supports one value for all")
    return MetadataReader({word: given[0]}, keys.path, prefix=keys.prefix).integer(word, lo=0)


# -- tensors that GGUF stores differently -----------------------------------------------------


def _even(rows: Rows) -> Rows:
    return rows[..., ::2]


def _odd(rows: Rows) -> Rows:
    return rows[..., 1::2]


def _gate(rows: Rows) -> Rows:
    return turned(_even(rows))


def _up(rows: Rows) -> Rows:
    return turned(_odd(rows))


def _gate_blocks(codes: Rows, scales: Rows) -> Rows:
    return mxfp4_blocks(codes[:, ::2], scales[:, ::2])


def _up_blocks(codes: Rows, scales: Rows) -> Rows:
    return mxfp4_blocks(codes[:, 1::2], scales[:, 1::2])


def gate_and_up(stem: str, gate: str, up: str) -> DerivationRule:
    """Return Granite's rule: both in one matrix."""
    gives = {f"{gate}.weight": upper, f"{up}.weight": lower}
    return DerivationRule((f"{stem}.weight",), gives, side="B")


def scores(name: str, bias: str) -> DerivationRule:
    """Return the rule for the bias of router scores."""
    return DerivationRule((name,), {f"{bias}.bias": flat})


GRANITE_EXPERTS = gate_and_up(
    "block_sparse_moe.input_linear", "block_sparse_moe.gate", "block_sparse_moe.up"
)
_AT = "mlp.experts."
_GATE_UP = f"{_AT}gate_up_proj"
# All experts in one tensor, as in transformers' memory and in some checkpoints.
PACKED_EXPERTS = (
    DerivationRule((_GATE_UP,), {f"{_AT}gate_proj.weight": upper, f"{_AT}up_proj.weight": lower}),
    DerivationRule((f"{_AT}down_proj",), {f"{_AT}down_proj.weight": same}),
)
_GPT_OSS = (
    DerivationRule(("self_attn.sinks",), {"self_attn.sinks.weight": same}),
    DerivationRule(
        (f"{_GATE_UP}_bias",),
        {f"{_AT}gate_proj.bias": _even, f"{_AT}up_proj.bias": _odd},
    ),
    DerivationRule((f"{_AT}down_proj_bias",), {f"{_AT}down_proj.bias": same}),
    DerivationRule((_GATE_UP,), {f"{_AT}gate_proj.weight": _gate, f"{_AT}up_proj.weight": _up}),
    DerivationRule((f"{_AT}down_proj",), {f"{_AT}down_proj.weight": turned}),
    DerivationRule(
        (f"{_GATE_UP}_blocks", f"{_GATE_UP}_scales"),
        {f"{_AT}gate_proj.weight": _gate_blocks, f"{_AT}up_proj.weight": _up_blocks},
        dtype=MXFP4,
    ),
    DerivationRule(
        (f"{_AT}down_proj_blocks", f"{_AT}down_proj_scales"),
        {f"{_AT}down_proj.weight": mxfp4_blocks},
        dtype=MXFP4,
    ),
)


def _always(*rules: DerivationRule) -> Any:
    def made(keys: MetadataReader) -> Sequence[DerivationRule]:
        return rules

    return made


def _hunyuan_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return widths that llama.cpp requires: without its own key an expert's is that of the FFN.
    Expert weights are normalised and not scaled, whatever other keys say.
    """
    n_ff = keys.integer("intermediate_size")
    own = "moe_intermediate_size"
    return {
        "expert_feed_forward_length": n_ff if keys.get(own) is None else _count(keys, own),
        "expert_shared_feed_forward_length": n_ff,
        EXPERTS_NORM: True,
        "expert_weights_scale": None,
    }


GRANITE: Names = {
    **LLAMA,
    **dict.fromkeys(("block_sparse_moe.router.layer", "block_sparse_moe.router"), "ffn_gate_inp"),
    "block_sparse_moe.gate": "ffn_gate_exps",
    "block_sparse_moe.up": "ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}

# -- the rows ---------------------------------------------------------------------------------

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_COMMON_5 = {**_COMMON, "rms_norm_eps": 1e-5}
GRANITE_DEFAULTS = {
    **_COMMON,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_EVERY = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # all layers have experts
_QWEN = {
    **_COMMON,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "norm_topk_prob": False,
}

MIXTURES: dict[str, Family] = {
    "qwen3_moe": Family(
        "qwen3moe",
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        LLAMA_EXPERTS,
        windowed=every_layer_if_used,
        only=_EVERY,
        experts=True,
    ),
    "mixtral": Family(
        "llama",
        {
            **_COMMON_5,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        windowed=every_layer,
        experts=True,
    ),
    "qwen2_moe": Family(
        "qwen2moe",
        {
            **_QWEN,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        LLAMA_EXPERTS,
        windowed=every_other_lower,
        only=_EVERY,
        experts=True,
    ),
    "olmoe": Family(
        "olmoe",
        {
            **_COMMON_5,
            "vocab_size": 50304,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        LLAMA_EXPERTS,
        only={"clip_qkv": None},
        experts=True,
    ),
    "granitemoe": Family(
        "granitemoe",
        GRANITE_DEFAULTS,
        GRANITE,
        copied=GRANITE_SCALES,
        experts=True,
        derived=_always(GRANITE_EXPERTS),
    ),
    "ernie4_5_moe": Family(
        "ernie4_5-moe",
        {
            **_COMMON_5,
            "vocab_size": 103424,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        LLAMA_EXPERTS,
        paired=True,
        only={"moe_norm_min": 1e-12},  # minimum of the weights' sum, which is never smaller
        experts=True,
        derived=_always(scores("mlp.moe_statics.e_score_correction_bias", "mlp.score")),
    ),
    "glm4_moe": Family(
        "glm4moe",
        {
            **_COMMON_5,
            "vocab_size": 151552,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        {**LLAMA_EXPERTS, "post_attention_layernorm": "post_attention_norm"},
        experts=True,
        derived=_always(scores("mlp.gate.e_score_correction_bias", "mlp.score")),
        extra_layers="num_nextn_predict_layers",
    ),
    "minimax_m2": Family(
        "minimax-m2",
        {
            **_COMMON,
            "vocab_size": 200064,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": None,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        experts=True,
        derived=_always(
            scores("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.score")
        ),
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan-moe",
        {
            **_COMMON_5,
            "vocab_size": 290943,
            "max_position_embeddings": 2048,
            "num_experts": 1,
            "moe_topk": 1,
        },
        HUNYUAN_EXPERTS,
        only={"use_cla": False, "use_mla": False, "moe_layer_num_skipped": 0},
        experts=True,
        more=_hunyuan_keys,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        {
            **_COMMON_5,
            "vocab_size": 201088,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rope_parameters": GPT_OSS_ROPE,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        {
            **LLAMA_EXPERTS,
            "mlp.router": "ffn_gate_inp",
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
        },
        windowed=all_but_every(2),
        only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        experts=True,
        derived=_always(*_GPT_OSS),
        packed="mxfp4",
    ),
}
