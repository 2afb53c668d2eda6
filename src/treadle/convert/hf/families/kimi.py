"""Family rows of Kimi Linear and Kimi K3. Kimi Linear's published folder has its own names of some
keys; transformers reads those, and writes both kinds. transformers has no class for K3: its text
part has Kimi Linear's ``model_type``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES, listed_kinds
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.families.kda import (
    decay_of_heads,
    kda_config,
    kda_names,
    kda_rules,
    kda_sizes,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names, experts_123
from treadle.convert.hf.windows import ATTENTION
from treadle.convert.sources.derived_tensors import DerivationRule, Make, Rows, decay, same
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM
from treadle.models.graphs.kimi_k3 import BLOCK, BOUND, BOUND_UP, EXPERT_WIDTH
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.latent import KEY, KV_RANK, VALUE
from treadle.models.graphs.recurrence import KDA_FLOOR

_LATENT = DEEPSEEK_FAMILIES["deepseek_v3"]
_FULL = ATTENTION[0]
_EVERY = 4
_STATE = "linear_attention"
_MOE = "block_sparse_moe."
# The published folder's keys; those of transformers are read as in other families.
EXPERT_COUNTS = {
    "expert_used_count": "num_experts_per_token",
    "expert_shared_count": "num_shared_experts",
    "expert_group_count": "num_expert_group",
}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    inner = kda_config(keys)
    rank = keys.integer("kv_lora_rank")
    n_rope = keys.integer("qk_rope_head_dim")
    result: dict[str, Any] = {
        "attention.head_count_kv": [int(flag) for flag in _attends(keys, inner, n_layer)],
        KV_RANK: rank,
        KEY: rank + n_rope,
        VALUE: rank,
        f"{KEY}_mla": keys.integer("qk_nope_head_dim") + n_rope,
        f"{VALUE}_mla": keys.integer("v_head_dim"),
        "rope.dimension_count": n_rope,
        **kda_sizes(keys, heads=32, head_dim=128),
        **listed_kinds(keys, n_layer),
    }
    if keys.get("q_lora_rank") is not None:
        result[Q_RANK] = keys.integer("q_lora_rank")
    counted = EXPERT_COUNTS.items()
    result |= {name: keys.integer(word, lo=0) for name, word in counted if keys.has(word)}
    if keys.has("moe_renormalize"):
        result[EXPERTS_NORM] = keys.flag("moe_renormalize", True)
    return result


def _attends(keys: MetadataReader, inner: MetadataReader, n_layer: int) -> list[bool]:
    """Return a flag per layer: true for attention, false for Kimi Delta Attention. ``layer_types``
    lists kinds; ``full_attn_layers`` of ``linear_attn_config`` (``inner``) lists layer numbers from
    1 on. By default layers 4, 8, 12 .. (from 0) have attention.
    """
    kinds = keys.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layer:
            keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
        for kind in kinds:
            if kind not in (_FULL, _STATE):
                keys.refuse("layer_types", f"{kind!r:.60}: treadle supports {_FULL} and {_STATE}")
        return [kind == _FULL for kind in kinds]
    listed = [inner.get(key) for key in ("full_attn_layers", "kda_layers")]
    if None in listed:
        return [i > 0 and i % _EVERY == 0 for i in range(n_layer)]
    full, others = (each if isinstance(each, list) else [] for each in listed)
    if sorted([*full, *others], key=str) != sorted(range(1, n_layer + 1), key=str):
        inner.fail(
            "full_attn_layers",
            f"is {full!r:.60}",
            f"layers 1 to {n_layer}, each here or in kda_layers",
        )
    return [i + 1 in full for i in range(n_layer)]


def _shared_rules(keys: MetadataReader, rates: Make) -> Sequence[DerivationRule]:
    return (
        *_LATENT.derived(keys),
        *kda_rules(rates),
        scores(f"{_MOE}gate.e_score_correction_bias", f"{_MOE}score"),
    )


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return _shared_rules(keys, decay_of_heads)


# -- Kimi K3 --------------------------------------------------------------------------------------

_RESIDUALS = {"self_attention_res": "attn", "mlp_res": "ffn", "output_attn_res": "output"}


def _k3_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    inner = kda_config(keys)
    if not inner.flag("use_full_rank_gate", False):
        inner.refuse("use_full_rank_gate", "is false: treadle supports gates of a whole matrix")
    bound_up = keys.get("activation_situ_linear_beta")
    result = {
        **_keys(keys, n_layer),
        BLOCK: keys.integer("attn_res_block_size"),
        BOUND: f32(keys.number("activation_situ_beta", lo=1e-3, hi=1e6)),
        BOUND_UP: 0.0,
    }
    if bound_up is not None:
        result[BOUND_UP] = f32(keys.number("activation_situ_linear_beta", lo=1e-3, hi=1e6))
    if inner.get("gate_lower_bound") is not None:
        result[KDA_FLOOR] = f32(inner.number("gate_lower_bound", lo=-1e3, hi=-1e-3))
    if keys.get("routed_expert_hidden_size") is not None:
        result[EXPERT_WIDTH] = keys.integer("routed_expert_hidden_size")
    return result


def _rates(rows: Rows, n_head: int) -> Rows:
    """Return the decay rates -exp(A_log), f32 [n_head]. The checkpoint's ``A_log`` (``rows``) has
    more elements than heads: the rest is dropped.
    """
    rates = decay(rows).reshape(-1)
    if len(rates) < n_head:
        raise ValueError("fewer rates than heads")
    return rates[:n_head]


def _products(norm: Rows, rows: Rows) -> Rows:
    """Return a norm's weights times a score vector (``rows``), element by element, [n]: nothing
    else reads the norm's output.
    """
    return norm.reshape(-1) * rows.reshape(-1)


def _k3_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_layer = keys.integer("num_hidden_layers")
    inner = kda_config(keys)
    with_state = (i for i, full in enumerate(_attends(keys, inner, n_layer)) if not full)
    rates = partial(_rates, n_head=keys.integer("num_attention_heads"))
    gate = "self_attn.g_proj.weight"
    return (
        *_shared_rules(keys, rates),
        DerivationRule(
            (gate,), {"self_attn.state_gate.weight": same}, layers=frozenset(with_state)
        ),
        *(
            DerivationRule(
                (f"{name}_norm.weight", f"{name}_proj.weight"),
                {f"{name}.weight": _products},
                floats=True,
            )
            for name in _RESIDUALS
        ),
    )


_NAMES: Names = {
    **_LATENT.names,
    **experts_123(_MOE),
    # transformers also writes the dense layers' matrices under these names.
    **{f"{_MOE}{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **{f"{_MOE}shared_experts.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    **kda_names(),
}

_K3_NAMES: Names = {
    **_NAMES,
    f"{_MOE}routed_expert_norm": "ffn_routed_norm",
    **{f"{_MOE}routed_expert_{part}_proj": f"ffn_routed_{part}" for part in ("down", "up")},
    **{name: f"{of}_res_score" for name, of in _RESIDUALS.items()},
    "self_attn.state_gate": "ssm_g",
    "self_attn.g_proj": "attn_gate",
}

# -- the rows -------------------------------------------------------------------------------------

KIMI_FAMILIES: dict[str, Family] = {
    "kimi_linear": Family(
        "kimi-linear",
        {
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 1024,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
        },
        _NAMES,
        older_words={"max_position_embeddings": "model_max_length"},
        only={
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "num_nextn_predict_layers": 0,
        },
        experts=True,
        derived=_rules,
        more=_keys,
    ),
    "kimi_k3_text": Family(
        "kimi-k3",
        {
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 3072,
            "num_local_experts": 896,
            "num_experts_per_tok": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        _K3_NAMES,
        activation="situ",
        only={
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "num_nextn_predict_layers": 0,
            "num_expert_group": 1,
            "topk_group": 1,
        },
        experts=True,
        derived=_k3_rules,
        more=_k3_keys,
    ),
}
