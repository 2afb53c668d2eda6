"""Keys and tensor rules that families with experts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.sources.derived_tensors import DerivationRule, flat, lower, same, upper
from treadle.files.metadata import MetadataReader
from treadle.models.archs import ARCHS, EXPERTS_GATING, EXPERTS_NORM
from treadle.models.graphs.experts import EVERY_N

# GGUF's keys, and the names in families.
_COUNTS = {
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "moe_top_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
    ),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    EVERY_N: (EVERY_N,),
}
_OF_FEW = ("n_group", "topk_group")  # transformers ignores them elsewhere


def expert_keys(keys: MetadataReader, family: Family, n_layer: int) -> dict[str, Any]:
    """Return GGUF's expert keys of a family: counts, gating function, normalisation and scale; {}
    if the model has no experts. Raises UnsupportedError if experts end before the last layer.
    """
    made: dict[str, Any] = {name: count_of(keys, word) for name, word in expert_words(keys).items()}
    if not made.get("expert_count"):  # no experts in this model
        return {}
    usual = dict(ARCHS[family.arch].keys)
    if EXPERTS_GATING in usual:
        made[EXPERTS_GATING] = int(usual[EXPERTS_GATING])
    if "norm_topk_prob" in keys.defaults:
        made[EXPERTS_NORM] = keys.flag("norm_topk_prob", False)
    scaled = "routed_scaling_factor" in keys.defaults
    if scaled and keys.get("routed_scaling_factor") not in (None, False):
        made["expert_weights_scale"] = f32(keys.number("routed_scaling_factor", lo=0.0))
    last = keys.integer("moe_layer_end_index", -1, lo=-1)
    if last not in (-1, n_layer - 1):
        keys.refuse(
            "moe_layer_end_index", f"is {last}: treadle supports experts only up to the last layer"
        )
    return made


def expert_words(keys: MetadataReader) -> dict[str, str]:
    """Return by GGUF key (expert counts) the name of config.json's key that gives it; counts that
    config.json does not give are left out.
    """
    found = {}
    for name, words in _COUNTS.items():
        own = [word for word in words if word not in _OF_FEW or word in keys.defaults]
        said = {word: keys.values.get(word) for word in own}  # false is Hunyuan's
        given = [word for word, value in said.items() if value is not None and value is not False]
        given += [word for word in own if keys.defaults.get(word) is not None]
        found[name] = next(iter(given), "")
    return {name: word for name, word in found.items() if word}


def count_of(keys: MetadataReader, word: str) -> int:
    """Return the count in key ``word``. A list with one count per layer (Hunyuan) stands for its
    value if all are equal. Raises UnsupportedError if they differ.
    """
    given = keys.get(word)
    if not isinstance(given, list) or not given:
        return keys.integer(word, lo=0)
    if any(each != given[0] for each in given):
        keys.refuse(word, "differs from layer to layer: treadle supports one value for all")
    return MetadataReader({word: given[0]}, keys.path, prefix=keys.prefix).integer(word, lo=0)


def gate_and_up(stem: str, gate: str, up: str) -> DerivationRule:
    """Return the rule that splits the tensor ``stem`` into ``gate``, the upper half of its rows,
    and ``up``, the lower half.
    """
    gives = {f"{gate}.weight": upper, f"{up}.weight": lower}
    return DerivationRule((f"{stem}.weight",), gives, side="B")


def scores(name: str, bias: str) -> DerivationRule:
    """Return the rule that renames the bias of router scores from ``name`` to "{bias}.bias", and
    makes it one-dimensional.
    """
    return DerivationRule((name,), {f"{bias}.bias": flat})


_AT = "mlp.experts."
_GATE_UP = f"{_AT}gate_up_proj"
# All experts in one tensor, as in transformers' memory and in some checkpoints.
PACKED_EXPERTS = (
    DerivationRule((_GATE_UP,), {f"{_AT}gate_proj.weight": upper, f"{_AT}up_proj.weight": lower}),
    DerivationRule((f"{_AT}down_proj",), {f"{_AT}down_proj.weight": same}),
)


def always(*rules: DerivationRule) -> Any:
    """Return a ``Family.derived`` that gives these rules, whatever the keys."""

    def made(keys: MetadataReader) -> Sequence[DerivationRule]:
        return rules

    return made


def leading_dense(keys: MetadataReader, n_layer: int, usual: int) -> int:
    """Return the number of leading layers without experts, by ``mlp_layer_types`` or
    ``first_k_dense_replace``; ``usual`` is the default. Raises FileError for an invalid list,
    UnsupportedError if dense layers follow sparse ones.
    """
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        usual = min(usual, n_layer)
        return keys.integer("first_k_dense_replace", usual, lo=0, hi=n_layer)
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("mlp_layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (n_layer - dense):
        keys.refuse("mlp_layer_types", "treadle supports only dense layers first, then sparse ones")
    return dense
