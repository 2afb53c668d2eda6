"""Family rows and keys of models with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.mixtures import PACKED_EXPERTS
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, LLAMA_EXPERTS, Names, experts_123
from treadle.convert.hf.windows import has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, decay, flat, same, taps
from treadle.files.keys import MetadataReader
from treadle.models.graphs.recurrence import FLAGS, INTERVAL

# -- LFM2: short convolutions -----------------------------------------------------------------


def _conv_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    kinds = keys.get("layer_types")
    given = keys.get("full_attn_idxs")
    whole = isinstance(given, list) and all(type(i) is int for i in given)
    if given is not None and not whole:
        keys.fail("full_attn_idxs", f"is {given!r:.60}", "a list of layers")
    flags = (
        has_attention(keys, n_layer)
        if kinds is not None
        else [i in (given or range(n_layer)) for i in range(n_layer)]
    )
    n_head_kv = keys.integer("num_key_value_heads", 8)
    return {
        "attention.head_count_kv": [n_head_kv if flag else 0 for flag in flags],
        "shortconv.l_cache": keys.integer("conv_L_cache", 3),
    }


def _lfm2_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {**_conv_keys(keys, n_layer), "feed_forward_length": _lfm2_width(keys)}


def _lfm2_width(keys: MetadataReader) -> int:
    """Return the FFN's width: two thirds of the given one, rounded up to whole blocks."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size", 12288))
    if keys.flag("block_auto_adjust_ff_dim", True):
        factor = keys.number("block_ffn_dim_multiplier", 1.0, lo=0.0)
        of = keys.integer("block_multiple_of", 256)
        width = -(-int(factor * int(2 * width / 3)) // of) * of
    return width


_LFM2: Names = {
    **LLAMA,
    "embedding_norm": "output_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.taps": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    **experts_123("feed_forward."),
}
_LFM2_RULES = (
    DerivationRule(("conv.conv.weight",), {"conv.taps.weight": taps}),
    DerivationRule(("feed_forward.expert_bias",), {"feed_forward.score.bias": same}),
)
_LFM2_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "intermediate_size": 12288,
    "tie_word_embeddings": True,
}


# -- Qwen 3.5 and Qwen3-Next: a gated delta net -----------------------------------------------


def _qwen_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    flags = has_attention(keys, n_layer)
    n_v = keys.integer("linear_num_value_heads", 32)
    result: dict[str, Any] = {
        "ssm.conv_kernel": keys.integer("linear_conv_kernel_dim", 4),
        "ssm.state_size": keys.integer("linear_key_head_dim", 128),
        "ssm.group_count": keys.integer("linear_num_key_heads", 16),
        "ssm.time_step_rank": n_v,
        "ssm.inner_size": keys.integer("linear_value_head_dim", 128) * n_v,
        FLAGS: [not flag for flag in flags],
        INTERVAL: flags.index(True) + 1 if True in flags else n_layer + 1,
    }
    rope = keys.within("rope_parameters")
    sections = rope.get("mrope_section") if rope else None
    if isinstance(sections, list):  # all equal for text; llama.cpp requires them
        result["rope.dimension_sections"] = [*sections, 0][:4]
    return result


