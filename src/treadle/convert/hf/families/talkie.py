"""Family row of Talkie. transformers lacks it; its code is in the model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, same
from treadle.files.metadata import MetadataReader

EPS = 2.0**-23  # of norms, which its code does not give: float32's


def _negate_second_half(rows: Rows, head_dim: int) -> Rows:
    """Negate the rows of each head's second half: RoPE with the opposite sign becomes the usual
    one.
    """
    heads = rows.reshape(-1, head_dim, rows.shape[-1]).copy()
    heads[:, head_dim // 2 :] *= -1
    return heads.reshape(rows.shape)


def _as_column(rows: Rows) -> Rows:
    return rows.reshape(-1, 1)


def _normalize_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return the keys; ``intermediate_size``, if missing, follows from ``hidden_size`` as in the
    model's code.
    """
    n_ff = round(keys.integer("hidden_size") * 8 / 3 / 128) * 128
    return {**keys.values, "intermediate_size": keys.integer("intermediate_size", max(128, n_ff))}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {"attention.layer_norm_rms_epsilon": f32(EPS)}


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    back = partial(_negate_second_half, head_dim=keys.integer("head_dim", head_dim))
    turned = (f"attn.attn_{name}.weight" for name in ("query", "key"))
    return (
        *(DerivationRule((name,), {name: back}, floats=True) for name in turned),
        DerivationRule(("attn.head_gain.head_g",), {"attn.head_gain.weight": _as_column}),
        DerivationRule(("attn_gain.a_g",), {"attn.attn_resid.scale": same}),
        DerivationRule(("mlp_gain.a_g",), {"mlp.mlp_resid.scale": same}),
        DerivationRule(("embed_skip.a_g",), {"embed_skip.weight": same}),
        DerivationRule(("lm_head",), {"lm_head.weight": same}),
    )


_NAMES: Names = {
    "embed": "token_embd",
    "lm_head": "output",
    "attn.attn_query": "attn_q",
    "attn.attn_key": "attn_k",
    "attn.attn_value": "attn_v",
    "attn.attn_resid": "attn_output",
    "attn.head_gain": "attn_q_gain",
    "mlp.mlp_gate": "ffn_gate",
    "mlp.mlp_linear": "ffn_up",
    "mlp.mlp_resid": "ffn_down",
    "embed_skip": "embd_skip",
}
TALKIE_FAMILIES: dict[str, Family] = {
    "talkie": Family(
        "talkie",
        {
            "tie_word_embeddings": False,
            "head_dim": None,
            "rms_norm_eps": EPS,
            "rope_theta": 1e6,
            "max_position_embeddings": 2048,
        },
        _NAMES,
        normalize_keys=_normalize_keys,
        derived=_rules,
        more=_keys,
        numbers={"/lm_head_gain.w_g": "talkie.logit_scale"},
    ),
}
