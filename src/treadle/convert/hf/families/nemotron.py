"""Family rows of Nemotron: dense models, Nemotron-H, and models whose layers differ (NAS, 51B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.families.mamba import MAMBA2_NAMES, UNLIMITED, mamba2_rules, state_keys
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader

# -- Nemotron-H: a mixer or an FFN a layer --------------------------------------------------------

# Files have this time_step_min: see docs/design-decisions.md. It is the lower end of initial steps
# in training. transformers uses it as a lower bound for Nemotron-H; llama.cpp has no bound.
TIME_STEP_MIN = 0.001

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _hybrid_kinds(keys: MetadataReader) -> list[str]:
    """Return each layer's kind: "linear_attention" (Mamba-2), "full_attention", "mlp" or "moe".
    Older files have one letter per layer.
    """
    key = next((key for key in ("layers_block_type", "layer_types") if keys.get(key)), "")
    if key:
        kinds = keys.get(key)
        whole = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        found = [_OLDER.get(kind, kind) for kind in kinds] if whole else [""]
    else:
        key = "hybrid_override_pattern"
        found = [_KINDS.get(letter, "") for letter in keys.text(key)]
    if others := set(found) - set(_KINDS.values()):
        keys.refuse(
            key,
            f"has {min(others) or 'another kind'!r:.40}: treadle supports "
            f"{', '.join(_KINDS.values())}",
        )
    return found


def _hybrid(keys: MetadataReader) -> Family:
    """Return Nemotron-H's family with experts or without. The number of layers is the length of the
    list of kinds, because files of transformers 5 omit it.
    """
    kinds = _hybrid_kinds(keys)
    if "mlp" in kinds and "moe" in kinds:
        keys.refuse(
            "layers_block_type",
            "has both mlp and moe: treadle supports only one of them in this family",
        )
    family = _HYBRID_EXPERTS if "moe" in kinds else _HYBRID
    return replace(family, defaults={**family.defaults, "num_hidden_layers": len(kinds)})


def _hybrid_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    kinds = _hybrid_kinds(keys)
    n_head_kv = keys.integer("num_key_value_heads")
    if len(kinds) != n_layer:
        keys.fail(
            "num_hidden_layers", f"is {n_layer}", f"{len(kinds)}, the number of listed layer kinds"
        )
    experts = "moe" in kinds
    n_ff = keys.integer("moe_intermediate_size" if experts else "intermediate_size")
    if keys.get("mamba_dt_limit") not in (None, *UNLIMITED):  # an older time_step_limit
        keys.refuse("mamba_dt_limit", "bounds on time steps are not supported")
    for key in ("time_step_min", "mamba_dt_min"):
        if keys.number(key, TIME_STEP_MIN, lo=0.0) > TIME_STEP_MIN:
            keys.refuse(
                key, f"is {keys.get(key)!r:.60}: a lower bound on time steps is not supported"
            )
    n_inner = keys.integer("mamba_num_heads") * keys.integer("mamba_head_dim")
    words = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")
    made: dict[str, Any] = {
        **state_keys(keys, n_inner, *words),
        "feed_forward_length": [n_ff if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count_kv": [n_head_kv * (kind == "full_attention") for kind in kinds],
        "rope.dimension_count": keys.integer("hidden_size") // keys.integer("num_attention_heads"),
        "rope.scaling.finetuned": False,  # llama.cpp's key for no RoPE
    }
    if experts and keys.get("moe_latent_size") is not None:
        made["moe_latent_size"] = keys.integer("moe_latent_size")
    return made


def _hybrid_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    bias = scores("mixer.gate.e_score_correction_bias", "mixer.score")
    return (*mamba2_rules(keys), bias)


_HYBRID = Family(
    "nemotron_h",
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "tie_word_embeddings": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    {
        **MAMBA2_NAMES,
        "embed_tokens": "token_embd",
        **{f"mixer.{one}_proj": f"attn_{one}" for one in "qkv"},
        "mixer.o_proj": "attn_output",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
        "mixer.gate": "ffn_gate_inp",
        "mixer.score": "exp_probs_b",
        **{f"mixer.experts.{one}_proj": f"ffn_{one}_exps" for one in ("up", "down")},
        **{f"mixer.shared_experts.{one}_proj": f"ffn_{one}_shexp" for one in ("up", "down")},
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
    activation="relu2",
    older_words={"head_dim": "attention_head_dim"},
    only={"mamba_hidden_act": "silu", "sliding_window": None},
    derived=mamba2_rules,
    extra_layers="num_nextn_predict_layers",
    more=_hybrid_keys,
    variant=_hybrid,
)
_HYBRID_EXPERTS = replace(
    _HYBRID,
    arch="nemotron_h_moe",
    defaults={
        **_HYBRID.defaults,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    experts=True,
    derived=_hybrid_rules,
)

# -- layers of unequal sizes ----------------------------------------------------------------------

_BLOCKS = "block_configs"
_STEP = 256  # widths of FFNs are multiples of it
_KNOWN = {  # keys allowed in a sublayer
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear"),
    "ffn": ("ffn_mult", "no_op"),
}


def _blocks(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of query heads, key heads and FFN width of each layer, lists with 0 for a
    missing sublayer. Query heads with 0 key heads mean that one linear layer replaces attention.
    """
    given = keys.get(_BLOCKS)
    if not isinstance(given, list) or len(given) != n_layer:
        keys.fail(_BLOCKS, f"is {given!r:.60}", f"a list of {n_layer}")
    heads = list[int]()
    heads_kv = list[int]()
    widths = list[int]()
    for i, block in enumerate(given):
        if not isinstance(block, dict):
            keys.fail(f"{_BLOCKS}[{i}]", f"is {block!r:.60}", "an object")
        halves = MetadataReader(block, keys.path, prefix=f"{keys.prefix}{_BLOCKS}[{i}].")
        n, n_kv = _heads(_half(halves, "attention"), keys.integer("num_attention_heads"))
        heads.append(n)
        heads_kv.append(n_kv)
        widths.append(_width(_half(halves, "ffn"), keys.integer("hidden_size")))
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "feed_forward_length": widths,
    }


