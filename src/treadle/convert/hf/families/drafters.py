"""Family rows of drafters that read hidden states of a target model: EAGLE 3, DFlash 1 and 2,
DSpark.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.deepseek4 import DEEPSEEK4_FAMILIES
from treadle.convert.hf.families.experts import always
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, POST_NORMS, Names
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.hf_drafters import DFLASH, DSPARK_STREAMS, EAGLE3, GEMMA_DSPARK
from treadle.files.metadata import SIZE_MAX, MetadataReader
from treadle.models.drafters.dflash import (
    ANCHORED,
    BLOCK,
    BLOCK_MAX,
    CONV_GROUP,
    CONV_TAPS,
    MASK,
    SELECTOR_RANK,
    SELECTOR_TOP,
    USUAL_BLOCK,
)
from treadle.models.drafters.eagle3 import N_STATES, N_TARGET, NORM_BEFORE, NORM_RESIDUAL
from treadle.models.drafters.target import TARGET_LAYERS
from treadle.models.keys import N_LAYER_MAX

_AUX = "eagle_aux_hidden_state_layer_ids"
_LAYERS = "target_layer_ids"
_DEFAULTS = {
    "vocab_size": None,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}


def _layers(keys: MetadataReader, word: str, more: int) -> list[int]:
    """Return the numbers of the target model's layers whose input the drafter reads: those listed
    in config.json's key ``word``, with ``more`` added to each.
    """
    found = keys.get(word)
    if not isinstance(found, list) or not found:
        keys.fail(word, "is missing" if found is None else f"is {found!r:.60}", "a list of layers")
    for i in found:
        if type(i) is not int or not 0 <= i + more <= N_LAYER_MAX:
            keys.fail(word, f"holds {i!r:.40}", f"layers up to {N_LAYER_MAX}")
    return [i + more for i in found]


# -- EAGLE 3 --------------------------------------------------------------------------------------


def _eagle3_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return EAGLE 3's keys. Without a list of target layers the key is left out: the usual three
    are chosen once the target model is known.
    """
    made: dict[str, Any] = {
        NORM_RESIDUAL: keys.flag(NORM_RESIDUAL, False),
        NORM_BEFORE: keys.flag(NORM_BEFORE, False),
    }
    if keys.get(N_TARGET) is not None:
        made[N_TARGET] = keys.integer(N_TARGET, hi=SIZE_MAX)
    if keys.get(_AUX) is not None:
        made[TARGET_LAYERS] = layers = _layers(keys, _AUX, 0)
        if len(layers) != N_STATES:
            keys.fail(_AUX, f"has {len(layers)} entries", str(N_STATES))
    return made


_EAGLE3: Names = {
    **LLAMA,
    "hidden_norm": "attn_norm_2",
    "fc": "fc",
    "input_norm": "enc.output_norm",
}

# -- DFlash ---------------------------------------------------------------------------------------


