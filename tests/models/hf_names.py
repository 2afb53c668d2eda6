"""What each family of ``transformers`` calls its tensors, and what a converter does to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]

LLAMA = {  # GGUF's stems, by transformers' names
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
POST_NORMS = {  # more norms a layer: the same words, other places
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI3 = {**LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
NEOX = {
    "embed_in": "token_embd",
    "final_layer_norm": "output_norm",
    "embed_out": "output",
    "lm_head": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GPT2 = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
NOMIC_BERT = {
    **LLAMA,
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
}


def halves_to_pairs(rows: Rows, n_head: int) -> Rows:
    """Reorder each head's rows: transformers turns (i, i + d/2) together, llama.cpp (2i, 2i+1)."""
    halves = rows.reshape(n_head, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def pairs(config: Any, stem: str, rows: Rows) -> Rows:
    """Llama's queries and keys."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stem)
    return halves_to_pairs(rows, getattr(config, heads)) if heads else rows


def more_by_one(config: Any, stem: str, rows: Rows) -> Rows:
    """Gemma multiplies by 1 + weight, GGUF by weight."""
    return rows + 1.0 if "norm" in stem else rows


def side_by_side(config: Any, stem: str, rows: Rows) -> Rows:
    """GPT-NeoX has each head's query, key and value together."""
    if stem != "attn_qkv":
        return rows
    heads = rows.reshape(config.num_attention_heads, 3, -1, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)


def turned(config: Any, stem: str, rows: Rows) -> Rows:
    """GPT-2's matrices are [in, out]."""
    return np.ascontiguousarray(rows.T) if rows.ndim == 2 and "embd" not in stem else rows


def as_it_is(config: Any, stem: str, rows: Rows) -> Rows:
    return rows


@dataclass(frozen=True)
class Family:
    """``convert(config, stem, rows)`` gives what GGUF has of a tensor."""

    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    convert: Callable[[Any, str, Rows], Rows] = as_it_is


FAMILIES = {
    "Llama": Family(convert=pairs),
    "Mistral": Family(convert=pairs),
    "Ministral3": Family(convert=pairs),
    "Gemma": Family(convert=more_by_one),
    "Gemma3": Family(POST_NORMS, more_by_one),
    "Exaone4": Family(POST_NORMS),
    "Phi3": Family(PHI3),
    "GPTNeoX": Family(NEOX, side_by_side),
    "GPT2": Family(GPT2, turned),
    "NomicBert": Family(NOMIC_BERT),
}
PLAIN = Family()
NAME = re.compile(
    r"(?:model\.|transformer\.|gpt_neox\.)?(?:(?:layers|h)\.(\d+)\.)?(.*)\.(weight|bias)"
)


def gguf_name(family: str, name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    match = NAME.fullmatch(name)
    assert match, name
    stem = FAMILIES.get(family, PLAIN).names[match[2]]
    return f"blk.{match[1]}.{stem}.{match[3]}" if match[1] else f"{stem}.{match[3]}"
