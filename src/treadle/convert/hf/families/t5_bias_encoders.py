"""Family rows of encoders with relative position biases."""

from __future__ import annotations

from dataclasses import replace

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import BERT, Names
from treadle.files.keys import MetadataReader
from treadle.models.archs import BUCKETS, REACH

_MPNET: Names = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    **{f"attention.attn.{one}": f"attn_{one}" for one in "qkv"},
    "attention.attn.o": "attn_output",
    "attention.LayerNorm": "attn_output_norm",
    **{name: BERT[name] for name in ("intermediate.dense", "output.dense", "output.LayerNorm")},
    "encoder.relative_attention_bias": "blk.0.attn_rel_b",
}

# The first T5, and v1.1, whose FFN has a gate.
_T5: Names = {
    "shared": "token_embd",
    "encoder.embed_tokens": "token_embd",
    "encoder.final_layer_norm": "output_norm",
    "layer.0.layer_norm": "attn_norm",
    **{f"layer.0.SelfAttention.{one}": f"attn_{one}" for one in "qkv"},
    "layer.0.SelfAttention.o": "attn_output",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.1.layer_norm": "ffn_norm",
    "layer.1.DenseReluDense.wi": "ffn_up",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
}
_GATED_GELU = "gated-gelu"


def _gated(keys: MetadataReader) -> Family | None:
    return _GATED if keys.get("feed_forward_proj") == _GATED_GELU else None


_T5_ENCODER = Family(
    "t5encoder",
    {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "n_positions": 512,  # llama.cpp's: distances are unlimited; no such key in transformers
        "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    _T5,
    {
        "hidden_size": "d_model",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "feed_forward_proj",
    },
    activation="relu",
    only={"relative_attention_max_distance": REACH, "is_decoder": False},
    variant=_gated,
    more=lambda keys, n_layer: {BUCKETS: keys.integer("relative_attention_num_buckets")},
)
_GATED = replace(_T5_ENCODER, activation=_GATED_GELU, variant=lambda keys: None)
# Multilingual: mT5, and UMT5, whose layers have biases of their own.
_MANY = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
_MANY_ENCODER = replace(
    _GATED, defaults={**_GATED.defaults, **_MANY, "feed_forward_proj": _GATED_GELU}
)

# model_type -> the one used if config.json says that the model is only the encoder.
ENCODERS_OF = {name: f"{name}encoder" for name in ("t5", "mt5", "umt5")}
DISTANCE: dict[str, Family] = {
    "mpnet": Family(
        "mpnet",
        {
            "vocab_size": 30527,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 512,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 1,
            "tie_word_embeddings": True,
        },
        _MPNET,
        {"rms_norm_eps": "layer_norm_eps"},
        activation="gelu",
        # transformers uses these numbers, whatever config.json says.
        only={"relative_attention_num_buckets": 32, "pad_token_id": 1},
        positions_behind_pad=True,
        in_place=True,
    ),
    "t5encoder": _T5_ENCODER,
    **dict.fromkeys(("mt5encoder", "umt5encoder"), _MANY_ENCODER),
}
