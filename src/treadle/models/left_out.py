"""What treadle leaves out, and why: by GGUF's ``general.architecture`` and by ``model_type``."""

from __future__ import annotations

_PICTURES = "it reads pictures, and a token's position is three numbers (M-RoPE)"

# A reason, and who has it. Names of both kinds: where they differ both are here.
_REASONS: dict[str, str] = {
    "it multiplies what experts read by the router's scores, and attends in chunks of tokens": (
        "llama4 llama4_text"
    ),
    "it clamps queries, keys and values, norms with LayerNorm, and has 132 billion parameters": (
        "dbrx"
    ),
    "its softcaps and norms around experts are its own, and it has 314 billion parameters": (
        "grok grok-1"
    ),
    "it chooses experts one after the other, each by a softmax of its own (SparseMixer)": "phimoe",
    "it keeps a state of Mamba-1; treadle has Mamba-2's": "mamba falcon_mamba jamba",
    "its states follow a recurrence of their own (WKV), in place of attention": (
        "rwkv rwkv6 rwkv7 rwkv6qwen2 arwkv7"
    ),
    "its states decay by a number for each channel (Kimi Delta Attention)": (
        "kimi-linear kimi_linear"
    ),
    "it has a trillion parameters, and its folder's tokenizer is a program": (
        "kimi-k2 kimi_k2 kimi_k25"
    ),
    "it attends to tokens that an indexer chooses (DeepSeek Sparse Attention)": (
        "deepseek32 deepseek_v32 deepseek4 deepseek_v4 glm-dsa glm_moe_dsa"
    ),
    "it drafts from the states and keys of a Gemma 4, and is no model alone": (
        "gemma4-assistant gemma4_assistant"
    ),
    "its decoder attends to an encoder, and distances add learned numbers to scores": (
        "t5 mt5 umt5"
    ),
    "distances add learned numbers to its scores (T5)": "t5encoder",
    "it has adapters of its own, one for each task": "jina-bert-v3",
    _PICTURES: "qwen2vl qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
    f"{_PICTURES}; they enter several layers (deepstack)": (
        "qwen3vl qwen3vlmoe qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text"
    ),
    "it writes down speech: its decoder attends to an encoder of sound": "whisper",
    "it is what makes states of pictures or sound for another model": (
        "clip clip_vision_model siglip siglip_vision_model"
    ),
}
LEFT_OUT: dict[str, str] = {name: why for why, names in _REASONS.items() for name in names.split()}
