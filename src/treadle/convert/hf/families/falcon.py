"""Family rows of Falcon: the classic models, and Falcon-H1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.mamba import (
    STATE,
    STATE_DEFAULTS,
    state_keys,
    state_names,
    state_rules,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, same, times
from treadle.files.metadata import MetadataReader

# -- classic models -------------------------------------------------------------------------------

FALCON_NAMES: Names = {
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

_KV_HEADS = "num_key_value_heads"


def _falcon(keys: MetadataReader) -> Family:
    """Return the row of Falcon 40B for a new decoder or without ``multi_query``; else 7B's, whose
    query heads share one key head, whatever ``num_kv_heads`` is.
    """
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
    FALCON_NAMES,
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

# -- Falcon-H1 ------------------------------------------------------------------------------------

_SCALED = "_scaled"  # suffix of the names of matrices that have a factor
_ONE = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
_SEVERAL = {"mlp_multipliers": 2, "ssm_multipliers": 5}


def _factors(keys: MetadataReader, key: str, n: int) -> list[float]:
    """Return the ``n`` multipliers in the list ``key``; ones if it is missing."""
    found = keys.get(key)
    found = [1.0] * n if found is None else found
    if not isinstance(found, list) or len(found) != n:
        keys.fail(key, f"is {found!r:.60}", f"a list of {n}")
    each = (MetadataReader({key: factor}, keys.path, prefix=keys.prefix) for factor in found)
    return [_factor(one, key) for one in each]


def _n_inner(keys: MetadataReader) -> int:
    given = keys.values.get("mamba_d_ssm", keys.defaults["mamba_d_ssm"])
    if given is not None:
        return keys.integer("mamba_d_ssm")
    return keys.integer("mamba_expand") * keys.integer("hidden_size")


def _h1_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    if keys.flag("mamba_rms_norm", False) and keys.flag("mamba_norm_before_gate", True):
        keys.refuse(
            "mamba_norm_before_gate", "is true: treadle supports only a norm after the gate"
        )
    if keys.flag("tie_word_embeddings", False) and (
        _factor(keys, "embedding_multiplier") != _factor(keys, "lm_head_multiplier")
    ):
        what = "is true, but embedding_multiplier differs from lm_head_multiplier"
        keys.refuse(
            "tie_word_embeddings", f"{what}: treadle supports that only with untied embeddings"
        )
    # Recorded because they are multiplied into the weights, and must be into adapters as well.
    told: dict[str, Any] = {key: keys.number(key, 1.0, lo=-1e6, hi=1e6) for key in _ONE}
    told |= {key: _factors(keys, key, n) for key, n in _SEVERAL.items()}
    return {**state_keys(keys, _n_inner(keys), *STATE), **told}


def _factor(keys: MetadataReader, key: str) -> float:
    return keys.number(key, 1.0, lo=-1e6, hi=1e6)


def _h1_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that multiply Falcon-H1's multipliers into the weights, as in GGUF. A matrix
    that is multiplied gets another name, so that LoRA adapters of it are multiplied as well.
    """
    of = partial(_factor, keys)
    gate, down = _factors(keys, "mlp_multipliers", 2)
    n_inner = _n_inner(keys)
    n_head = keys.integer("mamba_n_heads")
    n_state = keys.integer("mamba_n_groups") * keys.integer("mamba_d_state")
    sizes = (n_inner, n_inner, n_state, n_state, n_head)
    rows = np.repeat(_factors(keys, "ssm_multipliers", 5), sizes)[:, None]
    into = of("attention_in_multiplier")
    factors: dict[str, Any] = {
        "self_attn.q_proj": into,
        "self_attn.k_proj": into * of("key_multiplier"),
        "self_attn.v_proj": into,
        "self_attn.o_proj": of("attention_out_multiplier"),
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
        "mamba.in_proj": of("ssm_in_multiplier") * rows,
        "mamba.out_proj": of("ssm_out_multiplier"),
    }
    scaled = {name: (name + _SCALED, factor) for name, factor in factors.items()}
    scaled["embed_tokens"] = "embed_tokens", of("embedding_multiplier")
    scaled["lm_head"] = "lm_head", of("lm_head_multiplier")
    return (
        *state_rules("mamba", keys.integer("mamba_n_groups")),
        *(_rule(name, to, np.float32(factor)) for name, (to, factor) in scaled.items()),
    )


def _rule(name: str, to: str, factor: Any) -> DerivationRule:
    once = bool((factor == 1).all())
    make = same if once else partial(times, factor=factor)
    return DerivationRule((f"{name}.weight",), {f"{to}.weight": make}, floats=not once, side="B")


_H1: Names = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "final_layernorm": "output_norm",
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj{_SCALED}": f"attn_{one}" for one in "qkv"},
    f"self_attn.o_proj{_SCALED}": "attn_output",
    f"feed_forward.gate_proj{_SCALED}": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    f"feed_forward.down_proj{_SCALED}": "ffn_down",
    **{name + _SCALED * name.endswith("_proj"): to for name, to in state_names("mamba").items()},
}

# -- the rows -------------------------------------------------------------------------------------

FALCON_FAMILIES: dict[str, Family] = {
    "falcon": _FALCON,
    "falcon_h1": Family(
        "falcon-h1",
        {
            **STATE_DEFAULTS,
            "vocab_size": 128000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "mamba_d_ssm": 1024,
        },
        _H1,
        only=dict.fromkeys(
            ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False
        ),
        derived=_h1_rules,
        folded_by_mlx=True,
        more=_h1_keys,
        copied_keys=(*_ONE, *_SEVERAL),
    ),
}

# Rows that ``variant`` chooses.
FALCON_VARIANTS = (_FALCON_7B, _FALCON_40B)
