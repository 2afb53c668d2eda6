"""Family row of Helium."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.family import PAIRS, Family
from treadle.files.metadata import MetadataReader
from treadle.models.load import ROPE_KEY


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key that marks a Llama model whose folder already has RoPE pairs in adjacent rows:
    LoRA adapters of the folder depend on it.
    """
    return {ROPE_KEY: PAIRS}


HELIUM_FAMILIES: dict[str, Family] = {
    "helium": Family(
        "llama",
        {
            **COMMON_EPS_5,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "vocab_size": 48000,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        },
        paired=True,
        more=_keys,
    ),
}
