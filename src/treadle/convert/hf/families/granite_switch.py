"""Family row of Granite Switch: Granite 4 with built-in LoRA adapters. Control tokens in the text
choose the adapter.

transformers lacks it; its makers' package (granite-switch) has it. Checkpoints of its first
releases choose by the mean of a text's control tokens, as llama.cpp's graph does; later ones, with
keys for several switches (``ms_code_m``), by the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import gate_and_up
from treadle.convert.hf.families.granite import GRANITE_SCALES
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.convert.hf.windows import ATTENTION
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, same
from treadle.files.metadata import MetadataReader
from treadle.models.archs import SWITCHED_MATRICES
from treadle.models.graphs.switched import (
    GAIN,
    LATEST,
    MOST,
    MOST_GAIN,
    N_ADAPTERS,
    RANK,
    SUBSTITUTES,
    TOKENS,
)

TARGETS = "lora_target_modules"
# The groups of matrices that may have adapters: each group's name, its module, and the matrices.
_GROUPS = (
    ("qkv_proj", "self_attn.qkv_proj", ("attn_q", "attn_k", "attn_v")),
    ("o_proj", "self_attn.o_proj", ("attn_output",)),
    ("shared_input_linear", "shared_mlp.input_linear", ("ffn_gate", "ffn_up")),
    ("shared_output_linear", "shared_mlp.output_linear", ("ffn_down",)),
)
_BUFFERS = ("codebook", "control_to_substitute_lut", "adapter_token_ids")  # follow from the keys
_INPUT = "shared_mlp.input_linear"
_GATE = "shared_mlp.gate"
_UP = "shared_mlp.up"


def _is_latest(keys: MetadataReader) -> bool:
    """Return whether the last control token chooses the adapter (else the mean of all of them
    does).
    """
    said = keys.get("switch_type")
    if said not in (None, "single", "multi"):
        keys.refuse("switch_type", f"is {said!r:.60}: treadle supports single and multi")
    return said == "multi" or (said is None and keys.has("ms_code_m"))


def _normalize_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return the keys with the number of transformer layers: config.json's ``num_hidden_layers``
    counts the switch as one layer, or as two. Raises UnsupportedError unless all layers have
    attention.
    """
    kinds = keys.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and {*map(str, kinds)} <= {*ATTENTION}):
        keys.refuse("layer_types", f"is {kinds!r:.60}: treadle supports attention in all layers")
    n_switch = 2 if _is_latest(keys) else 1
    n_layer = keys.integer("num_hidden_layers", lo=n_switch + 1) - n_switch
    n_ff = keys.get("shared_intermediate_size") or keys.get("intermediate_size")
    return {
        **keys.values,
        "num_hidden_layers": n_layer,
        "intermediate_size": n_ff,
        "layer_types": None,
    }


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    latest = _is_latest(keys)
    made = {
        N_ADAPTERS: keys.integer("num_adapters", lo=1, hi=MOST),
        RANK: keys.integer("max_lora_rank", lo=1, hi=MOST),
        TOKENS: keys.get("adapter_token_ids"),
        SUBSTITUTES: keys.get("adapter_substitute_token_ids"),
        GAIN: f32(keys.number("control_token_gain", lo=0.0, hi=MOST_GAIN)),
        LATEST: True if latest else None,
    }
    for key, name in ((TOKENS, "adapter_token_ids"), (SUBSTITUTES, "adapter_substitute_token_ids")):
        ids = made[key]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            found = keys.missing if ids is None else f"is {ids!r:.60}"
            keys.fail(name, found, "a list with a token id for each adapter")
    return made


def _with_base(rows: Rows) -> Rows:
    """Return matrices ``[n_adapters, 1, ..]`` as ``[1 + n_adapters, ..]``: the first, zeros, stands
    for no adapter.
    """
    return np.concatenate([np.zeros_like(rows[:1, 0]), rows[:, 0]])


