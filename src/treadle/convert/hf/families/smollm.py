"""Family row of SmolLM 3."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import check_nope_layers
from treadle.convert.hf.windows import window_nope_layers

SMOLLM_FAMILIES: dict[str, Family] = {
    "smollm3": Family(
        "smollm3",
        {
            **COMMON,
            "vocab_size": 128256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        windowed=window_nope_layers,
        more=check_nope_layers,
    ),
}