def _half(halves: MetadataReader, name: str) -> MetadataReader:
    half = halves.within(name)
    if half is None:
        halves.fail(name, "is missing", "an object")
    for key, value in half.values.items():
        if key not in _KNOWN[name] and value not in (None, False):
            half.refuse(key, f"is {value!r:.60}: not supported in this architecture")
    return half


def _heads(half: MetadataReader, n_head: int) -> tuple[int, int]:
    if half.flag("replace_with_linear", False):
        return n_head, 0
    if half.flag("no_op", False) or half.get("n_heads_in_group") is None:
        return 0, 0
    group = half.integer("n_heads_in_group")
    if n_head % group:
        half.fail("n_heads_in_group", f"is {group}", f"a divisor of {n_head} heads")
    return n_head, n_head // group


def _width(half: MetadataReader, n_embd: int) -> int:
    if half.flag("no_op", False) or half.get("ffn_mult") is None:
        return 0
    width = int(2 * half.number("ffn_mult", lo=1e-3, hi=1e3) * n_embd / 3)
    return -(-width // _STEP) * _STEP


_DECI: Names = {**LLAMA, "self_attn.linear_attn": "attn_output"}

# -- the rows -------------------------------------------------------------------------------------

NEMOTRON_FAMILIES: dict[str, Family] = {
    "nemotron": Family(
        "nemotron",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 256000,
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        words={"rms_norm_eps": "norm_eps"},
        activation="relu2",
        norm_shift=1.0,
    ),
    "nemotron_h": _HYBRID,
    "nemotron-nas": Family(
        "deci",
        {**COMMON, "vocab_size": 32000, "max_position_embeddings": 2048},
        _DECI,
        n_ff_default=4,  # each layer gives its own
        more=_blocks,
    ),
    "deci": Family(
        "deci",
        {**COMMON, "vocab_size": 32000, "max_position_embeddings": 2048},
        older_words={"num_key_value_heads": "num_key_value_heads_per_layer"},
    ),
}

# Rows that ``variant`` chooses.
NEMOTRON_VARIANTS = (_HYBRID_EXPERTS,)
