"""Family row of Seed-OSS."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import SEED_OSS

SEED_FAMILIES: dict[str, Family] = {
    "seed_oss": Family(
        "seed_oss",
        {
            **COMMON,
            "vocab_size": 155136,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
        },
        SEED_OSS,
    ),
}
