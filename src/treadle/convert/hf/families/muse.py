"""Family row of Meta's Muse Glimmer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.tensor_names import POST_NORMS
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, same
from treadle.files.metadata import MetadataReader
from treadle.models.archs import POST_EPS
from treadle.models.graphs.positions import NOPE_PERIOD

_THETAS = "layer_rope_theta"


def _windowed(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: not the last and each fourth before it."""
    return [(n_layer - 1 - i) % NOPE_PERIOD > 0 for i in range(n_layer)]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Check that the layers with a window are those with RoPE, and return {}. Raises
    UnsupportedError if not: GGUF has one list for both.
    """
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    kinds = keys.get("layer_types")
    windowed = _windowed(keys, n_layer)
    if isinstance(kinds, list):
        windowed = [kind == "sliding_attention" for kind in kinds]
    thetas = keys.get(_THETAS)
    if thetas is None:
        return {}
    if not isinstance(thetas, list) or len(thetas) != n_layer:
        keys.fail(_THETAS, f"is {thetas!r:.60}", f"a list of {n_layer}")
    if [bool(theta) for theta in thetas] != windowed:
        what = "treadle supports RoPE only in all layers with a window, and in no others"
        keys.refuse(_THETAS, what)
    return {}


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return the rule that makes weights of q/k norms, which checkpoints lack: ``qk_scale_factor``
    for queries and 1 for keys. A rule needs a source, so the layer's first norm is given along
    unchanged.
    """
    head_dim = keys.integer("head_dim")
    factor = keys.number("qk_scale_factor", lo=0.0)

    def queries(rows: Rows) -> Rows:
        return np.full(head_dim, factor, np.float32)

    def keys_(rows: Rows) -> Rows:
        return np.ones(head_dim, np.float32)

    gives = {
        "input_layernorm.weight": same,
        "self_attn.q_norm.weight": queries,
        "self_attn.k_norm.weight": keys_,
    }
    return (DerivationRule(("input_layernorm.weight",), gives, floats=True),)


MUSE_FAMILIES: dict[str, Family] = {
    "muse_glimmer_text": Family(
        "muse-glimmer",
        {
            "vocab_size": 202048,
            "hidden_size": 6656,
            "intermediate_size": 19968,
            "num_hidden_layers": 52,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "rope_theta": 10000.0,
            "sliding_window": 2048,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.19611613513818404,
            "qk_scale_factor": 3.87,
        },
        {**POST_NORMS, "self_attn.gate_proj": "attn_gate"},
        norm_shift=1.0,
        unshifted=("output_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight"),
        windowed=_windowed,
        copied={"post_norm_eps": POST_EPS, "output_multiplier": "logit_scale"},
        only={"attention_bias": False},
        derived=_rules,
        more=_keys,
    ),
}
