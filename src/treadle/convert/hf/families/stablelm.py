"""Family row of StableLM."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import LAYER_NORM
from treadle.convert.hf.family import Family
from treadle.convert.sources.derived_tensors import norms_of_heads

STABLELM_FAMILIES: dict[str, Family] = {
    "stablelm": Family(
        "stablelm",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": False,
        },
        words=LAYER_NORM,
        copied={"use_parallel_residual": "use_parallel_residual"},
        derived=norms_of_heads,
    ),
}
