"""Family row of openPangu Embedded."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family

PANGU_FAMILIES: dict[str, Family] = {
    "PanguEmbedded": Family(
        "pangu-embedded",
        {**COMMON, "rms_norm_eps": 1e-5, "vocab_size": 153376, "max_position_embeddings": 32768},
    ),
}