def _windowed(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: those that ``layer_types`` lists as
    "sliding_attention". None without that list, or if ``use_sliding_window`` is false.
    """
    kinds = keys.get("layer_types")
    if not keys.flag("use_sliding_window", False) or not isinstance(kinds, list):
        return None
    return [kind == "sliding_attention" for kind in kinds]


def _dflash_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    if keys.text("markov_head_type", "vanilla") != "vanilla":
        keys.refuse("markov_head_type", "treadle supports only 'vanilla'")
    made: dict[str, Any] = {
        BLOCK: keys.integer(BLOCK, USUAL_BLOCK, lo=2, hi=BLOCK_MAX),
        TARGET_LAYERS: _layers(keys, _LAYERS, 1),
        MASK: keys.integer("mask_token_id", lo=0, hi=keys.integer("vocab_size") - 1),
    }
    if keys.get("causal") is not None:
        made["attention.causal"] = keys.flag("causal", False)
    if keys.get(ANCHORED) is not None:
        made[ANCHORED] = keys.flag(ANCHORED, True)
    for key, name in _SCALES.items():
        if keys.get(key) is not None:
            made[name] = f32(keys.number(key, lo=0.0))
    for pair in _OF_DFLASH2:
        if any(keys.get(key) is not None for key in pair):
            made |= {key: keys.integer(key, hi=SIZE_MAX) for key in pair}
    return made


_SCALES = {
    "attention_value_scale": "attention.value_scale",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}
_OF_DFLASH2 = ((CONV_TAPS, CONV_GROUP), (SELECTOR_RANK, SELECTOR_TOP))
_DRAFTED: Names = {
    "fc": "fc",
    "encoder.fc": "fc",
    "hidden_norm": "enc.output_norm",
    "encoder.output_norm_enc": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "confidence_proj": "conf_proj",
    "self_attn.sinks": "attn_sinks",
    "layer_scalar": "layer_output_scale",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_BARE = (  # tensors without a "weight" suffix
    "self_attn.sinks",
    "layer_scalar",
    "attention_conv.base_kernel",
    "mlp_conv.base_kernel",
    "predecessor_codebook",
    "successor_codebook",
)


_rules = always(*(DerivationRule((name,), {f"{name}.weight": same}) for name in _BARE))


def _gemma_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of a drafter with Gemma 4's layers, all without a window."""
    if keys.get("layer_types") not in (None, ["full_attention"] * n_layer):
        keys.refuse("layer_types", "treadle supports only full_attention in this architecture")
    if not keys.flag("attention_k_eq_v", False):
        keys.refuse("attention_k_eq_v", "is false: treadle supports only keys that are values")
    if keys.get("final_logit_softcapping"):
        keys.refuse("final_logit_softcapping", "is not supported in this architecture")
    head_dim = keys.integer("global_head_dim")
    return {
        **_dflash_keys(keys, n_layer),
        "attention.head_count_kv": keys.integer("num_global_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.scale": 1.0,
        "embedding_scale": f32(keys.integer("hidden_size") ** 0.5),
        "hidden_activation": "gelu_pytorch_tanh",
    }


# -- DSpark of DeepSeek V4 ------------------------------------------------------------------------


def _stage_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of a DSpark with DeepSeek V4's layers: those of the layers, and of the
    blocks of tokens that it drafts.
    """
    n_vocab = keys.integer("vocab_size")
    return {
        **_V4.more(keys, n_layer),
        BLOCK: keys.integer("dspark_block_size", lo=2, hi=BLOCK_MAX),
        TARGET_LAYERS: _layers(keys, "dspark_target_layer_ids", 1),
        MASK: keys.integer("dspark_noise_token_id", lo=0, hi=n_vocab - 1),
    }


_V4 = DEEPSEEK4_FAMILIES["deepseek_v4"]
_STAGES: Names = {
    **_V4.names,
    "main_proj": "fc",
    "main_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}

DRAFTER_FAMILIES: dict[str, Family] = {
    EAGLE3: Family(
        "eagle3",
        _DEFAULTS,
        _EAGLE3,
        drafts=True,
        only={"num_hidden_layers": 1},
        more=_eagle3_keys,
    ),
    DFLASH: Family(
        "dflash",
        _DEFAULTS,
        {**LLAMA, **_DRAFTED},
        drafts=True,
        only={"rope_is_neox_style": True},
        windowed=_windowed,
        derived=_rules,
        more=_dflash_keys,
    ),
    GEMMA_DSPARK: Family(
        "dflash",
        {
            **_DEFAULTS,
            "rope_theta": 1e6,
            "partial_rotary_factor": None,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                }
            },
        },
        {**POST_NORMS, **_DRAFTED},
        words={"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
        activation="gelu_pytorch_tanh",
        drafts=True,
        only={"attention_bias": False, "enable_moe_block": False},
        derived=_rules,
        more=_gemma_keys,
    ),
    DSPARK_STREAMS: replace(_V4, arch="dflash", names=_STAGES, drafts=True, more=_stage_keys),
    "muse_glimmer_assistant": Family(
        "dflash",
        {
            "vocab_size": 202048,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 2048,
            "block_size": 16,
            "mask_token_id": 201818,
            _LAYERS: [1, 13, 25, 37, 49],
        },
        {**LLAMA, **_DRAFTED},
        drafts=True,
        windowed=lambda keys, n_layer: [True] * n_layer,
        more=_dflash_keys,
    ),
}
