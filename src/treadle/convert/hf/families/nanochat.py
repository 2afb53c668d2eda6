"""Family row of nanochat, which llama.cpp has no architecture for."""

from __future__ import annotations

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, Names

_NAMES: Names = {
    **LLAMA,
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    # Names in NanoChat's own code and mlx-lm.
    "wte": "token_embd",
    "attn.c_q": "attn_q",
    "attn.c_k": "attn_k",
    "attn.c_v": "attn_v",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

NANOCHAT_FAMILIES: dict[str, Family] = {
    "nanochat": Family(
        "nanochat",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "max_position_embeddings": 2048,
            "final_logit_softcapping": 15.0,
        },
        _NAMES,
        activation="relu2",
    ),
}
