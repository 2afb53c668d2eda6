"""Family row of Nanbeige 4.2. Nanbeige 4 and 4.1 are Llama's."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.looped.nanbeige import LOOPS, N_LOOPS_MOST, SKIPS_NORM


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of the number of times that all layers run, and of whether the output norm is
    skipped between these.
    """
    return {
        LOOPS: keys.integer("num_loops", 1, lo=1, hi=N_LOOPS_MOST),
        SKIPS_NORM: keys.flag("skip_loop_final_norm", False),
    }


NANBEIGE_FAMILIES: dict[str, Family] = {
    "nanbeige": Family(
        "nanbeige",
        {
            **COMMON,
            "vocab_size": 166144,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            "head_dim": None,
        },
        more=_keys,
    ),
}
