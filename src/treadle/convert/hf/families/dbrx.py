"""Family row of DBRX, whose config.json has half of its keys in two nested objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM

_ATTENTION = "attn_config"
_FFN = "ffn_config"
_KV_HEADS, _CLIP, _THETA = (
    f"{_ATTENTION}.{key}" for key in ("kv_n_heads", "clip_qkv", "rope_theta")
)
_WIDTH = f"{_FFN}.ffn_hidden_size"
_ACTIVATION = f"{_FFN}.ffn_act_fn.name"
_COUNT = f"{_FFN}.moe_num_experts"
_USED = f"{_FFN}.moe_top_k"
_NORM = f"{_FFN}.moe_normalize_expert_weights"
_AT = "ffn.experts"
_MATRICES = {"w1": "ffn_gate_exps", "v1": "ffn_up_exps", "w2": "ffn_down_exps"}


def _flat(keys: MetadataReader) -> Mapping[str, Any]:
    """Return the keys with those of the nested objects under full names ("ffn_config.moe_top_k").

    The RoPE base is that of the nested object, used in training; transformers 5 takes the outer
    one, or 10000 if there is none.
    """
    result = dict(keys.values)
    for part in (_ATTENTION, _FFN):
        within = keys.within(part)
        result |= {f"{part}.{key}": it for key, it in (within.values if within else {}).items()}
        if (fn := within.within("ffn_act_fn") if within else None) is not None:
            result[_ACTIVATION] = fn.get("name")
    rope = keys.within("rope_parameters")
    if rope is not None and result.get(_THETA) is not None:
        result["rope_parameters"] = {k: it for k, it in rope.values.items() if k != "rope_theta"}
    return result


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of experts, and of the clamp of q, k and v, 0 if there is none, because
    llama.cpp requires the key.
    """
    power = keys.values.get(_NORM, 1.0)
    if power not in (None, 1):
        keys.refuse(
            _NORM, f"is {power!r:.40}: treadle supports only 1 and null in this architecture"
        )
    return {
        "attention.clamp_kqv": f32(keys.number(_CLIP, 0.0, lo=0.0)),
        "expert_count": keys.integer(_COUNT),
        "expert_used_count": keys.integer(_USED),
        EXPERTS_NORM: power is not None,
    }


def _experts(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that split the rows of all experts in one matrix, [n * n_ff, n_embd], by expert;
    ``w2`` is transposed.
    """
    n = keys.integer(_COUNT)
    return tuple(
        DerivationRule(
            (f"{_AT}.mlp.{it}",),
            {f"{_AT}.{it}.weight": partial(_split_experts, n=n, turned=it == "w2")},
        )
        for it in _MATRICES
    )


def _split_experts(rows: Rows, n: int, turned: bool) -> Rows:
    result = rows.reshape(n, -1, rows.shape[-1])
    return result.swapaxes(1, 2) if turned else result


_NAMES: Names = {
    "wte": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "norm_attn_norm.norm_1": "attn_norm",
    "norm_attn_norm.attn.Wqkv": "attn_qkv",
    "norm_attn_norm.attn.out_proj": "attn_output",
    "norm_attn_norm.norm_2": "ffn_norm",
    "ffn.router.layer": "ffn_gate_inp",
    **{f"{_AT}.{it}": stem for it, stem in _MATRICES.items()},  # separate tensors in mlx-lm
}

# -- the rows -------------------------------------------------------------------------------------

DBRX_FAMILIES: dict[str, Family] = {
    "dbrx": Family(
        "dbrx",
        {
            "rms_norm_eps": 1e-5,  # of LayerNorm; no key gives it
            "tie_word_embeddings": False,
            "vocab_size": 32000,
            "d_model": 2048,
            "n_layers": 24,
            "n_heads": 16,
            "max_seq_len": 2048,
            _KV_HEADS: 1,
            _THETA: 10000.0,
            _WIDTH: 3584,
            _COUNT: 4,
            _USED: 1,
        },
        _NAMES,
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": _KV_HEADS,
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": _WIDTH,
            "rope_theta": _THETA,
            "hidden_act": _ACTIVATION,
        },
        only={"tie_word_embeddings": False},
        normalize_keys=_flat,
        experts=True,
        derived=_experts,
        more=_keys,
    ),
}
