"""Family rows similar to Llama: some in transformers, some whose folders bring their own code.

That code is never run: its key and tensor names are in the rows here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.files.keys import MetadataReader
from treadle.formats import by_name
from treadle.models.graphs.apertus import NUMBERS

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_NO_EXPERTS = {"num_experts": 0}

# -- keys -------------------------------------------------------------------------------------


def _ratio_of_base(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the RoPE base, which ChatGLM gives as a multiple of 10,000."""
    ratio = keys.number("rope_ratio", 1.0, lo=1e-3, hi=1e9)
    return {"rope.freq_base": f32(10000.0 * ratio)}


def _scales(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return MiniCPM's scales of embeddings, residuals and logits."""
    base = keys.number("dim_model_base", lo=1e-6)
    return {
        "embedding_scale": f32(keys.number("scale_emb", lo=1e-6)),
        "residual_scale": f32(keys.number("scale_depth", lo=1e-6) / math.sqrt(n_layer)),
        "logit_scale": f32(keys.integer("hidden_size") / base),
    }


# -- tensors that GGUF stores differently -----------------------------------------------------


def _of_group(rows: Rows, n_group: int, head_dim: int, part: slice) -> Rows:
    """Select a part of InternLM 2's groups: the queries that share a key, the key, the value."""
    heads = rows.reshape(n_group, -1, head_dim, *rows.shape[1:])
    return heads[:, part].reshape(-1, *rows.shape[1:])


def _grouped(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_head = keys.integer("num_attention_heads")
    n_group = keys.integer("num_key_value_heads", n_head)
    head_dim = max(1, keys.integer("hidden_size") // n_head)
    parts = {"wq": slice(None, -2), "wk": slice(-2, -1), "wv": slice(-1, None)}

    def gives(kind: str) -> dict[str, Any]:
        return {
            f"attention.{name}.{kind}": partial(
                _of_group, n_group=n_group, head_dim=head_dim, part=at
            )
            for name, at in parts.items()
        }

    return [
        DerivationRule(("attention.wqkv.weight",), gives("weight"), side="B"),
        DerivationRule(("attention.wqkv.bias",), gives("bias")),
    ]


def _third(rows: Rows, i: int) -> Rows:
    """Return queries, keys or values of a matrix that concatenates them."""
    n = rows.shape[0] // 3
    if rows.shape[0] != 3 * n:
        raise ValueError("three matrices of one size")
    return rows[i * n : (i + 1) * n]


def _unit_rows(rows: Rows) -> Rows:
    """Normalise rows to length 1, as torch's normalize does."""
    length = np.sqrt(np.square(rows, dtype=np.float64).sum(-1, keepdims=True))
    return np.asarray(rows / np.maximum(length, 1e-12), np.float32)


def _packed(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for Baichuan's fused qkv; Baichuan 2 normalises the rows of its output
    matrix.
    """
    gives = {f"self_attn.{x}_proj.weight": partial(_third, i=i) for i, x in enumerate("qkv")}
    rules = [DerivationRule(("self_attn.W_pack.weight",), gives, side="B")]
    if keys.has("z_loss_weight") or keys.integer("vocab_size") == _BAICHUAN2_VOCAB:
        rules.append(
            DerivationRule(("lm_head.weight",), {"lm_head.weight": _unit_rows}, floats=True)
        )
    return rules


_BAICHUAN2_VOCAB = 125696


def _ternary(rows: Rows) -> Rows:
    """Round to -1, 0 or 1 times the mean magnitude, as bytes of BF16, as in BitNet's code."""
    scale = max(float(np.abs(rows).mean(dtype=np.float64)), 1e-5)
    found = np.clip(np.rint(rows / np.float32(scale)), -1, 1) * np.float32(scale)
    return by_name("BF16").quantize_rows(found.astype(np.float32)).reshape(rows.shape[0], -1)


def _master(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that make BitNet's master weights ternary at load, if config.json says so."""
    settings = keys.within("quantization_config")
    if settings is None:
        return ()
    mode = settings.text("quantization_mode", "offline")
    kind = settings.text("linear_class", "")
    if (mode, kind) != ("online", "autobitlinear"):
        settings.refuse(
            "quantization_mode",
            f"{mode!r:.40}: packed BitNet weights are not supported: use the master weights (the "
            "folder whose name ends in bf16)",
        )
    names = [f"self_attn.{x}_proj" for x in "qkvo"]
    names += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    return [
        DerivationRule((f"{name}.weight",), {f"{name}.weight": _ternary}, floats=True, dtype="BF16")
        for name in names
    ]


# -- names ------------------------------------------------------------------------------------

_INTERNLM2: Names = {
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
_CHATGLM: Names = {
    "embedding.word_embeddings": "token_embd",
    "encoder.final_layernorm": "output_norm",
    "output_layer": "output",
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",  # fused with its gate, which comes first
    "mlp.dense_4h_to_h": "ffn_down",
}
_GLM: Names = {**LLAMA, "mlp.gate_up_proj": "ffn_up"}
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

# -- the rows ---------------------------------------------------------------------------------

KIN: dict[str, Family] = {
    "apertus": Family(
        "apertus",
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "vocab_size": 131072,
            "max_position_embeddings": 65536,
            "rope_parameters": _APERTUS_ROPE,
        },
        {**LLAMA, "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        activation="xielu",
        numbers={f"mlp.act_fn.{key.partition('.')[2]}": key for key in NUMBERS},
    ),
    "bitnet": Family(
        "bitnet-b1.58",
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": 128256,
            "num_key_value_heads": 5,
            "max_position_embeddings": 2048,
        },
        {
            **LLAMA,
            "self_attn.attn_sub_norm": "attn_sub_norm",
            "mlp.ffn_sub_norm": "ffn_sub_norm",
        },
        activation="relu2",
        derived=_master,
        packed="bitnet",
    ),
    "internlm3": Family(
        "llama",
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "vocab_size": 128512,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "glm": Family(
        "chatglm",
        {
            **_COMMON,
            "rms_norm_eps": 1.5625e-7,
            "vocab_size": 151552,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
        },
        _GLM,
        paired=True,
    ),
    "exaone": Family(
        "exaone",
        {
            **_COMMON,
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
OWN_CODE: dict[str, Family] = {
    "internlm2": Family(
        "internlm2",
        {**_COMMON, "vocab_size": 103168, "max_position_embeddings": 2048},
        _INTERNLM2,
        derived=_grouped,
    ),
    "chatglm": Family(
        "chatglm",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "layernorm_epsilon": 1e-5,
            "seq_length": 2048,
            "kv_channels": 128,
            "partial_rotary_factor": 0.5,
        },
        _CHATGLM,
        {
            "vocab_size": "padded_vocab_size",
            "num_hidden_layers": "num_layers",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layernorm_epsilon",
        },
        only={
            "multi_query_attention": True,
            "rmsnorm": True,
            "apply_residual_connection_post_layernorm": False,
            "post_layer_norm": True,
            "original_rope": True,
        },
        paired=True,
        more=_ratio_of_base,
    ),
    "minicpm": Family(
        "minicpm",
        {
            **_COMMON,
            "tie_word_embeddings": True,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "scale_emb": 1.0,
            "scale_depth": 1.0,
            "dim_model_base": 1.0,
        },
        only=_NO_EXPERTS,
        more=_scales,
    ),
    "baichuan": Family(
        "baichuan",
        {**_COMMON, "vocab_size": 64000, "max_position_embeddings": 4096},
        derived=_packed,
    ),
    "PanguEmbedded": Family(
        "pangu-embedded",
        {**_COMMON, "rms_norm_eps": 1e-5, "vocab_size": 153376, "max_position_embeddings": 32768},
    ),
}
