"""Family rows of models of 2022 and 2023, each with its own key names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.family import GELU_TANH, Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import GPT2, LLAMA, Names
from treadle.files.keys import MetadataReader
from treadle.models.archs import ALIBI

PHI: Names = {
    **LLAMA,
    "final_layernorm": "output_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
FALCON: Names = {
    "word_embeddings": "token_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
BLOOM: Names = {
    **FALCON,
    "word_embeddings_layernorm": "token_embd_norm",
    "post_attention_layernorm": "ffn_norm",
}
MPT: Names = {
    "wte": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "norm_1": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.q_ln": "attn_q_norm",
    "attn.k_ln": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
GPT_WORDS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_KV_HEADS = "num_key_value_heads"


def _falcon(keys: MetadataReader) -> Family:
    """Return 7B, whose heads share one key head whatever its count says, or 40B."""
    if keys.get("new_decoder_architecture"):
        return _FALCON_40B
    return _FALCON_7B if keys.flag("multi_query", True) else _FALCON_40B


_FALCON = Family(
    "falcon",
    {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    FALCON,
    {
        "rms_norm_eps": "layer_norm_epsilon",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
    },
    activation="gelu",
    only={"alibi": False, "bias": False, "parallel_attn": True},
    by_head=True,
    n_ff_default=4,
    variant=_falcon,
)
_FALCON_7B = replace(_FALCON, defaults={**_FALCON.defaults, _KV_HEADS: 1})
_FALCON_40B = replace(_FALCON, words={**_FALCON.words, _KV_HEADS: "num_kv_heads"})


_GPT2 = Family(
    "gpt2",
    {
        "tie_word_embeddings": True,
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
    },
    GPT2,
    GPT_WORDS,
    activation="gelu_new",
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    transposed=True,
    n_ff_default=4,
)


def _starcoder(keys: MetadataReader) -> Family | None:
    if not keys.flag("multi_query", True):
        return None
    return replace(_STARCODER, defaults={**_STARCODER.defaults, _KV_HEADS: 1})


_STARCODER = replace(
    _GPT2,
    arch="starcoder",
    activation=GELU_TANH,
    only={"scale_attn_weights": True, "add_cross_attention": False},
    by_head=True,
    transposed=False,
    variant=_starcoder,
)


def _olmo_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return _clamp(keys.number("clip_qkv", 0.0, lo=0.0))


def _clamp(limit: float) -> dict[str, Any]:
    return {"attention.clamp_kqv": f32(limit)} if limit else {}


def _bloom(keys: MetadataReader) -> Family:
    """Return the family with the key names of its first files or of later ones."""
    words = {
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    own = {word: older for word, older in words.items() if keys.get(word) is None}
    return replace(_BLOOM, words={**_BLOOM.words, **own})


_BLOOM = Family(
    "bloom",
    {
        "tie_word_embeddings": True,
        "vocab_size": 250880,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
    },
    BLOOM,
    {
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
        "intermediate_size": "n_inner",
    },
    activation=GELU_TANH,
    only={"apply_residual_connection_post_layernorm": False},
    by_head=True,
    n_ff_default=4,
    variant=_bloom,
)
# Required values in attn_config, if given: treadle, and mostly transformers, supports no others.
_MPT_ONLY = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "softmax_scale": None,
}


def _mpt_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    attention = keys.within("attn_config") or MetadataReader({}, keys.path, prefix="attn_config.")
    for key, value in _MPT_ONLY.items():
        if (given := attention.get(key)) is not None and given != value:
            attention.refuse(
                key, f"is {given!r:.60}: treadle supports only {value!r} in this architecture"
            )
    if "layernorm" not in keys.text("norm_type", "layernorm"):
        keys.refuse(
            "norm_type", f"is {keys.get('norm_type')!r:.60}: treadle supports only layernorm"
        )
    bias = attention.number("alibi_bias_max", 8.0, lo=0.0, hi=64.0)
    return {ALIBI: f32(bias), **_clamp(attention.number("clip_qkv", 0.0, lo=0.0))}


CLASSICS: dict[str, Family] = {
    "gpt2": _GPT2,
    "phi": Family(
        "phi2",
        {
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
        PHI,
        {"rms_norm_eps": "layer_norm_eps"},
        activation="gelu_new",
        only={"qk_layernorm": False},
    ),
    "falcon": _FALCON,
    "gpt_bigcode": _STARCODER,
    "olmo": Family(
        "olmo",
        {
            "rms_norm_eps": 1e-5,  # no key gives it
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
        more=_olmo_keys,
    ),
    "bloom": _BLOOM,
    "mpt": Family(
        "mpt",
        {
            "tie_word_embeddings": True,
            "vocab_size": 50368,
            "d_model": 2048,
            "n_layers": 24,
            "n_heads": 16,
            "max_seq_len": 2048,
            "layer_norm_epsilon": 1e-5,
        },
        MPT,
        {
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": "no key says it",
        },
        activation="gelu",
        only={"expansion_ratio": 4, "logit_scale": None},
        n_ff_default=4,
        more=_mpt_keys,
    ),
    # Not in transformers: it is a StableLM with RoPE on whole heads.
    "orion": Family(
        "orion",
        {
            "rms_norm_eps": 1e-5,  # of LayerNorm, despite the key's name
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 84608,
            "max_position_embeddings": 4096,
        },
    ),
}
CLASSIC_VARIANTS = (_FALCON_7B, _FALCON_40B)
