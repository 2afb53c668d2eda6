"""Family rows of Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import wide_heads
from treadle.convert.hf.tensor_names import POST_NORMS, Names
from treadle.convert.hf.windows import all_but_every
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import N_OWN, WINDOW
from treadle.models.graphs.assistant import CENTROIDS, N_TARGET, N_USED, USUAL_USED
from treadle.models.graphs.gemma4 import N_SHARED
from treadle.models.keys import NEXTN


def _windowed(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all but every sixth and the last."""
    kinds = keys.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[-1] != "full_attention":
        keys.refuse(
            "layer_types",
            "the last layer has a window, which is not supported in this architecture",
        )
    flags = all_but_every(6)(keys, n_layer)
    return [*flags[:-1], False] if flags else flags


def _is_wide(keys: MetadataReader, n_layer: int) -> list[bool]:
    kinds = keys.get("layer_types")
    if isinstance(kinds, list):
        return [kind == "full_attention" for kind in kinds]
    return [not flag for flag in _windowed(keys, n_layer) or ()]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    rope = keys.within("rope_parameters")
    full = rope and rope.within("full_attention")
    if full is None or full.get("rope_type") != "proportional":
        keys.refuse(
            "rope_parameters",
            "treadle supports only rope_type proportional in full_attention layers",
        )
    wide, wide_kv = wide_heads(keys)
    narrow = keys.integer("head_dim")
    n_kv = keys.integer("num_key_value_heads")
    n_shared = keys.integer("num_kv_shared_layers", 0, lo=0, hi=n_layer)
    result: dict[str, Any] = {
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        N_SHARED: n_shared,
        N_OWN: keys.integer("hidden_size_per_layer_input", lo=0),
    }
    for of in ("key", "value"):
        result |= {f"attention.{of}_length": wide, f"attention.{of}_length_swa": narrow}
    if wide_kv != n_kv:
        flags = _is_wide(keys, n_layer)
        result["attention.head_count_kv"] = [wide_kv if flag else n_kv for flag in flags]
    if keys.flag("use_double_wide_mlp", False) and n_shared:
        n_ff = keys.integer("intermediate_size")
        result["feed_forward_length"] = [n_ff] * (n_layer - n_shared) + [2 * n_ff] * n_shared
    return result


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that rename tensors without a "weight" suffix.

    Other rules drop keys and values of layers that reuse the KV cache of earlier ones: some files
    have these tensors, but nothing reads them.
    """
    n_layer = keys.integer("num_hidden_layers")
    first = n_layer - keys.integer("num_kv_shared_layers", 0, lo=0, hi=n_layer)
    unused = ("k_proj", "v_proj", "k_norm")
    return (
        DerivationRule(("layer_scalar",), {"layer_scalar.weight": same}),
        DerivationRule(("router.scale",), {"router.scale.weight": same}),
        DerivationRule(("router.per_expert_scale",), {"experts.down.scale.weight": same}),
        DerivationRule(("experts.gate_up_proj",), {"experts.gate_up.weight": same}),
        DerivationRule(("experts.down_proj",), {"experts.down.weight": same}),
        *(DerivationRule((f"self_attn.{one}.weight",), {}, first_layer=first) for one in unused),
    )


_NAMES: Names = {
    **POST_NORMS,
    "layer_scalar": "layer_output_scale",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp_norm",
    "experts.gate_up": "ffn_gate_up_exps",
    "experts.down": "ffn_down_exps",
    "experts.down.scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}

# -- the rows -------------------------------------------------------------------------------------

GEMMA4_FAMILIES: dict[str, Family] = {
    "gemma4_text": Family(
        "gemma4",
        {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}
            },
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "tie_word_embeddings": True,
            "partial_rotary_factor": None,
            "final_logit_softcapping": None,
        },
        _NAMES,
        activation="gelu_pytorch_tanh",
        windowed=_windowed,
        own_local_rope=True,
        only={"attention_bias": False},
        experts=True,
        derived=_rules,
        more=_keys,
    ),
}


def _assistant_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of an assistant (Gemma 4's drafter): llama.cpp counts all its layers as
    MTP layers.
    """
    return {**_keys(keys, n_layer), NEXTN: n_layer}


