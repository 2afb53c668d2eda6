"""Family rows of EXAONE: dense models and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.deepseek import listed_kinds
from treadle.convert.hf.families.defaults import COMMON, COMMON_EPS_5
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, LLAMA_EXPERTS, POST_NORMS, Names
from treadle.convert.hf.windows import all_but_every
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader

# -- mixtures -------------------------------------------------------------------------------------


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of shared experts (number, total width) and of leading dense layers."""
    n = keys.integer("num_shared_experts", lo=0)
    width = keys.integer("moe_intermediate_size")
    return {
        "expert_shared_count": n,
        "expert_shared_feed_forward_length": n * width,
        **listed_kinds(keys, n_layer),
    }


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for the bias of router scores: ``mlp.e_score_correction_bias`` in published
    folders, within ``mlp.gate`` in those that transformers writes.
    """
    name = "e_score_correction_bias"
    return [scores(f"{at}.{name}", "mlp.score") for at in ("mlp", "mlp.gate")]


# -- EXAONE 3 -------------------------------------------------------------------------------------

_EXAONE: Names = {
    **LLAMA,  # transformers' names, since it has the family
    "wte": "token_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    **{f"attn.attention.{x}_proj": f"attn_{x}" for x in "qkv"},
    "attn.attention.out_proj": "attn_output",
    "mlp.c_fc_0": "ffn_gate",
    "mlp.c_fc_1": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

EXAONE_FAMILIES: dict[str, Family] = {
    "exaone4": Family(
        "exaone4",
        {
            **COMMON_EPS_5,
            "vocab_size": 102400,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
        },
        POST_NORMS,
        windowed=all_but_every(4, overridable=True),
    ),
    "exaone_moe": Family(
        "exaone-moe",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 102400,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "intermediate_size": 16384,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "sliding_window": 4096,
        },
        LLAMA_EXPERTS,
        windowed=all_but_every(4, overridable=True),
        only={"scoring_func": "sigmoid"},
        experts=True,
        derived=_rules,
        more=_keys,
    ),
    "exaone": Family(
        "exaone",
        {
            **COMMON,
            "rms_norm_eps": 1e-5,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": 102400,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
        },
        _EXAONE,
        older_words={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
    ),
}
