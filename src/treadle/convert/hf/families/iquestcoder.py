"""Family row of IQuest-Coder."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.family import Family

IQUESTCODER_FAMILIES: dict[str, Family] = {
    "iquestcoder": Family(
        "llama",
        {
            **COMMON_EPS_5,
            "vocab_size": 76800,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
        only={"clip_qkv": None, "use_sliding_window": False},
    ),
}
