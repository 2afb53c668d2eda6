"""Family row of Orion."""

from __future__ import annotations

from treadle.convert.hf.family import Family

ORION_FAMILIES: dict[str, Family] = {
    # Not in transformers: it is a StableLM with RoPE on whole heads.
    "orion": Family(
        "orion",
        {
            "rms_norm_eps": 1e-5,  # of LayerNorm, despite the key's name
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 84608,
            "max_position_embeddings": 4096,
        },
    ),
}
