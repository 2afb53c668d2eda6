"""Family rows of DeepSeek and of models with its latent attention: GLM 4 MoE Lite, Youtu, PLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, transposed
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_GATING, LEADING_DENSE
from treadle.models.graphs.indexing import INDEX_DIM, INDEX_HEADS, INDEX_TOP
from treadle.models.graphs.kinds import INDEXER_TYPES, Q_RANK
from treadle.models.graphs.latent import KEY, KV_RANK, LOG_MULTIPLIER, VALUE

# -- latent attention -----------------------------------------------------------------------------

# llama.cpp's numbers of the functions that score experts
_SOFTMAX = 1
_SIGMOID = 2
_DENSE = "dense"
_SPARSE = "sparse"


def _latent_keys(keys: MetadataReader, n_layer: int, gating: int) -> dict[str, Any]:
    """Return the keys of latent attention: all heads share one latent row of ``kv_lora_rank``
    elements plus those with RoPE. Keys with ``_mla`` are the sizes of the keys and values that it
    expands to. ``gating``: GGUF's number of the experts' gating function.
    """
    rank = keys.integer("kv_lora_rank")
    n_rope = keys.integer("qk_rope_head_dim")
    result: dict[str, Any] = {
        "attention.head_count_kv": 1,
        KV_RANK: rank,
        KEY: rank + n_rope,
        VALUE: rank,
        f"{KEY}_mla": keys.integer("qk_nope_head_dim") + n_rope,
        f"{VALUE}_mla": keys.integer("v_head_dim"),
        EXPERTS_GATING: gating,
        **_yarn_keys(keys),
    }
    # null means queries without the low-rank step; a missing key means the default
    if keys.values.get("q_lora_rank", keys.defaults.get("q_lora_rank")) is not None:
        result[Q_RANK] = keys.integer("q_lora_rank")
    return result


def _yarn_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return YaRN's keys if ``mscale_all_dim`` is set: its factor then scales attention scores, not
    cosines and sines as in other families.
    """
    rope = keys.within("rope_parameters") or keys.within("rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default")) if rope else "default"
    if rope is None or kind == "default":
        return {}
    if kind not in ("yarn", "deepseek_yarn"):
        if rope.get("mscale_all_dim"):
            rope.refuse("mscale_all_dim", f"treadle supports it only with yarn, not {kind!r:.60}")
        return {}
    if rope.get("attention_factor") is not None:
        rope.refuse("attention_factor", "treadle supports only mscale_all_dim in this architecture")
    ours, theirs = (rope.number(k, 0.0, lo=0.0, hi=1e6) for k in ("mscale_all_dim", "mscale"))
    if ours != theirs:
        rope.refuse("mscale", f"is {theirs:g}: expected the same as mscale_all_dim, {ours:g}")
    if not ours:  # default scaling, as in other architectures
        return {}
    return {"rope.scaling.attn_factor": 1.0, LOG_MULTIPLIER: f32(0.1 * ours)}


def _v2_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return DeepSeek V2's keys. With a ``topk_method`` of "greedy" experts are in one group,
    whatever number of groups config.json gives. Raises UnsupportedError for other methods than it
    and "group_limited_greedy".
    """
    result = _latent_keys(keys, n_layer, _SOFTMAX)
    method = keys.text("topk_method", "greedy")
    if method == "greedy":
        result |= {"expert_group_count": 1, "expert_group_used_count": 1}
    elif method != "group_limited_greedy":
        keys.refuse("topk_method", f"{method!r:.60}: treadle supports greedy, group_limited_greedy")
    return result


def _v3_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return _latent_keys(keys, n_layer, _SIGMOID)


def _glm_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {**_v3_keys(keys, n_layer), **listed_kinds(keys, n_layer)}


def listed_kinds(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of the number of leading dense layers from ``mlp_layer_types``, a list of
    kinds that transformers writes; {} without it. Raises UnsupportedError if a dense layer follows
    a sparse one.
    """
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        return {}
    n_dense = kinds.count(_DENSE) if isinstance(kinds, list) else 0
    if kinds != [_DENSE] * n_dense + [_SPARSE] * (n_layer - n_dense):
        what = f"treadle supports only a list of {n_layer}, {_DENSE} before {_SPARSE}"
        keys.refuse("mlp_layer_types", f"is {kinds!r:.60}: {what}")
    return {"leading_dense_block_count": n_dense}


