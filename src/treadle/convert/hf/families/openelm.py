"""Family row of OpenELM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, lower, upper
from treadle.files.metadata import MetadataReader

_MULTIPLIERS = "ffn_multipliers"


def _ffn_widths(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of each layer's FFN width: its multiplier times ``model_dim``, rounded to a
    multiple of ``ffn_dim_divisor``, but to the next one if that is below nine tenths of the
    product.
    """
    given = keys.get(_MULTIPLIERS)
    step = keys.integer("ffn_dim_divisor")
    each = given if isinstance(given, list) else [given] * n_layer
    if len(each) != n_layer:
        keys.fail(_MULTIPLIERS, f"has {len(each)} entries", f"{n_layer}, one per layer")
    widths = list[int]()
    for i, factor in enumerate(each):
        one = MetadataReader({f"{_MULTIPLIERS}[{i}]": factor}, keys.path, prefix=keys.prefix)
        width = one.number(f"{_MULTIPLIERS}[{i}]", lo=1e-3, hi=1e3) * keys.integer("model_dim")
        near = max(step, int(width + step / 2) // step * step)
        widths.append(near + step if near < 0.9 * width else near)
    return {"feed_forward_length": widths}


def _gate_and_up(keys: MetadataReader) -> Sequence[DerivationRule]:
    gives = {"ffn.gate.weight": upper, "ffn.up.weight": lower}
    return (DerivationRule(("ffn.proj_1.weight",), gives, side="B"),)


_NAMES: Names = {
    "token_embeddings": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "attn_norm",
    "attn.qkv_proj": "attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.proj_2": "ffn_down",
}

OPENELM_FAMILIES: dict[str, Family] = {
    "openelm": Family(
        "openelm",
        {
            "rms_norm_eps": 1e-6,  # no key gives it
            "rope_freq_constant": 10000,
            "tie_word_embeddings": True,
            "vocab_size": 32000,
            "max_context_length": 2048,
            "model_dim": 2048,
            "num_transformer_layers": 12,
            "head_dim": 128,
            _MULTIPLIERS: 4.0,
            "ffn_dim_divisor": 256,
        },
        _NAMES,
        {
            "hidden_size": "model_dim",
            "num_hidden_layers": "num_transformer_layers",
            "num_attention_heads": "num_query_heads",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "no key says it",
            "max_position_embeddings": "max_context_length",
            "rope_theta": "rope_freq_constant",
            "hidden_act": "activation_fn_name",
        },
        older_activation="swish",
        only={
            "ffn_with_glu": True,
            "normalization_layer_name": "rms_norm",
            "normalize_qk_projections": True,
            "share_input_output_layers": True,
        },
        n_ff_default=4,
        derived=_gate_and_up,
        more=_ffn_widths,
    ),
}
