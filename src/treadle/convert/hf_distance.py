"""Families of encoders whose scores have numbers added by distance: further rows of
``hf_families``.
"""

from __future__ import annotations

from treadle.convert.hf_family import Family
from treadle.convert.hf_names import BERT, Names

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
        # transformers takes these numbers whatever config.json says.
        only={"relative_attention_num_buckets": 32, "pad_token_id": 1},
        positions_behind_pad=True,
        in_place=True,
    ),
}
