"""Family row of A.X K2: DeepSeek V3.2's layers with gates (``models/graphs/axk.py``).

One matrix of the checkpoint makes queries (from the normed low-rank vector) and gates (from that
vector before its norm). Its columns are both inputs side by side, with zeros where a row ignores
one. GGUF has two matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES
from treadle.convert.hf.families.experts import PACKED_EXPERTS
from treadle.convert.sources.derived_tensors import DerivationRule, Rows
from treadle.errors import UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.axk import NORM_RANK

_V32 = DEEPSEEK_FAMILIES["deepseek_v32"]
_FUSED = "q_b_proj", "q_gate_proj"  # as published, and as transformers' class has it


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {**_V32.more(keys, n_layer), NORM_RANK: keys.integer(NORM_RANK, lo=1)}


def _part(rows: Rows, n_head: int, n_v: int, *, gates: bool) -> Rows:
    """Return the query rows (or gate rows) of all heads, with only the half of the columns that
    they read. The last ``n_v`` rows of each head are gates. Raises UnsupportedError if the other
    half of the columns is not zero.
    """
    heads = rows.reshape(n_head, -1, rows.shape[-1])
    if heads.shape[1] <= n_v or rows.shape[-1] % 2:
        raise ValueError("no rows are left for queries")
    mine = heads[:, -n_v:] if gates else heads[:, :-n_v]
    mine = mine.reshape(-1, rows.shape[-1])
    rank = rows.shape[-1] // 2
    own, other = (mine[:, rank:], mine[:, :rank]) if gates else (mine[:, :rank], mine[:, rank:])
    if other.view("u1").any():
        raise UnsupportedError(
            "self_attn.q_b_proj.weight: queries read the rank before its norm, or gates the normed "
            "one: not supported"
        )
    return own


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    sizes = keys.integer("num_attention_heads"), keys.integer("v_head_dim")
    gives = {
        "self_attn.queries.weight": partial(_part, n_head=sizes[0], n_v=sizes[1], gates=False),
        "self_attn.gates.weight": partial(_part, n_head=sizes[0], n_v=sizes[1], gates=True),
    }
    fused = (DerivationRule((f"self_attn.{name}.weight",), gives) for name in _FUSED)
    return (*_V32.derived(keys), *fused, *PACKED_EXPERTS)


_NORMS = {
    f"{norm}.{at}": f"{stem}{suffix}"
    for norm, stem in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))
    for at, suffix in {
        "norm": "",
        "W_down": "_gate_down",
        "W_up": "_gate_up",
        "mlp.fc1": "_gate_down",
        "mlp.fc2": "_gate_up",
    }.items()
}
AXK_FAMILIES = {
    "axk2": replace(
        _V32,
        arch="axk2",
        defaults={
            **_V32.defaults,
            "vocab_size": 163840,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 131072,
            "kv_lora_rank": 128,
            "q_lora_rank": 384,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "moe_intermediate_size": 512,
            "n_routed_experts": 128,
            "n_group": None,
            "topk_group": None,
            "first_k_dense_replace": 1,
            "index_n_heads": 16,
            NORM_RANK: 16,
        },
        names={
            **_V32.names,
            **_NORMS,
            "self_attn.queries": "attn_q_b",
            "self_attn.gates": "attn_gate",
        },
        derived=_rules,
        more=_keys,
    ),
}
