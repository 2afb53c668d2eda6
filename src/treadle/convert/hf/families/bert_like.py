"""Family rows of encoders similar to BERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.bert import ENCODERS
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import BERT, BERT_SCORE, LATE_BERT, ROBERTA_SCORE, Names
from treadle.convert.sources.derived_tensors import DerivationRule, lower, upper
from treadle.files.keys import MetadataReader
from treadle.models.graphs.encoder import N_TYPES
from treadle.models.sentence import HEAD_ACTIVATION

_PLAIN = replace(ENCODERS["bert"], score_names={}, variant=lambda keys: None)

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
_XLM_ROBERTA = ENCODERS["xlm-roberta"]
# RoPE instead of learned positions; their number still includes two that no token has.
_JINA = replace(
    _XLM_ROBERTA,
    arch="jina-bert-v3",
    defaults={
        **_PLAIN.defaults,
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
# The folder that Jina published; its task adapters are left out.
_JINA_TASKS = replace(
    _JINA,
    words={**_JINA.words, "rope_theta": "rotary_emb_base"},
    defaults={**_JINA.defaults, "rotary_emb_base": 10000.0},
)


def _xlm_roberta(keys: MetadataReader) -> Family | None:
    return _JINA_TASKS if keys.get("position_embedding_type") == "rotary" else None


FIRST = 2  # GGUF's number of first-token pooling
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
    """Return the keys: the FFN's width is two thirds of the given one, rounded up to a multiple of
    8.
    """
    n_ff = int(2 * keys.integer("intermediate_size") / 3)
    return {"feed_forward_length": 8 * -(-n_ff // 8), "pooling_type": FIRST}


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
_UP_FIRST = DerivationRule(
    ("mlp.up_gate_proj.weight",),
    {"mlp.up_proj.weight": upper, "mlp.gate_proj.weight": lower},
    side="B",
)


def _gte_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; gte-base-en has no token types."""
    return {} if keys.integer("type_vocab_size", lo=0) else {N_TYPES: 1}


_GTE_FAMILY = Family(
    "gte",
    {
        **_PLAIN.defaults,
        "vocab_size": 250048,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "rope_theta": 160000.0,
        "rope_scaling": None,
    },
    _GTE,
    _PLAIN.words,
    activation="gelu",
    only={
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    },
    derived=lambda keys: (_UP_FIRST,),
    score_names=BERT_SCORE,
    more=_gte_keys,
)


def _distilbert_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys: epsilon is fixed in the code, there are no token types, and the head has
    ReLU instead of tanh.
    """
    scores = {HEAD_ACTIVATION: "relu"} if _scores(keys) else {}
    return {"attention.layer_norm_epsilon": f32(1e-12), N_TYPES: 1, **scores}


def _electra_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the head's activation. Refuse small models, which project narrower embeddings by a
    matrix that GGUF's BERT lacks.
    """
    width = keys.integer("embedding_size")
    if width != (n_embd := keys.integer("hidden_size")):
        what = f"is {width} and hidden_size is {n_embd}: GGUF has no projection between them"
        keys.refuse("embedding_size", what)
    return {HEAD_ACTIVATION: "gelu_erf"} if _scores(keys) else {}


def _scores(keys: MetadataReader) -> bool:
    kinds = keys.get("architectures") or []
    return any(str(kind).endswith("ForSequenceClassification") for kind in kinds)


BERTKIN: dict[str, Family] = {
    "xlm-roberta": replace(
        _XLM_ROBERTA, names={**_XLM_ROBERTA.names, **_FLASH}, variant=_xlm_roberta
    ),
    "jina_embeddings_v3": _JINA,
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
        _PLAIN,
        names=_DISTILBERT,
        words={
            **_PLAIN.words,
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
        _PLAIN,
        defaults={
            **_PLAIN.defaults,
            "embedding_size": 128,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
        names=BERT,
        score_names=ROBERTA_SCORE,
        more=_electra_keys,
    ),
}
