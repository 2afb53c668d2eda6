"""Family rows of Cohere's Command models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.convert.hf.families.defaults import LAYER_NORM
from treadle.convert.hf.families.experts import PACKED_EXPERTS, leading_dense
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.hf.windows import all_but_every
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_GATING, ROPE_PATTERN
from treadle.models.graphs.positions import by_period

_COHERE = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _cohere2(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Raise UnsupportedError if ``sliding_window`` is null: transformers then applies RoPE in no
    layer, GGUF in all of them. Return {}.
    """
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    return {}


_CHOSEN_ALONE = 3  # llama.cpp's number of softmax over the chosen experts
_RMS = "attention.layer_norm_rms_epsilon"


def _expert_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of the norm (LayerNorm or RMS norm), of experts, and of the FFN widths of
    experts and dense layers. Raises UnsupportedError if a dense layer has no RoPE, or for a null
    ``sliding_window``.
    """
    width = keys.integer("intermediate_size")
    dense = leading_dense(keys, n_layer, 0)
    shared = keys.integer("num_shared_experts", 0, lo=0)
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    period = "prefix_dense_sliding_window_pattern"
    if dense and keys.integer(period, 1, lo=0) != 1:
        keys.refuse(
            period, f"is {keys.get(period)}: treadle supports only 1, RoPE in all dense layers"
        )
    made: dict[str, Any] = {
        _RMS: None,
        "attention.layer_norm_epsilon": f32(keys.number("layer_norm_eps", lo=0.0, hi=1.0)),
        "expert_feed_forward_length": width,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": width * shared,
        "leading_dense_block_count": dense,
    }
    if keys.get("rms_norm_eps") is not None:
        made[_RMS] = f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0))
        del made["attention.layer_norm_epsilon"]
    if keys.get("prefix_dense_intermediate_size") is not None:
        made["feed_forward_length"] = keys.integer("prefix_dense_intermediate_size")
    chosen_by = keys.text("expert_selection_fn", "softmax")
    if chosen_by not in ("softmax", "sigmoid"):
        keys.refuse(
            "expert_selection_fn", f"{chosen_by!r:.60}: treadle supports softmax and sigmoid"
        )
    if chosen_by == "softmax":
        made[EXPERTS_GATING] = _CHOSEN_ALONE
    return made


def _expert_windows(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all but the last of each four, counted after
    the dense layers, which have none.
    """
    dense = leading_dense(keys, n_layer, 0)
    period = keys.integer("sliding_window_pattern", 4)
    return [False] * dense + by_period(period, n_layer - dense)


# -- Compass: RoPE by kinds of layers, of halves of a head ----------------------------------------

_KINDS = ("full_attention", "sliding_attention")
_MROPE = ("mrope_section", "mrope_interleaved")  # M-RoPE's; a text token's positions are equal
_POOLINGS = {"mean": 1, "bos": 2, "eos": 3}  # llama.cpp's numbers


def _compass_kinds(keys: MetadataReader, n_layer: int) -> list[str]:
    kinds = keys.get("layer_types")
    if kinds is None:
        return [_KINDS[0]] * n_layer
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    for kind in kinds:
        if kind not in _KINDS:
            keys.refuse("layer_types", f"{kind!r:.60}: treadle supports {' and '.join(_KINDS)}")
    return kinds


def _rope_by_kind(keys: MetadataReader, kinds: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return config.json's RoPE parameters by kind of layer, for those of ``kinds`` that have RoPE.
    Raises FileError for a kind without an entry.
    """
    given = keys.get("rope_parameters")
    if not isinstance(given, dict):
        keys.fail("rope_parameters", f"is {given!r:.60}", "parameters by kinds of layers")
    by_kind = given if set(given) & {*_KINDS} else dict.fromkeys(kinds, given)
    found: dict[str, Mapping[str, Any]] = {}
    for kind in sorted(set(kinds)):
        if kind not in by_kind:
            keys.fail("rope_parameters", "has no such key", f"{kind}: parameters, or null")
        if (own := by_kind[kind]) is not None:
            if not isinstance(own, dict):
                keys.fail("rope_parameters", f"{kind} is {own!r:.60}", "parameters, or null")
            found[kind] = {key: value for key, value in own.items() if key not in _MROPE}
    return found


def _compass(keys: MetadataReader) -> Mapping[str, Any]:
    """Return config.json's keys with ``rope_parameters`` in one form: one set for all layers, or a
    set for each kind of layer.
    """
    values = dict(keys.values)
    kinds = _compass_kinds(keys, keys.integer("num_hidden_layers"))
    values["layer_types"] = kinds
    turned = _rope_by_kind(keys, kinds)
    values["compass_turned"] = [kind in turned for kind in kinds]
    local = turned.get(_KINDS[1], {}).get("rope_type", "default")
    if len(turned) == 1 and local != "default":
        keys.refuse("rope_parameters", "treadle does not scale RoPE of layers with a window")
    values["rope_parameters"] = turned if len(turned) > 1 else dict(*turned.values())
    if values.get("logit_scale") is None:
        values["logit_scale"] = 1.0
    return values


def _compass_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    flags = keys.get("compass_turned")
    if not all(flags):
        made[ROPE_PATTERN] = flags
    if (pooling := keys.get("pooling")) is not None:
        if pooling not in [*_POOLINGS]:  # it may be no key of a table
            keys.refuse("pooling", f"{pooling!r:.60}: treadle supports {', '.join(_POOLINGS)}")
        made["pooling_type"] = _POOLINGS[pooling]
    return made


COHERE_FAMILIES: dict[str, Family] = {
    "cohere_compass_text": Family(
        "cohere-compass",
        {
            **_COHERE,
            "rope_theta": 10000.0,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": None,
            "sliding_window": 4096,
            "layer_types": None,
            "compass_turned": None,
            "pooling": None,
        },
        words=LAYER_NORM,
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        copied={"logit_scale": "logit_scale"},
        normalize_keys=_compass,
        more=_compass_keys,
    ),
    "cohere": Family(
        "command-r",
        {**_COHERE, "rope_theta": 500000.0},
        words=LAYER_NORM,
        paired=True,
        copied={"logit_scale": "logit_scale"},
    ),
    "cohere2": Family(
        "cohere2",
        {**_COHERE, "rope_theta": 10000.0, "sliding_window": 4096},
        words=LAYER_NORM,
        windowed=all_but_every(4, overridable=True),
        paired=True,
        copied={"logit_scale": "logit_scale"},
        more=_cohere2,
    ),
    "cohere2_moe": Family(
        "cohere2moe",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 256000,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        LLAMA_EXPERTS,
        {"rms_norm_eps": "layer_norm_eps"},
        windowed=_expert_windows,
        paired=True,
        copied={"logit_scale": "logit_scale"},
        only={"shared_expert_combination_strategy": "average"},
        experts=True,
        derived=lambda keys: PACKED_EXPERTS,
        more=_expert_keys,
    ),
}
