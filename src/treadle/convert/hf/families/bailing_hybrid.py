"""Family row of Ling 3 (Bailing hybrid): Kimi Delta Attention with bounded decays, and latent
attention with a gate for each head. The published folder has its own names of keys and tensors;
transformers reads those, and writes a mixture of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES, LATENT_NAMES, listed_kinds
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.families.kda import FORGET_GATE, kda_names, kda_rules, taps_of_parts
from treadle.convert.hf.families.kimi import EXPERT_COUNTS
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, same
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM
from treadle.models.graphs.latent import VALUE
from treadle.models.graphs.recurrence import KDA_FLOOR, KDA_HEAD, KDA_SAFE

_LATENT = DEEPSEEK_FAMILIES["deepseek_v3"]
_FULL = "full_attention"
_STATE = "linear_attention"
_AT = ("self_attn.", "attention.")  # transformers' spelling, the published one
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _attends(keys: MetadataReader, n_layer: int) -> list[bool]:
    """Return a flag per layer: true for attention, false for Kimi Delta Attention. By default the
    last layer of each ``layer_group_size`` has attention.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        every = keys.integer("layer_group_size")
        return [(i + 1) % every == 0 for i in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    for kind in kinds:
        if kind not in (_FULL, _STATE):
            keys.refuse("layer_types", f"{kind!r:.60}: treadle supports {_FULL} and {_STATE}")
    return [kind == _FULL for kind in kinds]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    for name in _LIMITS:
        given = keys.get(name)
        if given is not None and any(given if isinstance(given, list) else [given]):
            keys.refuse(name, f"is {given!r:.60}: treadle supports experts without limits here")
    rank = keys.integer("kv_lora_rank")
    result: dict[str, Any] = {
        **_LATENT.more(keys, n_layer),
        "attention.head_count_kv": [int(flag) for flag in _attends(keys, n_layer)],
        "rope.dimension_count": keys.integer("qk_rope_head_dim"),
        VALUE: rank,
        "ssm.conv_kernel": keys.integer("short_conv_kernel_size"),
        KDA_HEAD: keys.integer("linear_head_dim", keys.integer("head_dim")),  # transformers' word
        KDA_SAFE: True,
        KDA_FLOOR: f32(keys.number("kda_lower_bound", lo=-1e3, hi=-1e-3)),
        **listed_kinds(keys, n_layer),
    }
    counted = EXPERT_COUNTS.items()
    result |= {name: keys.integer(word) for name, word in counted if keys.values.get(word)}
    if keys.has("moe_renormalize"):
        result[EXPERTS_NORM] = keys.flag("moe_renormalize", True)
    return result


def _rates(rows: Rows) -> Rows:
    return np.exp(rows).reshape(-1, 1)


def _part(rows: Rows, i: int) -> Rows:
    """Return the i-th third of a convolution's channels, those of q, k or v, as [channels, 1,
    taps].
    """
    n = len(rows) // 3
    return taps_of_parts(rows[i * n : (i + 1) * n])


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_layer = keys.integer("num_hidden_layers")
    with_state = frozenset(i for i, full in enumerate(_attends(keys, n_layer)) if not full)
    rules = [*_LATENT.derived(keys), scores("mlp.gate.expert_bias", "mlp.score")]
    heads, of_published = rules[0], _AT[1]
    gives = {f"{of_published}{name[10:]}": make for name, make in heads.gives.items()}
    rules.append(DerivationRule((f"{of_published}kv_b_proj.weight",), gives))
    for at in _AT:
        whole = {f"{at}{x}_conv1d.weight": _thirds(i) for i, x in enumerate("qkv")}
        rules.append(DerivationRule((f"{at}conv1d.weight",), whole, whole=True))
        name = f"{at}g_proj.weight"
        rules.append(DerivationRule((name,), {f"{at}g_a_proj.weight": same}, layers=with_state))
        rules += kda_rules(_rates, at, within=("", FORGET_GATE))
    return rules


def _thirds(i: int) -> Any:
    return lambda rows: _part(rows, i)


_PARTS = {
    **{name.removeprefix(_AT[0]): to for name, to in LATENT_NAMES.items() if _AT[0] in name},
    "dense": "attn_output",
    **kda_names(""),
    "f_proj": "ssm_f_a",
    f"{FORGET_GATE}f_proj": "ssm_f_a",
    "g_proj": "attn_gate",
}
_NAMES: Names = {
    **LATENT_NAMES,
    "word_embeddings": "token_embd",
    **{f"{at}{name}": to for at in _AT for name, to in _PARTS.items()},
}

# -- the rows -------------------------------------------------------------------------------------

BAILING_HYBRID_FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        "bailingmoe3",
        {
            "vocab_size": 157184,
            "hidden_size": 2560,
            "intermediate_size": 6144,
            "num_hidden_layers": 42,
            "num_attention_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 6e6,
            "tie_word_embeddings": False,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "short_conv_kernel_size": 4,
            "layer_group_size": 6,
            "kda_lower_bound": -5.0,
            "moe_intermediate_size": 768,
            "num_local_experts": 512,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        _NAMES,
        older_words={"max_position_embeddings": "model_max_length"},
        paired=True,
        only={
            "attention_bias": False,
            "kda_safe_gate": True,
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
        },
        experts=True,
        derived=_rules,
        extra_layers="num_nextn_predict_layers",
        more=_keys,
    ),
}