def _heads(rows: Rows, n_head: int, n_v: int) -> Rows:
    """Return the rows of ``kv_b_proj`` as [n_head, n_nope + n_v, rank]: for each head ``n_nope``
    rows of keys, then ``n_v`` of values.
    """
    heads = rows.reshape(n_head, -1, rows.shape[-1])
    if heads.shape[1] <= n_v:
        raise ValueError("no rows are left for keys")
    return heads


def _k_b(rows: Rows, n_head: int, n_v: int) -> Rows:
    """Return the key part of ``kv_b_proj``, [n_head, rank, n_nope]: transposed, because it is
    applied to queries. ``n_v``: rows of values per head.
    """
    return transposed(_heads(rows, n_head, n_v)[:, :-n_v])


def _v_b(rows: Rows, n_head: int, n_v: int) -> Rows:
    return _heads(rows, n_head, n_v)[:, -n_v:]


def head_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the rule that splits ``kv_b_proj`` into its key part ``k_b`` and its value part
    ``v_b``.
    """
    n_head = keys.integer("num_attention_heads")
    n_v = keys.integer("v_head_dim")
    gives = {
        "self_attn.k_b.weight": partial(_k_b, n_head=n_head, n_v=n_v),
        "self_attn.v_b.weight": partial(_v_b, n_head=n_head, n_v=n_v),
    }
    return (DerivationRule(("self_attn.kv_b_proj.weight",), gives),)


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return *head_rules(keys), scores("mlp.gate.e_score_correction_bias", "mlp.score")


LATENT_NAMES: Names = {
    **LLAMA_EXPERTS,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b": "attn_k_b",
    "self_attn.v_b": "attn_v_b",
}

_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_ONLY = {"moe_layer_freq": 1, "rope_interleave": True}


def _family(defaults: Mapping[str, Any], only: Mapping[str, Any], **own: Any) -> Family:
    return Family(
        "deepseek2",
        {**_DEFAULTS, **defaults},
        LATENT_NAMES,
        {"head_dim": "qk_rope_head_dim"},  # the part with RoPE
        paired=True,
        only={**_ONLY, **only},
        experts=True,
        derived=_rules,
        **own,
    )


_V3_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_N_MTP = "num_nextn_predict_layers"

# -- the indexer ----------------------------------------------------------------------------------

INDEXED_NAMES: Names = {
    **LATENT_NAMES,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
FULL = "full"
_SHARED = "shared"


def index_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return the keys of an indexer: the number of its heads, their size, and how many tokens it
    selects.
    """
    return {
        INDEX_HEADS: keys.integer("index_n_heads"),
        INDEX_DIM: keys.integer("index_head_dim"),
        INDEX_TOP: keys.integer("index_topk"),
    }


def indexer_types(keys: MetadataReader, n_layer: int, kinds: Any) -> dict[str, Any]:
    """Return the key with a flag per layer: whether it has an indexer of its own. {} if all have
    one; the others reuse the selection of an earlier layer. ``kinds``: "full" or "shared" for each
    layer. Raises UnsupportedError for other lists.
    """
    names = FULL, _SHARED
    if not isinstance(kinds, list) or len(kinds) != n_layer or not all(k in names for k in kinds):
        keys.refuse("indexer_types", f"is {kinds!r:.60}: expected {n_layer} of {FULL}, {_SHARED}")
    return {INDEXER_TYPES: [kind == FULL for kind in kinds]} if _SHARED in kinds else {}


