"""Family row of dots3-note's text model: latent attention of two sizes, for layers with and without
a window (``models/graphs/dots.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES
from treadle.convert.hf.families.experts import PACKED_EXPERTS
from treadle.convert.hf.family import Windowed
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, times
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.dots import LOCAL
from treadle.models.graphs.kinds import INDEXER_TYPES
from treadle.models.graphs.latent import KEY, KV_RANK, VALUE

_GLM = DEEPSEEK_FAMILIES["glm_moe_dsa"]
_WIDE = "full_attention"
_INDEXED = "indexed_attention"  # transformers' word for _WIDE
_NARROW = "sliding_attention"
_SWA = "swa_"
_OWN = {  # sizes of layers with a window, by the others' keys: transformers' defaults
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_BASES = {_WIDE: 8e7, _NARROW: 5e4}


def _kinds(keys: MetadataReader, n_layer: int) -> list[str]:
    """Return the kind of each layer, "full_attention" or "sliding_attention"."""
    kinds = keys.get("layer_types")
    if kinds is None:
        return [_WIDE if i < 2 or i % 4 == 1 else _NARROW for i in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    return [_WIDE if kind == _INDEXED else kind for kind in kinds]


def _normalize_keys(keys: MetadataReader) -> Mapping[str, Any]:
    """Return the keys as published folders have them. transformers writes sizes for each layer that
    differs (``per_layer_config``), and RoPE by kind of layer.
    """
    values = dict(keys.values)
    n_layer = keys.integer("num_hidden_layers", 46)
    kinds = _kinds(keys, n_layer)
    listed = values.pop("per_layer_config", None)
    if listed is not None:
        if _WIDE in (keys.get("layer_types") or ()) and keys.get("use_dsa") is not True:
            keys.refuse("layer_types", f"{_WIDE}: treadle supports {_INDEXED} and {_NARROW}")
        values |= _local_sizes(keys, listed, kinds)
    values["layer_types"] = kinds
    values.setdefault("sliding_window", values.pop("sliding_window_size", 512))
    given = keys.within("rope_parameters") or keys.within("rope_scaling")
    bases = {_WIDE: values.pop("rope_theta", None), _NARROW: values.pop("swa_rope_theta", None)}
    made: dict[str, Any] = {}
    for kind, names in ((_WIDE, (_WIDE, _INDEXED)), (_NARROW, (_NARROW,))):
        one = next((each for name in names if given and (each := given.within(name))), given)
        own = {} if one is None else {k: v for k, v in one.values.items() if "partial" not in k}
        base = bases[kind]
        made[kind] = {"rope_theta": _BASES[kind] if base is None else base, **own}
        made[kind].setdefault("rope_type", made[kind].pop("type", "default"))
    values.pop("rope_scaling", None)
    values["rope_parameters"] = made
    return values


def _local_sizes(keys: MetadataReader, listed: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of layers with a window, prefixed with "swa_". ``listed``: the value of
    ``per_layer_config``, sizes by layer number; ``kinds``: the kind of each layer. Raises
    UnsupportedError if layers with a window differ from each other.
    """
    key = "per_layer_config"
    if not isinstance(listed, dict) or not all(isinstance(x, dict) for x in listed.values()):
        keys.fail(key, f"is {listed!r:.60}", "sizes by layer")
    by_layer = {str(i).lstrip("0") or "0": sizes for i, sizes in listed.items()}  # "02" too
    each = [by_layer.get(str(i), {}) for i in range(len(kinds))]
    local = [sizes for sizes, kind in zip(each, kinds, strict=True) if kind == _NARROW]
    others = [sizes for sizes, kind in zip(each, kinds, strict=True) if kind != _NARROW]
    if any(others) or any(sizes != local[0] for sizes in local):
        keys.refuse(key, "treadle supports one set of sizes, of the layers with a window")
    own = local[0] if local else {}
    return {_SWA + name: own.get(name, keys.integer(name)) for name in _OWN}


