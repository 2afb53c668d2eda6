"""Layouts of ``config.json`` in folders of drafters that read a target model's hidden states. Their
``model_type`` is that of their layers, or missing, so the kind of drafter is set here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

EAGLE3 = "eagle3"
DFLASH = "dflash"
GEMMA_DSPARK = "gemma4_dspark"
DSPARK_STREAMS = "deepseek_v4_dspark"
_KINDS = {  # part of a class' name, in small letters, or speculators' name of the kind
    "eagle3": EAGLE3,
    "gemma4dspark": GEMMA_DSPARK,
    "dflash": DFLASH,
    "dspark": DFLASH,
}
_DRAFTERS = "speculators_model_type"
_LAYERS = "transformer_layer_config"  # where speculators has the keys of layers
_OWN = "dflash_config"  # where DFlash has its own keys
_AUX = "aux_hidden_state_layer_ids"  # speculators' list, counted as GGUF's


def with_drafter_type(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a drafter's config with all keys at the top, and the kind of drafter (EAGLE3, DFLASH
    ..) as ``model_type``. For other kinds than EAGLE3, also set keys of its layers, such as
    ``target_layer_ids`` and ``layer_types``, that the folder gives under other names. Other models'
    configs are returned unchanged.
    """
    classes = config.get("architectures")
    names = [*classes] if isinstance(classes, list) else []
    said = " ".join(str(name).lower() for name in (*names, config.get(_DRAFTERS, "")))
    kind = next((kind for part, kind in _KINDS.items() if part in said), None)
    if kind is None:
        return config
    inner = config.get(_LAYERS)
    own = config.get(_OWN)
    made = {**config}
    for part in (inner, own):
        made |= part if isinstance(part, Mapping) else {}
    made["model_type"] = kind
    if kind == EAGLE3:
        return made
    aux = made.get(_AUX)
    if isinstance(aux, list) and all(type(i) is int for i in aux):
        made.setdefault("target_layer_ids", [i - 1 for i in aux])
    if "dspark" in said:
        anchored = _LAYERS not in config and _AUX not in config
        made.setdefault("sample_from_anchor", anchored)
    if made.get("is_causal") is not None:
        made["causal"] = made["is_causal"]
    n_layer = made.get("num_hidden_layers")
    if made.get("use_swa") and isinstance(n_layer, int) and 0 < n_layer < 1 << 10:
        made["use_sliding_window"] = True
        made["sliding_window"] = made.get("swa_window_size") or made.get("sliding_window")
        made["layer_types"] = ["sliding_attention"] * n_layer
    return made


# -- DSpark of DeepSeek V4, whose layers are in the folder of its model ----------------------------

MTP_NAME = re.compile(r"mtp\.(?P<layer>0|[1-9]\d{0,3})\.(?P<rest>.+)")
_OUTSIDE = re.compile(
    r"(?:main_(?:proj|norm)|norm|markov_head|confidence_head|hc_head_\w+)(?:\..+)?"
)


def has_dspark(config: Mapping[str, Any]) -> bool:
    """Return whether ``config`` is that of a DeepSeek V4 folder which also holds the DSpark
    drafter, in tensors named ``mtp.N.*``.
    """
    return config.get("model_type") == "deepseek_v4" and "dspark_block_size" in config


def stage_name(name: str) -> str:
    """Return the name that a tensor of DSpark, ``mtp.N.*`` in a DeepSeek V4 folder, has in a model
    of its own: in layer N, or outside layers. Return "" for a tensor of the main model.
    """
    match = MTP_NAME.fullmatch(name)
    if match is None:
        return ""
    rest = match["rest"]
    return rest if _OUTSIDE.fullmatch(rest) else f"layers.{match['layer']}.{rest}"


def dspark_config(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return the config.json of the DSpark in a DeepSeek V4 folder as if it were a folder of its
    own, from the main model's ``config`` and the names of all tensors.
    """
    found = [int(match["layer"]) for name in names if (match := MTP_NAME.fullmatch(name))]
    n = 1 + max(found, default=0)
    lists = ("layer_types", "mlp_layer_types", "compress_rates")
    return {
        **{key: value for key, value in config.items() if key not in lists},
        "model_type": DSPARK_STREAMS,
        "num_hidden_layers": n,
        "num_hash_layers": 0,
        "compress_ratios": [0] * n,
        "num_nextn_predict_layers": 0,
    }
