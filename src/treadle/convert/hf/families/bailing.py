"""Family rows of Ling and Ring (Bailing). One ``model_type`` stands for both versions of Ling;
transformers lacks both, and their code comes with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.files.metadata import MetadataReader

_QKV = "attention.query_key_value"
_EPS = 1e-7  # of the column norms that the first version divides its output matrix by
_NAMES: Names = {
    **LLAMA_EXPERTS,
    "word_embeddings": "token_embd",
    _QKV: "attn_qkv",
    "attention.query_layernorm": "attn_q_norm",
    "attention.key_layernorm": "attn_k_norm",
    "attention.dense": "attn_output",
    **{f"attention.{x}": f"attn_{x}" for x in "qkv"},
}
# Defaults of the classes; every config.json gives the sizes.
_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "num_experts": 16,
    "num_shared_experts": 0,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}
_ONLY = {"use_sliding_window": False}


def _rows(rows: Rows, first: int, end: int) -> Rows:
    return rows[first:end]


def _unit_columns(rows: Rows) -> Rows:
    return np.asarray(rows / (np.linalg.norm(rows, axis=0, keepdims=True) + _EPS))


def _first_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the first version's rules: split qkv into three matrices, so that a converter can make
    the rows of RoPE pairs in q and k adjacent; with ``norm_head``, normalise the output's columns.
    """
    n_head = keys.integer("num_attention_heads")
    n_embd = keys.integer("hidden_size")
    head_dim = keys.integer("head_dim", max(1, n_embd // n_head))
    n_q = n_head * head_dim
    n_k = keys.integer("num_key_value_heads", n_head) * head_dim
    ends = {"q": (0, n_q), "k": (n_q, n_q + n_k), "v": (n_q + n_k, n_q + 2 * n_k)}
    rules = [
        DerivationRule(
            (f"{_QKV}.{kind}",),
            {
                f"attention.{x}.{kind}": partial(_rows, first=at, end=end)
                for x, (at, end) in ends.items()
            },
            side="B",
        )
        for kind in ("weight", "bias")
    ]
    if keys.flag("norm_head", False):
        rules.append(
            DerivationRule(("lm_head.weight",), {"lm_head.weight": _unit_columns}, floats=True)
        )
    return rules


def _second_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (scores("mlp.gate.expert_bias", "mlp.score"),)


def _shared(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    n = keys.integer("n_shared_experts", 0, lo=0)  # the key in models that transformers has
    return {"expert_shared_count": keys.integer("num_shared_experts", n, lo=0)}


def _shared_with_width(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of shared experts: their number, and the width of a single one, which
    llama.cpp multiplies by the number.
    """
    width = keys.integer("moe_intermediate_size")
    own = keys.integer("moe_shared_expert_intermediate_size", width)
    return {**_shared(keys, n_layer), "expert_shared_feed_forward_length": own}


BAILING_V2 = Family(
    "bailingmoe2",
    {
        **_DEFAULTS,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": None,
    },
    _NAMES,
    only={**_ONLY, "score_function": "sigmoid", "norm_head": False},
    experts=True,
    derived=_second_rules,
    extra_layers="num_nextn_predict_layers",
    more=_shared_with_width,
)


def _version(keys: MetadataReader) -> Family | None:
    """Return the second version's family if queries and keys have norms; else None, the first
    version's.
    """
    return BAILING_V2 if keys.flag("use_qk_norm", False) else None


_V1 = Family(
    "bailingmoe",
    _DEFAULTS,
    _NAMES,
    variant=_version,
    only={**_ONLY, "score_function": "softmax", "multi_gate": False},
    experts=True,
    derived=_first_rules,
    more=_shared,
)

# -- the rows -------------------------------------------------------------------------------------

BAILING_FAMILIES: dict[str, Family] = {
    "bailing_moe": _V1,
    "bailing_moe_v2": BAILING_V2,
}

# Rows that ``variant`` chooses.
BAILING_VARIANTS = (BAILING_V2,)