def _in_turn(rows: Rows, n_k: int, n_v: int, skipped: int = 0) -> Rows:
    """Reorder value heads from grouped (heads of one key head adjacent) to GGUF's order, which
    interleaves key heads. Rows before ``skipped`` stay.
    """
    heads = rows[skipped:].reshape(n_k, n_v // n_k, -1, *rows.shape[1:])
    moved = heads.swapaxes(0, 1).reshape(rows[skipped:].shape)
    return np.concatenate([rows[:skipped], moved]) if skipped else moved


def _columns_in_turn(rows: Rows, n_k: int, n_v: int) -> Rows:
    return _in_turn(rows.T, n_k, n_v).T


def _decay_in_turn(rows: Rows, n_k: int, n_v: int) -> Rows:
    return decay(_in_turn(rows, n_k, n_v))


def _taps_in_turn(rows: Rows, n_k: int, n_v: int, skipped: int) -> Rows:
    return _in_turn(taps(rows), n_k, n_v, skipped)


def _qwen35_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_k, n_v = (keys.integer(f"linear_num_{of}_heads", n) for of, n in (("key", 16), ("value", 32)))
    heads: dict[str, Any] = {"n_k": n_k, "n_v": n_v}
    n_q = 2 * n_k * keys.integer("linear_key_head_dim", 128)  # rows of queries and keys
    at = "linear_attn."

    def rule(name: str, to: str, make: Callable[..., Rows], **more: Any) -> DerivationRule:
        return DerivationRule(
            (at + name,), {at + to: partial(make, **heads)}, **{"side": "B", **more}
        )

    return (
        DerivationRule(
            (f"{at}in_proj_qkv.weight",),
            {f"{at}qkv.weight": partial(_in_turn, **heads, skipped=n_q)},
            side="B",
        ),
        DerivationRule(
            (f"{at}conv1d.weight",),
            {f"{at}taps.weight": partial(_taps_in_turn, **heads, skipped=n_q)},
        ),
        rule("in_proj_z.weight", "z.weight", _in_turn),
        rule("in_proj_b.weight", "b.weight", _in_turn),
        rule("in_proj_a.weight", "a.weight", _in_turn),
        rule("out_proj.weight", "out.weight", _columns_in_turn, side="A"),
        rule("dt_bias", "dt.bias", _in_turn),
        rule("A_log", "decay.weight", _decay_in_turn, floats=True),
        *PACKED_EXPERTS,
    )


_QWEN: Names = {
    **LLAMA_EXPERTS,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.qkv": "attn_qkv",
    "linear_attn.z": "attn_gate",
    "linear_attn.b": "ssm_beta",
    "linear_attn.a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.taps": "ssm_conv1d",
    "linear_attn.dt": "ssm_dt",
    "linear_attn.decay": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out": "ssm_out",
}


def _qkvz(rows: Rows, n_k: int, sizes: Sequence[int], parts: Sequence[int]) -> Rows:
    """Select ``parts`` of the query, key, values and gates that each key head has, each for all
    heads.
    """
    heads = rows.reshape(n_k, -1, rows.shape[-1])
    ends = np.cumsum([0, *sizes])
    found = [heads[:, ends[i] : ends[i + 1]].reshape(-1, rows.shape[-1]) for i in parts]
    return np.concatenate(found)


def _next_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_k, n_v = (keys.integer(f"linear_num_{of}_heads", n) for of, n in (("key", 16), ("value", 32)))
    d_k, d_v = (keys.integer(f"linear_{of}_head_dim", 128) for of in ("key", "value"))
    if n_v % n_k:
        keys.fail("linear_num_value_heads", f"is {n_v}", f"a multiple of {n_k}")
    cut = partial(_qkvz, n_k=n_k, sizes=(d_k, d_k, *[n_v // n_k * d_v] * 2))
    at = "linear_attn."
    gives = {
        f"{at}qkv.weight": partial(cut, parts=(0, 1, 2)),
        f"{at}z.weight": partial(cut, parts=(3,)),
    }
    return (
        DerivationRule((f"{at}in_proj_qkvz.weight",), gives, side="B"),
        DerivationRule((f"{at}conv1d.weight",), {f"{at}taps.weight": taps}),
        DerivationRule((f"{at}out_proj.weight",), {f"{at}out.weight": same}, side="B"),
        DerivationRule((f"{at}dt_bias",), {f"{at}dt.bias": flat}),
        DerivationRule((f"{at}A_log",), {f"{at}decay.weight": decay}, floats=True),
    )


# -- the rows ---------------------------------------------------------------------------------

_QWEN_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5632,  # unused if all layers have experts
}
_QWEN_EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

HYBRIDS: dict[str, Family] = {
    "lfm2": Family(
        "lfm2",
        _LFM2_DEFAULTS,
        _LFM2,
        {"rms_norm_eps": "norm_eps"},
        only={"conv_bias": False},
        derived=lambda keys: _LFM2_RULES,
        more=_lfm2_keys,
    ),
    "lfm2_moe": Family(
        "lfm2moe",
        {
            **_LFM2_DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        _LFM2,
        {"rms_norm_eps": "norm_eps"},
        only={"conv_bias": False},
        experts=True,
        derived=lambda keys: _LFM2_RULES,
        more=_conv_keys,
    ),
    "qwen3_5_text": Family(
        "qwen35",
        {**_QWEN_DEFAULTS, "vocab_size": 248320, "num_key_value_heads": 4},
        _QWEN,
        norm_shift=1.0,
        derived=_qwen35_rules,
        more=_qwen_keys,
    ),
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        {
            **_QWEN_DEFAULTS,
            **_QWEN_EXPERTS,
            "vocab_size": 248320,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        _QWEN,
        norm_shift=1.0,
        experts=True,
        derived=_qwen35_rules,
        more=_qwen_keys,
    ),
    "qwen3_next": Family(
        "qwen3next",
        {
            **_QWEN_DEFAULTS,
            **_QWEN_EXPERTS,
            "vocab_size": 151936,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        _QWEN,
        norm_shift=1.0,
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        experts=True,
        derived=_next_rules,
        more=_qwen_keys,
    ),
}