def _zeros(rows: Rows, shape: tuple[int, ...]) -> Rows:
    return np.zeros(shape, rows.dtype)


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    targets = keys.get(TARGETS)
    known = [name for name, *_ in _GROUPS]
    targets = known if targets is None else targets
    if not isinstance(targets, list) or not {*map(str, targets)} <= {*known}:
        keys.refuse(TARGETS, f"is {targets!r:.60}: treadle supports {', '.join(known)}")
    rules = [gate_and_up(f"{_INPUT}.base_layer", _GATE, _UP)]
    rules += [DerivationRule((name,), {}) for name in _BUFFERS]
    for name, module, matrices in _GROUPS:
        if name not in targets:
            rules.append(_zero_adapters(keys, module, matrices))
            continue
        for i, matrix in enumerate(matrices):
            for side in "AB":
                parts = f"_slices.{i}" if len(matrices) > 1 else ""
                gives = {f"{matrix}_lora_{side.lower()}.weight": _with_base}
                rules.append(DerivationRule((f"{module}.lora_{side}{parts}",), gives, whole=True))
    return rules


def _zero_adapters(keys: MetadataReader, module: str, matrices: Sequence[str]) -> DerivationRule:
    """Return the rule for ``module``, which no adapter targets: it also makes A and B of
    ``matrices`` (GGUF's names in the layer) as zeros, because llama.cpp requires them.
    """
    n_embd = keys.integer("hidden_size")
    n_ff = keys.integer("intermediate_size")
    n_head = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", max(1, n_embd // n_head))
    n_q = n_head * head_dim
    n_k = (keys.get("num_key_value_heads") or n_head) * head_dim
    n_slots = 1 + keys.integer("num_adapters", lo=1, hi=MOST)
    rank = keys.integer("max_lora_rank", lo=1, hi=MOST)
    rows = {"attn_q": n_q, "attn_k": n_k, "attn_v": n_k, "ffn_gate": n_ff, "ffn_up": n_ff}
    columns = {"attn_output": n_q, "ffn_down": n_ff}
    if module == _INPUT:
        gives = dict(gate_and_up(_INPUT, _GATE, _UP).gives)
    else:
        gives = {f"{module}.weight": same}
    for name in matrices:
        a = n_slots, rank, columns.get(name, n_embd)
        b = n_slots, rows.get(name, n_embd), rank
        gives[f"{name}_lora_a.weight"] = partial(_zeros, shape=a)
        gives[f"{name}_lora_b.weight"] = partial(_zeros, shape=b)
    return DerivationRule((f"{module}.weight",), gives)


_NAMES: Names = {
    **LLAMA,
    **{f"self_attn.qkv_proj{base}": "attn_qkv" for base in ("", ".base_layer")},
    **{f"self_attn.o_proj{base}": "attn_output" for base in ("", ".base_layer")},
    **{f"shared_mlp.output_linear{base}": "ffn_down" for base in ("", ".base_layer")},
    _GATE: "ffn_gate",
    _UP: "ffn_up",
    **{f"{name}_lora_{side}": f"{name}_lora_{side}" for name in SWITCHED_MATRICES for side in "ab"},
}
GRANITE_SWITCH_FAMILIES: dict[str, Family] = {
    "granite_switch": Family(
        "graniteswitch",
        {
            **COMMON,
            "vocab_size": 32000,
            "num_hidden_layers": 32,
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": None,
            "head_dim": None,
            "num_adapters": 0,
            "max_lora_rank": 8,
            "control_token_gain": 15.0,
        },
        _NAMES,
        copied=GRANITE_SCALES,
        only={
            "num_local_experts": 0,
            "attention_bias": False,
            "qk_norm": False,
            "dual_stream": False,
        },
        normalize_keys=_normalize_keys,
        derived=_rules,
        turns=lambda keys: keys.get("position_embedding_type") == "rope",
        more=_keys,
    )
}
