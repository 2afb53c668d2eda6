"""Family rows of encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.tensor_names import (
    BERT,
    BERT_SCORE,
    JINA_BERT,
    MODERN_BERT,
    MODERN_BERT_SCORE,
    NOMIC_BERT,
    NOMIC_BERT_EXPERTS,
    ROBERTA_SCORE,
)
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, lower, same, turned, upper
from treadle.files.keys import POSITION_MAX, MetadataReader
from treadle.models.graphs.experts import EVERY_N
from treadle.models.rope import DYNAMIC


def _all_but_first_of(keys: MetadataReader, n_layer: int) -> Windowed:
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
# Every BERT has "absolute"; "relative_key" and others add to attention scores.
_ONLY = {"position_embedding_type": "absolute", "is_decoder": False}
_PLAIN = Family("bert", _BERT, BERT, _EPS, activation="gelu", only=_ONLY)
_ROBERTA = replace(_PLAIN, score_names=ROBERTA_SCORE, positions_behind_pad=True)

# Only for jina-v2-code, whose gate comes second: in a fused matrix llama.cpp expects it first.
_UP_FIRST = DerivationRule(
    ("mlp.up_gated_layer.weight",),
    {"mlp.up_layer.weight": upper, "mlp.gate_layer.weight": lower},
    side="B",
)
# ALiBi instead of learned positions; its config.json claims to be BERT.
_JINA = replace(
    _PLAIN,
    arch="jina-bert-v2",
    names=JINA_BERT,
    only={**_ONLY, "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    derived=lambda keys: (_UP_FIRST,),
)


def _jina(keys: MetadataReader) -> Family | None:
    return _JINA if keys.get("position_embedding_type") == "alibi" else None


def _nomic_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys: with a scaling factor, its first code changes RoPE for texts longer than
    those of training.
    """
    if not keys.number("rotary_scaling_factor", 0.0, lo=0.0):
        return {}
    return {DYNAMIC: True, "context_length": keys.integer("max_trained_positions", hi=POSITION_MAX)}


_NOMIC = Family(
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
    only=dict.fromkeys(
        ("prenorm", "use_rms_norm", "causal", "rotary_emb_interleaved", "rotary_head_dim"), False
    )
    | {"rotary_emb_scale_base": None},
    more=_nomic_keys,
)


def _nomic_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for experts whose rows are concatenated, with second matrices [in, out]."""
    n = keys.integer("num_experts")

    def each(rows: Rows) -> Rows:
        return rows.reshape(n, -1, rows.shape[-1])

    return (
        DerivationRule(("mlp.experts.mlp.w1",), {"mlp.experts.w1.weight": each}),
        DerivationRule(
            ("mlp.experts.mlp.w2",), {"mlp.experts.w2.weight": lambda rows: turned(each(rows))}
        ),
        DerivationRule(("mlp.experts.bias",), {"mlp.experts_bias.weight": same}),
    )


# Every other layer has experts; the keys are those of its first code, as transformers lacks it.
_NOMIC_EXPERTS = replace(
    _NOMIC,
    arch="nomic-bert-moe",
    defaults={**_NOMIC.defaults, "moe_top_k": 1, EVERY_N: 1},
    names=NOMIC_BERT_EXPERTS,
    activation="gelu",
    only={
        **_NOMIC.only,
        "moe_normalize_expert_weights": False,
        "expert_choice_router": False,
        "num_shared_experts": 0,
    },
    experts=True,
    derived=_nomic_rules,
)


def _nomic(keys: MetadataReader) -> Family | None:
    return _NOMIC_EXPERTS if keys.get("num_experts") else None


ENCODERS: dict[str, Family] = {
    "bert": replace(_PLAIN, score_names=BERT_SCORE, variant=_jina),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "nomic_bert": replace(_NOMIC, variant=_nomic),
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
        only={"classifier_activation": "gelu"},
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
