"""Family rows of InternLM 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.files.metadata import MetadataReader


def _of_group(rows: Rows, n_group: int, head_dim: int, part: slice) -> Rows:
    """Select rows of InternLM 2's fused qkv, which has ``n_group`` groups of heads of ``head_dim``
    rows, one group per key head: its queries, the key and the value. ``part``: the heads to select
    in each group.
    """
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

INTERNLM_FAMILIES: dict[str, Family] = {
    "internlm3": Family(
        "llama",
        {
            **COMMON,
            "rms_norm_eps": 1e-5,
            "vocab_size": 128512,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "internlm2": Family(
        "internlm2",
        {**COMMON, "vocab_size": 103168, "max_position_embeddings": 2048},
        _INTERNLM2,
        derived=_grouped,
    ),
}
