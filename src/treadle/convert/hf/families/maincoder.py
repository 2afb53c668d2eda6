"""Family row of Maincoder."""

from __future__ import annotations

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA

MAINCODER_FAMILIES: dict[str, Family] = {
    "maincoder": Family(
        "maincoder",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "hidden_size": 1536,
            "head_dim": 96,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 32,
            "intermediate_size": 4096,
            "max_position_embeddings": 2048,
        },
        {**LLAMA, **{f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}},
        older_words={"intermediate_size": "intermediate_size_mlp"},
        only={"use_qk_norm": True},
        paired=True,
    ),
}
