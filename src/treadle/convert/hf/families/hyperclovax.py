"""Family row of HyperCLOVA X."""

from __future__ import annotations

import math
from typing import Any

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.families.granite import GRANITE_SCALES
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.files.metadata import MetadataReader


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Granite's scale keys. Unlike Granite's, logits are multiplied by the scale, and an
    attention scale equal to the default is left out.
    """
    scale = keys.number("logits_scaling", lo=1e-9)
    made: dict[str, Any] = {"logit_scale": f32(1.0 / scale)}
    n_head = keys.integer("num_attention_heads")
    usual = keys.integer("head_dim", max(1, keys.integer("hidden_size") // n_head)) ** -0.5
    if keys.get("attention_multiplier") is not None:
        given = keys.number("attention_multiplier", lo=0.0)
        made |= {} if math.isclose(given, usual) else {"attention.scale": f32(given)}
    return made


_NAMES: Names = {**LLAMA, "post_norm1": "post_attention_norm", "post_norm2": "post_ffw_norm"}

HYPERCLOVAX_FAMILIES: dict[str, Family] = {
    "hyperclovax": Family(
        "granite",
        {
            **COMMON_EPS_5,
            "rms_norm_eps": 1e-6,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        _NAMES,
        copied={
            key: GRANITE_SCALES[key] for key in ("embedding_multiplier", "residual_multiplier")
        },
        more=_keys,
    ),
}