def _local(keys: MetadataReader, name: str) -> int:
    return keys.integer(_SWA + name, _OWN[name])


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys of DeepSeek V3.2's layers, and the sizes of layers with a window."""
    kinds = _kinds(keys, n_layer)
    for name in ("q_lora_rank", "qk_rope_head_dim"):
        if _local(keys, name) != keys.integer(name):
            keys.refuse(_SWA + name, f"differs from {name}, {keys.integer(name)}: not supported")
    rank = _local(keys, "kv_lora_rank")
    n_rope = _local(keys, "qk_rope_head_dim")
    n_shared = keys.integer("n_shared_experts", 1)
    shared = keys.get("moe_shared_expert_intermediate_size")
    if shared is None:
        shared = keys.integer("shared_experts_intermediate_size", 1536)
    heads = {_WIDE: keys.integer("num_attention_heads")}
    heads[_NARROW] = _local(keys, "num_attention_heads")
    return {
        **_GLM.more(keys, n_layer),
        INDEXER_TYPES: [kind == _WIDE for kind in kinds],
        "attention.head_count": [heads[kind] for kind in kinds],
        "expert_shared_feed_forward_length": n_shared * shared,
        f"{KV_RANK}{LOCAL}": rank,
        f"{KEY}{LOCAL}": rank + n_rope,
        f"{VALUE}{LOCAL}": rank,
        f"{KEY}_mla{LOCAL}": _local(keys, "qk_nope_head_dim") + n_rope,
        f"{VALUE}_mla{LOCAL}": _local(keys, "v_head_dim"),
    }


def _windowed(keys: MetadataReader, n_layer: int) -> Windowed:
    return [kind == _NARROW for kind in _kinds(keys, n_layer)]


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the rules for each kind of layer: the parts of ``kv_b_proj``, and the norms of
    low-rank vectors times ``sqrt(hidden_size / rank)``.
    """
    kinds = _kinds(keys, keys.integer("num_hidden_layers"))
    n_embd = keys.integer("hidden_size")
    made = []
    for kind in (_WIDE, _NARROW):
        layers = frozenset(i for i, each in enumerate(kinds) if each == kind)
        narrow = kind == _NARROW

        def size(name: str, narrow: bool = narrow) -> int:
            return _local(keys, name) if narrow else keys.integer(name)

        own = {name: size(name) for name in ("num_attention_heads", "v_head_dim")}
        parts, bias = _GLM.derived(MetadataReader({**keys.values, **own}, keys.path))
        made += [replace(parts, layers=layers), replace(bias, layers=layers)]
        for which in ("q", "kv"):
            name = f"self_attn.{which}_a_layernorm.weight"
            factor = np.float32(math.sqrt(n_embd / size(f"{which}_lora_rank")))
            gain = partial(times, factor=factor)
            made.append(DerivationRule((name,), {name: gain}, floats=True, layers=layers))
    return (*made, *PACKED_EXPERTS)


_NAMES: Names = {
    **_GLM.names,
    "self_attn.g_proj": "attn_gate",
    "self_attn.k_rope_only_layernorm": "attn_k_norm",
}
DOTS3_FAMILIES = {
    "dots3_note_text": replace(
        _GLM,
        arch="dots3note",
        defaults={
            **_GLM.defaults,
            "rms_norm_eps": 1e-5,
            "rope_theta": 8e7,
            "vocab_size": 152064,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 46,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 524288,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "index_n_heads": 64,
            "num_nextn_predict_layers": 1,
            "sliding_window": 512,
        },
        names=_NAMES,
        own_local_rope=True,
        windowed=_windowed,
        normalize_keys=_normalize_keys,
        only={
            **_GLM.only,
            "use_dsa": True,
            "use_sliding_window": True,
            "apply_mla_qkv_lora_rescale": True,
            "k_rope_only_layernorm": True,
            "attention_gate_type": "headwise",
            "swa_attention_gate_type": "headwise",
            "use_dynamic_rsf": False,
            "indexer_rope_interleave": True,
        },
        derived=_rules,
        more=_keys,
    ),
}
