"""Family row of DeepSeek V4: several residual streams, compressed KV caches, experts chosen by
token id in the first layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.convert.hf.families.deepseek import index_keys
from treadle.convert.hf.families.experts import PACKED_EXPERTS, scores
from treadle.convert.hf.families.streams import (
    STREAM_NAMES,
    manifold_keys,
    stream_rules,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, same
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import WINDOW
from treadle.models.graphs.compressed import (
    OUT_GROUPS,
    OUT_RANK,
    OVERLAPPING,
    RATIOS,
    TOKEN_LAYERS,
    UNIT_BASE,
)
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.limits import LIMIT, SHARED_LIMIT
from treadle.models.graphs.nextn import STREAM_PARTS

_SLIDING = "sliding_attention"
_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_KINDS = (_SLIDING, _SPARSE, _HEAVY)
_BY_TOKEN = "hash_moe"
_BY_ROUTER = "moe"
_RATES = {_SPARSE: OVERLAPPING, _HEAVY: 128}


def _normalize_keys(keys: MetadataReader) -> Mapping[str, Any]:
    """Return the keys as published folders have them. transformers' own folders have two sets of
    RoPE parameters: the base of "main" becomes ``rope_theta``; "compress" (layers with compressed
    units) gives ``compress_rope_theta`` and the scaling.
    """
    values = dict(keys.values)
    head_dim = keys.integer("head_dim")
    if {"qk_rope_head_dim", "partial_rotary_factor"} & values.keys() == {"qk_rope_head_dim"}:
        values["partial_rotary_factor"] = keys.integer("qk_rope_head_dim", hi=head_dim) / head_dim
    ropes = keys.within("rope_parameters")
    units = ropes.within("compress") if ropes is not None else None
    if ropes is None or units is None:
        return values
    main = ropes.within("main")
    if main is not None:
        if main.text("rope_type", "default") != "default":
            main.refuse("rope_type", "treadle supports scaling only in layers with units")
        values["rope_theta"] = main.number(
            "rope_theta", keys.number("rope_theta", lo=1.001), lo=1.001
        )
    if units.number("attention_factor", 1.0, lo=0.0) != 1.0:
        units.refuse("attention_factor", "treadle supports only 1")
    values["compress_rope_theta"] = units.number(
        "rope_theta", keys.number("compress_rope_theta", lo=1.001), lo=1.001
    )
    dropped = ("rope_theta", "attention_factor", "partial_rotary_factor")
    rest = {key: value for key, value in units.values.items() if key not in dropped}
    values.setdefault("partial_rotary_factor", units.values.get("partial_rotary_factor"))
    values["rope_parameters"] = None
    values["rope_scaling"] = None if rest.get("rope_type", "default") == "default" else rest
    return values


def _ratios(keys: MetadataReader, n_layer: int) -> list[int]:
    """Return for each layer how many tokens one compressed unit stands for; 0: no units."""
    kinds = keys.get("layer_types")
    listed = keys.get("compress_ratios")
    if kinds is None and isinstance(listed, list) and len(listed) >= n_layer:
        return listed[:n_layer]
    if kinds is None:  # transformers' default
        kinds = [_HEAVY] * min(n_layer, 2) + [
            _SPARSE if i % 2 else _HEAVY for i in range(n_layer - 2)
        ]
    names = [*_KINDS]
    if not isinstance(kinds, list) or len(kinds) != n_layer or not all(k in names for k in kinds):
        keys.fail("layer_types", f"is {kinds!r:.60}", f"{n_layer} of {', '.join(_KINDS)}")
    rates = keys.within("compress_rates")
    of = {_SLIDING: 0}
    for kind, short in ((_SPARSE, "csa"), (_HEAVY, "hca")):
        usual = rates.integer(kind, _RATES[kind], lo=2) if rates is not None else _RATES[kind]
        of[kind] = keys.integer(f"compress_rate_{short}", usual, lo=2)
    if of[_SPARSE] != OVERLAPPING:
        keys.refuse("compress_rates", f"{_SPARSE} {of[_SPARSE]}: treadle supports {OVERLAPPING}")
    return [of[kind] for kind in kinds]


def _by_token(keys: MetadataReader, n_layer: int) -> int:
    """Return the number of leading layers whose experts a table chooses by token id."""
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        return keys.integer("num_hash_layers", min(3, n_layer), lo=0, hi=n_layer)
    n = kinds.count(_BY_TOKEN) if isinstance(kinds, list) else 0
    if kinds != [_BY_TOKEN] * n + [_BY_ROUTER] * (n_layer - n):
        what = f"treadle supports only a list of {n_layer}, {_BY_TOKEN} before {_BY_ROUTER}"
        keys.refuse("mlp_layer_types", f"is {kinds!r:.60}: {what}")
    return n


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    limit = [f32(keys.number("swiglu_limit", lo=0.0))] * n_layer
    return {
        WINDOW: keys.integer("sliding_window", hi=POSITION_MAX),
        Q_RANK: keys.integer("q_lora_rank"),
        RATIOS: _ratios(keys, n_layer),
        UNIT_BASE: f32(keys.number("compress_rope_theta", lo=1.001)),
        OUT_GROUPS: keys.integer("o_groups"),
        OUT_RANK: keys.integer("o_lora_rank"),
        **index_keys(keys),
        TOKEN_LAYERS: _by_token(keys, n_layer),
        **manifold_keys(keys),
        LIMIT: limit,
        SHARED_LIMIT: limit,
        "embedding_length_out": keys.integer("hidden_size") * keys.integer("hc_mult"),
    }


def _numbers(rows: Rows) -> Rows:
    """Return integers [.., n] of any width as the bytes of i32, uint8 [.., 4 * n]."""
    wide = np.ascontiguousarray(rows).view(f"<i{rows.dtype.itemsize}")
    return np.ascontiguousarray(wide.astype("<i4")).view(np.uint8).reshape(*rows.shape[:-1], -1)


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_layer = keys.integer("num_hidden_layers")
    n = _by_token(keys, n_layer)
    renamed = {
        "attn.attn_sink": "sinks",
        "self_attn.sinks": "sinks",
        "attn.compressor.ape": "compressor_ape",
        "self_attn.compressor.position_bias": "compressor_ape",
        "attn.indexer.compressor.ape": "indexer_ape",
        "self_attn.compressor.indexer.position_bias": "indexer_ape",
    }
    rules = [DerivationRule((name,), {f"{to}.weight": same}) for name, to in renamed.items()]
    rules += stream_rules("hc_{half}_{part}", "{half}_hc.{part}")
    for name in ("hc_head_{}", "hc_{}"):  # of the checkpoint, and of transformers
        rules += [
            DerivationRule((name.format(part),), {f"hc_out.{part}.weight": same})
            for part in STREAM_PARTS
        ]
    for stem in ("ffn.gate", "mlp.gate"):
        rules.append(
            DerivationRule(
                (f"{stem}.tid2eid",), {"experts_by_token.weight": _numbers}, dtype="I32", whole=True
            )
        )
    bias = "ffn.gate.bias"
    return (
        *rules,
        DerivationRule((bias,), {}, last_layer=n - 1),  # it is unused there
        scores(bias, "mlp.score"),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        DerivationRule(("ffn.gate.bias_vl",), {"mlp.score_vl.bias": same}),
        *PACKED_EXPERTS,
    )


_ATTENTION = {
    "wq_a q_a_proj": "attn_q_a",
    "q_norm q_a_norm": "attn_q_a_norm",
    "wq_b q_b_proj": "attn_q_b",
    "wkv kv_proj": "attn_kv",
    "norm kv_norm": "attn_kv_a_norm",
    "wo_a o_a_proj": "attn_output_a",
    "wo_b o_b_proj": "attn_output_b",
    "compressor.wkv compressor.kv_proj": "attn_compressor_kv",
    "compressor.wgate compressor.gate_proj": "attn_compressor_gate",
    "compressor.norm compressor.kv_norm": "attn_compressor_norm",
    "indexer.wq_b compressor.indexer.q_b_proj": "indexer.attn_q_b",
    "indexer.weights_proj compressor.indexer.scorer.weights_proj": "indexer.proj",
    "indexer.compressor.wkv compressor.indexer.kv_proj": "indexer_compressor_kv",
    "indexer.compressor.wgate compressor.indexer.gate_proj": "indexer_compressor_gate",
    "indexer.compressor.norm compressor.indexer.kv_norm": "indexer_compressor_norm",
}
_EXPERTS = {"w1 gate_proj": "gate", "w2 down_proj": "down", "w3 up_proj": "up"}
_NAMES: Names = {
    "embed": "token_embd",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "lm_head": "output",
    "attn_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{
        f"{at}.{word}": to
        for words, to in _ATTENTION.items()
        for word in words.split()
        for at in ("attn", "self_attn")
    },
    **{
        f"{at}.{part}.{word}": f"ffn_{to}_{end}"
        for words, to in _EXPERTS.items()
        for word in words.split()
        for at in ("ffn", "mlp")
        for part, end in (("experts", "exps"), ("shared_experts", "shexp"))
    },
    "ffn.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.score": "exp_probs_b",
    "mlp.score_vl": "exp_probs_b_vl",
    "experts_by_token": "ffn_gate_tid2eid",
    "sinks": "attn_sinks",
    "compressor_ape": "attn_compressor_ape",
    "indexer_ape": "indexer_compressor_ape",
    **STREAM_NAMES,
    **{
        f"{at}hc_out.{part}": f"output_hc_{part}"
        for part in STREAM_PARTS
        for at in ("", "hc_head.")
    },
}

DEEPSEEK4_FAMILIES = {
    "deepseek_v4": Family(
        "deepseek4",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 129280,
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "partial_rotary_factor": 64 / 512,
            "max_position_embeddings": 1048576,
            "num_experts_per_tok": 6,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 1024,
            "compress_rope_theta": 160000.0,
            "compress_rates": None,
            "compress_ratios": None,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
        },
        _NAMES,
        {"intermediate_size": "moe_intermediate_size"},
        paired=True,
        only={
            "scoring_func": "sqrtsoftplus",
            "num_key_value_heads": 1,
            "norm_topk_prob": True,
            "attention_bias": False,
            "mlp_bias": False,
            "topk_method": "noaux_tc",
        },
        experts=True,
        normalize_keys=_normalize_keys,
        derived=_rules,
        more=_keys,
    )
}
