"""Families of encoders: further rows of ``hf_families``."""

from __future__ import annotations

from dataclasses import replace

from treadle.convert.hf_family import Family, Windowed
from treadle.convert.hf_names import (
    BERT,
    BERT_SCORE,
    JINA_BERT,
    MODERN_BERT,
    MODERN_BERT_SCORE,
    NOMIC_BERT,
    ROBERTA_SCORE,
)
from treadle.files.keys import Keys


def _all_but_first_of(keys: Keys, n_layer: int) -> Windowed:
    period = keys.integer("global_attn_every_n_layers", 3)
    return [i % period > 0 for i in range(n_layer)]


_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}
_EPS = {"rms_norm_eps": "layer_norm_eps"}
# "absolute" is every BERT's; "relative_key" and others add to the scores.
_ONLY = {"position_embedding_type": "absolute", "is_decoder": False}
_PLAIN = Family("bert", _BERT, BERT, _EPS, activation="gelu", only=_ONLY)
_ROBERTA = replace(_PLAIN, score_names=ROBERTA_SCORE, positions_behind_pad=True)

# ALiBi in place of positions; its config.json calls itself a BERT.
_JINA = replace(
    _PLAIN,
    arch="jina-bert-v2",
    names=JINA_BERT,
    only={**_ONLY, "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
)


def _jina(keys: Keys) -> Family | None:
    return _JINA if keys.get("position_embedding_type") == "alibi" else None


ENCODERS: dict[str, Family] = {
    "bert": replace(_PLAIN, score_names=BERT_SCORE, variant=_jina),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "nomic_bert": Family(
        "nomic-bert",
        {**_BERT, "rope_theta": 1000.0, "max_position_embeddings": 2048, "vocab_size": 30528},
        NOMIC_BERT,
        _EPS,
        {
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_emb_fraction",
            "hidden_act": "activation_function",
        },
        only={"prenorm": False, "num_experts": 0, "use_rms_norm": False, "causal": False},
    ),
    "modernbert": Family(
        "modern-bert",
        {
            "vocab_size": 50368,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        MODERN_BERT,
        {
            "rms_norm_eps": "norm_eps",
            "rope_theta": "global_rope_theta",
            "rope_local_base_freq": "local_rope_theta",
            "sliding_window": "local_attention",
        },
        activation="gelu",
        windowed=_all_but_first_of,
        own_local_rope=True,
        score_names=MODERN_BERT_SCORE,
    ),
    "eurobert": Family(
        "eurobert",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}