def _indexed_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of latent attention and of its indexer."""
    kinds = keys.get("indexer_types")
    if kinds is None:
        kinds = _kinds_by_rule(keys, n_layer)
    return {
        **_glm_keys(keys, n_layer),
        **index_keys(keys),
        **indexer_types(keys, n_layer, kinds),
    }


def _kinds_by_rule(keys: MetadataReader, n_layer: int) -> list[str]:
    """Return each layer's kind of indexer, "full" or "shared", for a config.json with
    ``index_topk_pattern`` or ``index_topk_freq`` in place of a list.
    """
    pattern = keys.get("index_topk_pattern")
    if pattern is not None:
        names = {"F": FULL, "S": _SHARED}
        return [names.get(kind, kind) for kind in pattern] if isinstance(pattern, str) else pattern
    every = keys.integer("index_topk_freq", 1, lo=1)
    offset = keys.integer("index_skip_topk_offset", 2, lo=0)
    return [_SHARED if max(i - offset + 1, 0) % every else FULL for i in range(n_layer)]


def _indexed(arch: str, defaults: Mapping[str, Any]) -> Family:
    """Return a family with DeepSeek V3's layers and an indexer, of GGUF architecture ``arch``.
    ``defaults``: as in ``Family``, besides those of DeepSeek V3.
    """
    common = {"index_head_dim": 128, "index_topk": 2048}
    family = _family({**common, **defaults}, _V3_ONLY, extra_layers=_N_MTP, more=_indexed_keys)
    return replace(family, arch=arch, names=INDEXED_NAMES)


# -- the rows -------------------------------------------------------------------------------------

DEEPSEEK_FAMILIES: dict[str, Family] = {
    "deepseek_v2": _family(
        {
            "vocab_size": 102400,
            "max_position_embeddings": 2048,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "n_group": None,
            "topk_group": None,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        {"norm_topk_prob": False, "scoring_func": "softmax"},
        more=_v2_keys,
    ),
    "deepseek_v3": _family(
        {
            "vocab_size": 129280,
            "max_position_embeddings": 4096,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        _V3_ONLY,
        extra_layers=_N_MTP,
        more=_v3_keys,
    ),
    "deepseek_v32": _indexed(
        "deepseek32",
        {
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "index_n_heads": 64,
        },
    ),
    "glm_moe_dsa": _indexed(
        "glm-dsa",
        {
            "rms_norm_eps": 1e-5,
            "vocab_size": 154880,
            "max_position_embeddings": 202752,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "index_n_heads": 32,
        },
    ),
    "glm4_moe_lite": _family(
        {
            "rms_norm_eps": 1e-5,
            "vocab_size": 154880,
            "max_position_embeddings": 202752,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
        },
        _V3_ONLY,
        extra_layers=_N_MTP,
        more=_glm_keys,
    ),
    "deepseek": Family(
        "deepseek",
        {
            **COMMON,
            "vocab_size": 102400,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "n_shared_experts": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        LLAMA_EXPERTS,
        only={"moe_layer_freq": 1, "scoring_func": "softmax"},
        experts=True,
    ),
}

# -- keys and values from a joint matrix; Youtu ---------------------------------------------------

JOINT_NAMES = {
    **{name: stem for name, stem in LATENT_NAMES.items() if stem not in ("attn_k_b", "attn_v_b")},
    "self_attn.kv_b_proj": "attn_kv_b",
}
ROPE_DIM = {"head_dim": "qk_rope_head_dim"}
_V3 = DEEPSEEK_FAMILIES["deepseek_v3"]


def joint_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return the keys of latent attention for a file that has ``kv_b_proj`` as one matrix: the
    sizes of the expanded keys and values, which llama.cpp then caches in place of latent rows.
    Raises UnsupportedError if YaRN scales attention scores (``mscale_all_dim``).
    """
    rope = keys.within("rope_parameters") or keys.within("rope_scaling")
    # transformers scales attention scores by it.
    if rope is not None and rope.get("mscale_all_dim"):
        rope.refuse("mscale_all_dim", "not supported in this architecture")
    n_head = keys.integer("num_attention_heads")
    n_v = max(1, keys.integer("hidden_size") // n_head)
    made: dict[str, Any] = {
        "attention.head_count_kv": n_head,
        KV_RANK: keys.integer("kv_lora_rank"),
        KEY: keys.integer("qk_nope_head_dim") + keys.integer("qk_rope_head_dim"),
        VALUE: keys.integer("v_head_dim", n_v),
    }
    # null means queries without the low-rank step; a missing key means the default
    if keys.values.get("q_lora_rank", keys.defaults.get("q_lora_rank")) is not None:
        made[Q_RANK] = keys.integer("q_lora_rank")
    return made


def _attention_defaults(family: Family) -> dict[str, Any]:
    """Return the family's defaults for attention, norm and RoPE, without those of experts."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return {key: family.defaults[key] for key in (*names, "rms_norm_eps", "rope_theta")}


def _dense(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys for a model without experts; llama.cpp still requires some expert keys."""
    made = _V3.more(keys, n_layer)
    del made[EXPERTS_GATING]
    width = keys.integer("intermediate_size")
    return {
        **made,
        LEADING_DENSE: n_layer,
        "expert_feed_forward_length": width,
        "expert_shared_count": 0,
    }


DEEPSEEK_FAMILIES |= {
    "plm": Family(
        "plm",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": None,
        },
        JOINT_NAMES,
        ROPE_DIM,
        activation="relu2",
        paired=True,
        only={"rope_interleave": True},
        more=lambda keys, n_layer: joint_keys(keys),
    ),
    "youtu": replace(
        _V3,
        defaults={
            **_attention_defaults(_V3),
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
        },
        only={"rope_interleave": True},
        extra_layers="",
        more=_dense,
    ),
}