def _target(whole: MetadataReader) -> dict[str, Any]:
    made = {N_TARGET: whole.integer("backbone_hidden_size")}
    if whole.flag("use_ordered_embeddings", False):
        made[N_USED] = whole.integer("centroid_intermediate_top_k", USUAL_USED)
    return made


# A drafter: none of its layers has keys and values.
ASSISTANT = replace(
    GEMMA4_FAMILIES["gemma4_text"],
    arch="gemma4-assistant",
    names={
        **_NAMES,
        "pre_projection": "nextn.pre_projection",
        "post_projection": "nextn.post_projection",
        "masked_embedding.centroids": CENTROIDS.removesuffix(".weight"),
    },
    drafts=True,
    only={"attention_bias": False, "enable_moe_block": False, "use_double_wide_mlp": False},
    more=_assistant_keys,
    beside=_target,
)


def _variant(keys: MetadataReader) -> Family | None:
    n_shared = keys.get("num_kv_shared_layers")
    return ASSISTANT if n_shared and n_shared == keys.get("num_hidden_layers") else None


GEMMA4_FAMILIES["gemma4_text"] = replace(GEMMA4_FAMILIES["gemma4_text"], variant=_variant)
_UNIFIED = {
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}

GEMMA4_FAMILIES |= {
    "gemma4_unified_text": replace(
        GEMMA4_FAMILIES["gemma4_text"],
        defaults={**GEMMA4_FAMILIES["gemma4_text"].defaults, **_UNIFIED},
    ),
}


def _embedding_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of EmbeddingGemma 2. ``sliding_window`` is a radius; GGUF's window spans
    both sides, so it is twice as large.
    """
    wide, wide_kv = wide_heads(keys)
    narrow = keys.integer("head_dim")
    n_kv = keys.integer("num_key_value_heads")
    flags = _is_wide(keys, n_layer)
    n_embd, width = (keys.integer(word) for word in ("hidden_size", "embedding_dim"))
    result: dict[str, Any] = {
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        "attention.head_count_kv": [wide_kv if flag else n_kv for flag in flags],
        N_OWN: keys.integer("hidden_size_per_layer_input"),
        WINDOW: 2 * keys.integer("sliding_window", hi=POSITION_MAX // 2),
        "dense_2_feat_in": n_embd,
        "dense_2_feat_out": width,
    }
    for of in ("key", "value"):
        result |= {f"attention.{of}_length": wide, f"attention.{of}_length_swa": narrow}
    return result


def _unscaled(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (DerivationRule(("layer_scalar",), {"layer_scalar.weight": same}),)


EMBEDDING_GEMMA2_FAMILIES: dict[str, Family] = {
    "embedding_gemma2_text": Family(
        "embedding-gemma2",
        {
            "vocab_size": 262144,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,  # the number of heads of wide layers is another one
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 512,
            "embedding_dim": 768,
            "tie_word_embeddings": True,
        },
        {
            **POST_NORMS,
            "layer_scalar": "layer_output_scale",
            "ple.per_layer_model_projection": "per_layer_model_proj",
            "ple.per_layer_projection_norm": "per_layer_proj_norm",
            "ple_block.per_layer_input_gate": "inp_gate",
            "ple_block.per_layer_projection": "proj",
            "ple_block.post_per_layer_input_norm": "post_norm",
            "embedding_projection": "dense_2",
        },
        activation="gelu_pytorch_tanh",
        windowed=_windowed,
        own_local_rope=True,
        only={"attention_bias": False},
        derived=_unscaled,
        more=_embedding_keys,
    ),
}

# Rows that ``variant`` chooses.
GEMMA4_VARIANTS = (ASSISTANT,)
