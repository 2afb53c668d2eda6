"""Family row of HRM-Text (``models/graphs/looped/hrm.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, lower, same, upper
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.looped.hrm import HIGH_CYCLES, LOW_CYCLES, MOST_CYCLES, PER_STACK, PREFIX
from treadle.models.keys import N_LAYER_MAX

_STACK = re.compile(r"(?P<before>.*\.)?(?P<stack>[LH])_module\.layers\.(?P<layer>\d{1,6})\.")
_COUNT = "num_layers_per_stack"


def _normalize_keys(keys: MetadataReader) -> Mapping[str, Any]:
    """Return the keys with ``num_hidden_layers``, the number of layers that a token passes through
    in all cycles, and with the number of layers per stack. Published folders call the latter
    ``num_hidden_layers``.
    """
    values = dict(keys.values)
    n = keys.get(_COUNT)
    if n is None:
        n = keys.integer("num_hidden_layers", 16, hi=N_LAYER_MAX)
    n = MetadataReader({_COUNT: n}, keys.path).integer(_COUNT, hi=N_LAYER_MAX)
    high = keys.integer("H_cycles", 2, lo=1, hi=MOST_CYCLES)
    low = keys.integer("L_cycles", 3, lo=1, hi=MOST_CYCLES)
    return {**values, _COUNT: n, "num_hidden_layers": n * high * (low + 1)}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    spread = keys.number("initializer_range", 0.02, lo=1e-9)
    return {
        PER_STACK: keys.integer(_COUNT),
        HIGH_CYCLES: keys.integer("H_cycles", 2),
        LOW_CYCLES: keys.integer("L_cycles", 3),
        PREFIX: keys.flag("prefix_lm", True),
        "embedding_scale": f32(keys.number("embedding_scale", 1.0 / spread, lo=0.0)),
        "attention.head_count_kv": keys.integer("num_attention_heads"),
    }


def _in_layers(keys: MetadataReader, name: str) -> str:
    """Return a tensor's name with its layer's number in GGUF: the low stack's layers, then the high
    stack's.
    """
    match = _STACK.match(name)
    if match is None:
        return name
    layer = int(match["layer"]) + keys.integer(_COUNT) * (match["stack"] == "H")
    return f"{match['before'] or ''}layers.{layer}.{name[match.end() :]}"


def _quarter(rows: Rows, which: int) -> Rows:
    n = len(rows) // 4
    return rows[which * n : (which + 1) * n]


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules that split the fused matrices of published folders: gate, q, k and v; FFN gate
    and up.
    """
    parts = ("gate", "q", "k", "v")
    four = {
        f"self_attn.{name}_proj.weight": partial(_quarter, which=i) for i, name in enumerate(parts)
    }
    two = {"mlp.gate_proj.weight": upper, "mlp.up_proj.weight": lower}
    return (
        DerivationRule(("attn.gqkv_proj.weight",), four, side="B"),
        DerivationRule(("mlp.gate_up_proj.weight",), two, side="B"),
        DerivationRule(("z_L_init",), {"z_L_init.weight": same}),
    )


_NAMES: Names = {
    **LLAMA,
    "self_attn.gate_proj": "attn_gate",
    "attn.o_proj": "attn_output",
    "z_L_init": "hrm_z_l_init",
}
HRM_FAMILIES: dict[str, Family] = {
    "hrm_text": Family(
        "hrm_text",
        {
            **COMMON,
            "vocab_size": 151808,
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "head_dim": 128,
            "max_position_embeddings": 2048,
        },
        _NAMES,
        only={"attention_bias": False, "mlp_bias": False},
        normalize_keys=_normalize_keys,
        derived=_rules,
        more=_keys,
        in_layers=_in_layers,
    ),
}
