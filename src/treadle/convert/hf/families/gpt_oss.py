"""Family row of gpt-oss."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.families.experts import always
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import GPT_OSS_ROPE
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.hf.windows import all_but_every
from treadle.convert.sources.derived_tensors import (
    MXFP4,
    DerivationRule,
    Rows,
    mxfp4_blocks,
    same,
    transposed,
)


def _even(rows: Rows) -> Rows:
    return rows[..., ::2]


def _odd(rows: Rows) -> Rows:
    return rows[..., 1::2]


def _gate(rows: Rows) -> Rows:
    return transposed(_even(rows))


def _up(rows: Rows) -> Rows:
    return transposed(_odd(rows))


def _gate_blocks(codes: Rows, scales: Rows) -> Rows:
    return mxfp4_blocks(codes[:, ::2], scales[:, ::2])


def _up_blocks(codes: Rows, scales: Rows) -> Rows:
    return mxfp4_blocks(codes[:, 1::2], scales[:, 1::2])


_AT = "mlp.experts."
_GATE_UP = f"{_AT}gate_up_proj"

_RULES = (
    DerivationRule(("self_attn.sinks",), {"self_attn.sinks.weight": same}),
    DerivationRule(
        (f"{_GATE_UP}_bias",),
        {f"{_AT}gate_proj.bias": _even, f"{_AT}up_proj.bias": _odd},
    ),
    DerivationRule((f"{_AT}down_proj_bias",), {f"{_AT}down_proj.bias": same}),
    DerivationRule((_GATE_UP,), {f"{_AT}gate_proj.weight": _gate, f"{_AT}up_proj.weight": _up}),
    DerivationRule((f"{_AT}down_proj",), {f"{_AT}down_proj.weight": transposed}),
    DerivationRule(
        (f"{_GATE_UP}_blocks", f"{_GATE_UP}_scales"),
        {f"{_AT}gate_proj.weight": _gate_blocks, f"{_AT}up_proj.weight": _up_blocks},
        dtype=MXFP4,
    ),
    DerivationRule(
        (f"{_AT}down_proj_blocks", f"{_AT}down_proj_scales"),
        {f"{_AT}down_proj.weight": mxfp4_blocks},
        dtype=MXFP4,
    ),
)

GPT_OSS_FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        "gpt-oss",
        {
            **COMMON_EPS_5,
            "vocab_size": 201088,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_theta": 150000.0,
            "rope_parameters": GPT_OSS_ROPE,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        {
            **LLAMA_EXPERTS,
            "mlp.router": "ffn_gate_inp",
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
        },
        windowed=all_but_every(2),
        only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        experts=True,
        derived=always(*_RULES),
        packed="mxfp4",
    ),
}
