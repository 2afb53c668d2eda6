"""Family rows of Qwen: dense models, mixtures, hybrids, text parts of multimodal models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import PACKED_EXPERTS
from treadle.convert.hf.families.multimodal import sections
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, SCORE, Names
from treadle.convert.hf.windows import (
    every_layer_if_used,
    every_other_lower,
    has_attention,
    upper_layers,
)
from treadle.convert.sources.derived_tensors import (
    DerivationRule,
    Rows,
    decay,
    flat,
    lower,
    same,
    taps,
    transposed,
    upper,
)
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.recurrence import FLAGS, INTERVAL

# -- dense models ---------------------------------------------------------------------------------

_QWEN = {
    **COMMON,
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

# -- mixtures -------------------------------------------------------------------------------------

_EVERY = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # all layers have experts
_EXPERTS = {
    **COMMON,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "norm_topk_prob": False,
}

# -- hybrids: Qwen 3.5 and 3 Next -----------------------------------------------------------------


def _hybrid_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    flags = has_attention(keys, n_layer)
    n_v = keys.integer("linear_num_value_heads", 32)
    made: dict[str, Any] = {
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
        made["rope.dimension_sections"] = [*sections, 0][:4]
    return made


def _interleave_heads(rows: Rows, n_k: int, n_v: int, skipped: int = 0) -> Rows:
    """Reorder the rows of ``n_v`` value heads: a checkpoint has the value heads of one key head
    side by side (``n_k`` groups), GGUF takes one of each key head in turn. The first ``skipped``
    rows stay.
    """
    heads = rows[skipped:].reshape(n_k, n_v // n_k, -1, *rows.shape[1:])
    moved = heads.swapaxes(0, 1).reshape(rows[skipped:].shape)
    return np.concatenate([rows[:skipped], moved]) if skipped else moved


def _columns_in_turn(rows: Rows, n_k: int, n_v: int) -> Rows:
    return _interleave_heads(rows.T, n_k, n_v).T


def _decay_in_turn(rows: Rows, n_k: int, n_v: int) -> Rows:
    return decay(_interleave_heads(rows, n_k, n_v))


def _taps_in_turn(rows: Rows, n_k: int, n_v: int, skipped: int) -> Rows:
    return _interleave_heads(taps(rows), n_k, n_v, skipped)


def _rules_35(keys: MetadataReader) -> Sequence[DerivationRule]:
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
            {f"{at}qkv.weight": partial(_interleave_heads, **heads, skipped=n_q)},
            side="B",
        ),
        DerivationRule(
            (f"{at}conv1d.weight",),
            {f"{at}taps.weight": partial(_taps_in_turn, **heads, skipped=n_q)},
        ),
        rule("in_proj_z.weight", "z.weight", _interleave_heads),
        rule("in_proj_b.weight", "b.weight", _interleave_heads),
        rule("in_proj_a.weight", "a.weight", _interleave_heads),
        rule("out_proj.weight", "out.weight", _columns_in_turn, side="A"),
        rule("dt_bias", "dt.bias", _interleave_heads),
        rule("A_log", "decay.weight", _decay_in_turn, floats=True),
        *PACKED_EXPERTS,
    )


_HYBRID: Names = {
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


def cut_qkvz(rows: Rows, n_k: int, sizes: Sequence[int], parts: Sequence[int]) -> Rows:
    """Select ``parts`` (0 queries, 1 keys, 2 values, 3 gates) of a fused matrix, which has all four
    for each of ``n_k`` key heads; ``sizes``: rows of each part in one key head. The result has the
    first selected part for all heads, then the next.
    """
    heads = rows.reshape(n_k, -1, rows.shape[-1])
    ends = np.cumsum([0, *sizes])
    found = [heads[:, ends[i] : ends[i + 1]].reshape(-1, rows.shape[-1]) for i in parts]
    return np.concatenate(found)


def _qwen3_next_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_k, n_v = (keys.integer(f"linear_num_{of}_heads", n) for of, n in (("key", 16), ("value", 32)))
    d_k, d_v = (keys.integer(f"linear_{of}_head_dim", 128) for of in ("key", "value"))
    if n_v % n_k:
        keys.fail("linear_num_value_heads", f"is {n_v}", f"a multiple of {n_k}")
    cut = partial(cut_qkvz, n_k=n_k, sizes=(d_k, d_k, *[n_v // n_k * d_v] * 2))
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


_HYBRID_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "intermediate_size": 5632,  # unused if all layers have experts
}
_HYBRID_EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

# -- the rows -------------------------------------------------------------------------------------

QWEN_FAMILIES: dict[str, Family] = {
    "qwen2": Family("qwen2", _QWEN, windowed=upper_layers),
    "qwen3": Family("qwen3", {**_QWEN, "head_dim": 128}, windowed=upper_layers, score_names=SCORE),
    "qwen3_moe": Family(
        "qwen3moe",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        LLAMA_EXPERTS,
        windowed=every_layer_if_used,
        only=_EVERY,
        experts=True,
    ),
    "qwen2_moe": Family(
        "qwen2moe",
        {
            **_EXPERTS,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        LLAMA_EXPERTS,
        windowed=every_other_lower,
        only=_EVERY,
        experts=True,
    ),
    "qwen3_5_text": Family(
        "qwen35",
        {**_HYBRID_DEFAULTS, "vocab_size": 248320, "num_key_value_heads": 4},
        _HYBRID,
        norm_shift=1.0,
        derived=_rules_35,
        more=_hybrid_keys,
    ),
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        {
            **_HYBRID_DEFAULTS,
            **_HYBRID_EXPERTS,
            "vocab_size": 248320,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        _HYBRID,
        norm_shift=1.0,
        experts=True,
        derived=_rules_35,
        more=_hybrid_keys,
    ),
    "qwen3_next": Family(
        "qwen3next",
        {
            **_HYBRID_DEFAULTS,
            **_HYBRID_EXPERTS,
            "vocab_size": 151936,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        _HYBRID,
        norm_shift=1.0,
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        experts=True,
        derived=_qwen3_next_rules,
        more=_hybrid_keys,
    ),
}

# -- text parts of multimodal models ---------------------------------------------------------------


def _deepstack(whole: MetadataReader) -> dict[str, Any]:
    """Return the key with the number of layers, from the first on, after which image embeddings are
    added (DeepStack). ``whole``: config.json with its vision part.
    """
    vision = whole.within("vision_config")
    layers = vision.get("deepstack_visual_indexes") if vision else []
    return {"n_deepstack_layers": len(layers) if isinstance(layers, list) else 3}


_QWEN2_VL = Family(
    "qwen2vl",
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    windowed=upper_layers,
    more=sections(16, 24, 24),
)
_QWEN3_VL = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
}


def _gate(rows: Rows, n_embd: int) -> Rows:
    return upper(rows if rows.shape[-1] == n_embd else transposed(rows))


def _up(rows: Rows, n_embd: int) -> Rows:
    return lower(rows if rows.shape[-1] == n_embd else transposed(rows))


def _down(rows: Rows, n_embd: int) -> Rows:
    return rows if rows.shape[-2] == n_embd else transposed(rows)


def _vl_experts(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that split the fused gate and up matrices of all experts (gates first), and that
    orient the down matrices: files have them as [E, out, in] or [E, in, out].
    """
    at = "mlp.experts."
    n_embd = keys.integer("hidden_size")
    gives = {
        f"{at}gate_proj.weight": partial(_gate, n_embd=n_embd),
        f"{at}up_proj.weight": partial(_up, n_embd=n_embd),
    }
    return (
        DerivationRule((f"{at}gate_up_proj",), gives),
        DerivationRule(
            (f"{at}down_proj",), {f"{at}down_proj.weight": partial(_down, n_embd=n_embd)}
        ),
    )


