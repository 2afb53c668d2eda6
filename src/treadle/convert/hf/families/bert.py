"""Family rows of encoders: BERT and its lineage, Nomic, Jina, ModernBERT, NeoBERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import (
    BERT,
    BERT_SCORE,
    JINA_BERT,
    LATE_BERT,
    MODERN_BERT,
    MODERN_BERT_SCORE,
    NOMIC_BERT,
    NOMIC_BERT_EXPERTS,
    ROBERTA_SCORE,
    Names,
)
from treadle.convert.sources.derived_tensors import (
    DerivationRule,
    Rows,
    lower,
    same,
    transposed,
    upper,
)
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.graphs.encoder import N_TYPES
from treadle.models.graphs.experts import EVERY_N
from treadle.models.rope import DYNAMIC
from treadle.models.sentence import HEAD_ACTIVATION

# -- BERT, Jina 2, Nomic, ModernBERT --------------------------------------------------------------


def _windowed_layers(keys: MetadataReader, n_layer: int) -> Windowed:
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
    """Return the keys of dynamic RoPE scaling and of the context length, if
    ``rotary_scaling_factor`` is set; else {}. Nomic's first version scales RoPE only in texts
    longer than ``max_trained_positions``, which becomes the context length.
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
    """Return rules that split tensors with the rows of all experts, [n * n_ff, n_embd], by expert,
    transposing the second matrices, and that rename the experts' bias.
    """
    n = keys.integer("num_experts")

    def each(rows: Rows) -> Rows:
        return rows.reshape(n, -1, rows.shape[-1])

    return (
        DerivationRule(("mlp.experts.mlp.w1",), {"mlp.experts.w1.weight": each}),
        DerivationRule(
            ("mlp.experts.mlp.w2",), {"mlp.experts.w2.weight": lambda rows: transposed(each(rows))}
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


# -- the rows -------------------------------------------------------------------------------------

BERT_FAMILIES: dict[str, Family] = {
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
        windowed=_windowed_layers,
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

# -- DistilBERT, Jina 3, NeoBERT, GTE, ELECTRA ----------------------------------------------------

_UNSCORED = replace(BERT_FAMILIES["bert"], score_names={}, variant=lambda keys: None)

_DISTILBERT: Names = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
# Names in XLM-RoBERTa's second code (flash attention), used by Jina's models.
_FLASH: Names = {
    "emb_ln": "token_embd_norm",
    "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
_JINA3: Names = {
    **BERT,
    **_FLASH,
    **LATE_BERT,
}
_XLM_ROBERTA = BERT_FAMILIES["xlm-roberta"]
# RoPE instead of learned positions; their number still includes two that no token has.
_JINA3_FAMILY = replace(
    _XLM_ROBERTA,
    arch="jina-bert-v3",
    defaults={
        **_UNSCORED.defaults,
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "layer_norm_eps": 1e-5,
        "rope_theta": 20000.0,
    },
    names=_JINA3,
    only={"is_decoder": False},
)
# Jina's published folder; its task adapters are opened apart, as LoRA adapters.
_JINA_TASKS = replace(
    _JINA3_FAMILY,
    words={**_JINA3_FAMILY.words, "rope_theta": "rotary_emb_base"},
    defaults={**_JINA3_FAMILY.defaults, "rotary_emb_base": 10000.0},
)


def _xlm_roberta(keys: MetadataReader) -> Family | None:
    return _JINA_TASKS if keys.get("position_embedding_type") == "rotary" else None


_FIRST_TOKEN = 2  # GGUF's number of first-token pooling
_NEO: Names = {
    "encoder": "token_embd",
    "layer_norm": "output_norm",
    "attention_norm": "attn_norm",
    "qkv": "attn_qkv",
    "wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.w12": "ffn_up",  # fused with its gate, which comes first
    "ffn.w3": "ffn_down",
}


def _neo_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of the FFN's width, two thirds of ``intermediate_size`` rounded up to a
    multiple of 8, and of pooling, by the first token.
    """
    n_ff = int(2 * keys.integer("intermediate_size") / 3)
    return {"feed_forward_length": 8 * -(-n_ff // 8), "pooling_type": _FIRST_TOKEN}


_GTE: Names = {
    **BERT,
    "attention.qkv_proj": "attn_qkv",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attn_ln": "attn_output_norm",
    "mlp_ln": "layer_output_norm",
    **LATE_BERT,
}
_GTE_UP_FIRST = DerivationRule(
    ("mlp.up_gate_proj.weight",),
    {"mlp.up_proj.weight": upper, "mlp.gate_proj.weight": lower},
    side="B",
)


def _gte_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of the number of token types, 1, for models without a table of them
    (gte-base-en); else {}.
    """
    return {} if keys.integer("type_vocab_size", lo=0) else {N_TYPES: 1}


_GTE_FAMILY = Family(
    "gte",
    {
        **_UNSCORED.defaults,
        "vocab_size": 250048,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "rope_theta": 160000.0,
        "rope_scaling": None,
    },
    _GTE,
    _UNSCORED.words,
    activation="gelu",
    only={
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    },
    derived=lambda keys: (_GTE_UP_FIRST,),
    score_names=BERT_SCORE,
    more=_gte_keys,
)


def _distilbert_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys that DistilBERT's code fixes: epsilon 1e-12, no token types, and ReLU in
    place of tanh in the scoring head.
    """
    scores = {HEAD_ACTIVATION: "relu"} if _scores(keys) else {}
    return {"attention.layer_norm_epsilon": f32(1e-12), N_TYPES: 1, **scores}


def _electra_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of the scoring head's activation, {} without that head. Raises
    UnsupportedError for small models, whose narrower embeddings are projected by a matrix that
    GGUF's BERT lacks.
    """
    width = keys.integer("embedding_size")
    if width != (n_embd := keys.integer("hidden_size")):
        what = f"is {width} and hidden_size is {n_embd}: GGUF has no projection between them"
        keys.refuse("embedding_size", what)
    return {HEAD_ACTIVATION: "gelu_erf"} if _scores(keys) else {}


def _scores(keys: MetadataReader) -> bool:
    kinds = keys.get("architectures") or []
    return any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


# -- relative position biases: MPNet --------------------------------------------------------------

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

BERT_FAMILIES |= {
    "xlm-roberta": replace(
        _XLM_ROBERTA, names={**_XLM_ROBERTA.names, **_FLASH}, variant=_xlm_roberta
    ),
    "jina_embeddings_v3": _JINA3_FAMILY,
    "gte": _GTE_FAMILY,
    # Alibaba's own code.
    "new": replace(
        _GTE_FAMILY,
        defaults={
            **_GTE_FAMILY.defaults,
            "vocab_size": 30528,
            "max_position_embeddings": 2048,
            "rope_theta": 10000.0,
        },
    ),
    "neobert": Family(
        "neo-bert",
        {
            "hidden_size": 768,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 30522,
            "max_length": 1024,
            "norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        _NEO,
        {"rms_norm_eps": "norm_eps", "max_position_embeddings": "max_length"},
        paired=True,
        by_head=True,
        only={"rope": True, "rms_norm": True, "ngpt": False},
        score_names={"dense": "cls", "classifier": "cls.output"},
        more=_neo_keys,
    ),
    "distilbert": replace(
        _UNSCORED,
        names=_DISTILBERT,
        words={
            **_UNSCORED.words,
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        defaults={
            "vocab_size": 30522,
            "dim": 768,
            "n_layers": 6,
            "n_heads": 12,
            "hidden_dim": 3072,
            "max_position_embeddings": 512,
            "layer_norm_eps": 1e-12,
            "tie_word_embeddings": True,
        },
        score_names={"pre_classifier": "cls", "classifier": "cls.output"},
        more=_distilbert_keys,
    ),
    "electra": replace(
        _UNSCORED,
        defaults={
            **_UNSCORED.defaults,
            "embedding_size": 128,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
        names=BERT,
        score_names=ROBERTA_SCORE,
        more=_electra_keys,
    ),
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
}
