"""Family row of Inkling's text model (``models/graphs/inkling.py``), for published folders and for
those that transformers writes.

llama.cpp has no such architecture: keys and names are those of the forks whose files are published.
The vision and audio encoders and the layers for multi-token prediction are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, always, leading_dense, scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, flat, same, taps
from treadle.files.metadata import POSITION_MAX, SIZE_MAX, MetadataReader
from treadle.models.graphs import inkling
from treadle.models.graphs.inkling import REACH_MAX

_LOCAL = "hybrid_sliding"
_KINDS = {
    _LOCAL: "sliding_attention",
    "sliding_attention": "sliding_attention",
    "hybrid": "full_attention",
    "full_attention": "full_attention",
}
_SPELLINGS = {  # of published folders, by transformers'
    "conv_kernel_size": "sconv_kernel_size",
    "sliding_window": "sliding_window_size",
    "max_position_embeddings": "model_max_length",
}


def _normalize_keys(keys: MetadataReader) -> Mapping[str, Any]:
    """Return config.json's keys under transformers' names, with head counts as lists with one per
    layer. Raises UnsupportedError if head sizes differ between kinds of layers.
    """
    values = dict(keys.values)
    for name, older in _SPELLINGS.items():
        if values.get(older) is not None:
            values[name] = values[older]
    if values.get("dense_intermediate_size") is not None:
        values["moe_intermediate_size"] = values.get("intermediate_size")
        values["intermediate_size"] = values["dense_intermediate_size"]
    n_layer = keys.integer("num_hidden_layers")
    local = _local(keys, n_layer)
    values["layer_types"] = [_KINDS[_LOCAL if here else "hybrid"] for here in local]
    for name in ("num_attention_heads", "num_key_value_heads"):
        both = keys.integer(f"swa_{name}"), keys.integer(name)
        values[name] = [both[0] if here else both[1] for here in local]
    if keys.integer("swa_head_dim") != keys.integer("head_dim"):
        keys.refuse("swa_head_dim", "differs from head_dim: not supported")
    return values


def _local(keys: MetadataReader, n_layer: int) -> list[bool]:
    """Return a flag per layer: whether it has a window. By default all but every sixth layer have
    one.
    """
    kinds = keys.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layer:
            keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
        for kind in kinds:
            if kind not in [*_KINDS]:  # it may be no key of a table
                keys.refuse("layer_types", f"{kind!r:.60}: treadle supports {', '.join(_KINDS)}")
        return [_KINDS[kind] == _KINDS[_LOCAL] for kind in kinds]
    listed = keys.get("local_layer_ids")
    if listed is None:
        return [(i + 1) % 6 != 0 for i in range(n_layer)]
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        keys.fail("local_layer_ids", f"is {listed!r:.60}", "a list of layers")
    return [i in listed for i in range(n_layer)]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    window = keys.integer("sliding_window", lo=1, hi=REACH_MAX)
    dense = keys.integer("dense_mlp_idx", 0, lo=0)
    if keys.get("mlp_layer_types") is not None:
        dense = leading_dense(keys, n_layer, 0)
    n_vocab = keys.integer("vocab_size")
    named = keys.get("unpadded_vocab_size")
    floor = keys.get("log_scaling_n_floor")
    return {
        "expert_weights_scale": f32(keys.number("route_scale", lo=0.0)),
        inkling.RANK: keys.integer("d_rel", lo=1, hi=SIZE_MAX),
        inkling.REACH: keys.integer("rel_extent", lo=1, hi=REACH_MAX),
        inkling.LOCAL_REACH: window,
        inkling.TAPS: keys.integer("conv_kernel_size", lo=2),
        inkling.N_DENSE: dense,
        inkling.DIVISOR: f32(keys.number("logits_mup_width_multiplier", lo=1e-9)),
        inkling.FLOOR: 0 if floor is None else keys.integer("log_scaling_n_floor", hi=POSITION_MAX),
        inkling.ALPHA: f32(keys.number("log_scaling_alpha", lo=0.0)),
        inkling.UNPADDED_VOCAB: n_vocab
        if named is None
        else keys.integer("unpadded_vocab_size", hi=n_vocab),
    }


def even(rows: Rows) -> Rows:
    """Return every other row of each matrix, from the first on."""
    return rows[..., 0::2, :]


def odd(rows: Rows) -> Rows:
    """Return every other row of each matrix, from the second on."""
    return rows[..., 1::2, :]


def _in_pairs(of: str, at: str) -> DerivationRule:
    """Return the rule that splits the tensor ``of``, whose rows alternate between gate and up, into
    "{at}gate_proj.weight" and "{at}up_proj.weight".
    """
    gives = {f"{at}gate_proj.weight": even, f"{at}up_proj.weight": odd}
    return DerivationRule((of,), gives, side="B")


_SHARED = "mlp.shared_experts."
_RULES = (
    *(
        DerivationRule((name,), {f"{to}.weight": taps})
        for to, names in {
            "k_taps": ("attn.k_sconv.weight", "self_attn.k_sconv.conv1d.weight"),
            "v_taps": ("attn.v_sconv.weight", "self_attn.v_sconv.conv1d.weight"),
            "attn_taps": ("attn_sconv.weight", "attn_sconv.conv1d.weight"),
            "mlp_taps": ("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
        }.items()
        for name in names
    ),
    *(
        DerivationRule((f"{at}.rel_logits_proj.proj",), {"rel_proj.weight": same})
        for at in ("attn", "self_attn")
    ),
    *(
        DerivationRule((name,), {"factor.weight": flat})
        for name in ("mlp.global_scale", "mlp.gate.global_scale")
    ),
    _in_pairs("mlp.w13_dn.weight", "mlp."),
    _in_pairs("mlp.experts.w13_weight", "mlp.experts."),
    _in_pairs(f"{_SHARED}shared_w13_weight", _SHARED),
    DerivationRule(("mlp.experts.w2_weight",), {"mlp.experts.down_proj.weight": same}),
    DerivationRule((f"{_SHARED}shared_w2_weight",), {f"{_SHARED}down_proj.weight": same}),
    *(
        DerivationRule((f"{_SHARED}{one}_proj",), {f"{_SHARED}{one}_proj.weight": same})
        for one in ("gate", "up", "down")
    ),
    scores("mlp.gate.bias", "mlp.score"),
    scores("mlp.gate.e_score_correction_bias", "mlp.score"),
    *PACKED_EXPERTS,
)
_NAMES: Names = {
    **LLAMA_EXPERTS,
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "embed_tokens.embed_norm": "token_embd_norm",
    "unembed": "output",
    "self_attn.r_proj": "attn_r",
    **{f"attn.w{x}": f"attn_{x[0]}" for x in ("q_du", "k_dv", "v_dv", "r_du")},
    "attn.wo_ud": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "mlp.w2_md": "ffn_down",
    "k_taps": "shortconv_k",
    "v_taps": "shortconv_v",
    "attn_taps": "shortconv_attn",
    "mlp_taps": "shortconv_mlp",
    "rel_proj": "attn_rel_proj",
    "factor": "ffn_gscale",
}
INKLING_FAMILIES: dict[str, Family] = {
    "inkling_text": Family(
        "inkling",
        {
            "vocab_size": 201024,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "moe_intermediate_size": 3072,
            "num_hidden_layers": 66,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 16,
            "swa_head_dim": 128,
            "sliding_window": 512,
            "d_rel": 16,
            "rel_extent": 1024,
            "log_scaling_n_floor": None,
            "log_scaling_alpha": 0.1,
            "local_layer_ids": None,
            "layer_types": None,
            "mlp_layer_types": None,
            "dense_mlp_idx": None,
            "unpadded_vocab_size": None,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "conv_kernel_size": 4,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "route_scale": 8.0,
            "logits_mup_width_multiplier": 24.0,
            "tie_word_embeddings": False,
        },
        _NAMES,
        windowed=_local,
        normalize_keys=_normalize_keys,
        only={
            "shared_expert_sink": True,
            "gate_activation": "sigmoid",
            "norm_after_topk": True,
            "use_sconv": True,
            "use_embed_norm": True,
            "use_gate_bias": True,
            "use_global_scale": True,
            "q_bias": False,
            "o_bias": False,
            "final_logit_softcapping": None,
        },
        experts=True,
        derived=always(*_RULES),
        more=_keys,
    ),
}