def _asr_sections(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of M-RoPE's sections, which llama.cpp requires; folders may lack them, because
    the three positions of a token are equal.
    """
    pairs = keys.integer("head_dim") // 2
    usual = (24, 20, 20) if pairs == 64 else (pairs, 0, 0)
    return sections(*usual)(keys, n_layer)


QWEN_FAMILIES |= {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": Family(
        "qwen3vl",
        {
            **_QWEN3_VL,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        more=sections(24, 20, 20),
        beside=_deepstack,
    ),
    "qwen3_vl_moe_text": replace(
        QWEN_FAMILIES["qwen3_moe"],
        arch="qwen3vlmoe",
        defaults={
            **_QWEN3_VL,
            "tie_word_embeddings": True,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        windowed=lambda keys, n_layer: None,
        derived=_vl_experts,
        more=sections(24, 20, 20),
        beside=_deepstack,
    ),
    # A GGUF file of Qwen3-ASR is one of Qwen3-VL without DeepStack layers.
    "qwen3_asr_text": replace(
        QWEN_FAMILIES["qwen3"],
        arch="qwen3vl",
        defaults={
            **QWEN_FAMILIES["qwen3"].defaults,
            "tie_word_embeddings": True,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 65536,
        },
        more=_asr_sections,
        beside=lambda whole: {"n_deepstack_layers": 0},
    ),
}
