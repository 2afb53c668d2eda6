"""What treadle leaves out, and why: by GGUF's ``general.architecture`` and by ``model_type``."""

from __future__ import annotations

# A reason, and who has it. Names of both kinds: where they differ both are here.
_REASONS: dict[str, str] = {
    "it clamps queries, keys and values, norms with LayerNorm, and has 132 billion parameters": (
        "dbrx"
    ),
    "its softcaps and norms around experts are its own, and it has 314 billion parameters": (
        "grok grok-1"
    ),
    "it chooses experts one after the other, each by a softmax of its own (SparseMixer)": "phimoe",
    "its states follow a recurrence of their own (WKV), in place of attention": (
        "rwkv rwkv6 rwkv7 rwkv6qwen2 arwkv7"
    ),
    "each head's keys and values are made of a short row and kept, where treadle keeps the row": (
        "minicpm3 plm"
    ),
    "its layers are run several times over, with other keys and values each time": "nanbeige",
    "its states decay by a number for each channel (Kimi Delta Attention)": (
        "kimi-linear kimi_linear bailingmoe3 bailing_hybrid kimi-k3"
    ),
    "it has a trillion parameters, and its folder's tokenizer is a program": (
        "kimi-k2 kimi_k2 kimi_k25"
    ),
    "it attends to tokens that an indexer chooses (DeepSeek Sparse Attention)": (
        "deepseek32 deepseek_v32 deepseek4 deepseek_v4 glm-dsa glm_moe_dsa dots3note dots3_note "
        "dots3_note_text"
    ),
    "it attends to blocks of tokens that an indexer chooses (MiniMax Sparse Attention)": (
        "minimax-m3 minimax_m3_vl minimax_m3_vl_text"
    ),
    "most of its layers keep a state (lightning attention) in place of keys and values": (
        "minimax-01 minimax"
    ),
    "its layers carry several streams of states (hyper-connections)": (
        "qwen4exp qwen4_exp qwen4_exp_text hy_v4 hy_v4_vl hy_v4_vl_text glm5-next glm5_next "
        "glm5_next_text"
    ),
    "its text goes through the same layers several times": "hrm_text",
    "its layers add the embeddings once more, each by a factor of its own": "talkie",
    "embeddings have a norm without weights, and norms behind products an epsilon of their own": (
        "muse-glimmer muse_glimmer muse_glimmer_text"
    ),
    "each head's result has a sigmoid gate, and transformers has no such model": "spark2_5",
    "its experts are clamped, layer by layer, and transformers has no such model": "maple",
    "some of its layers have no attention, or a matrix in its place": "deci nemotron-nas",
    "its experts read the states from before attention, and it has 480 billion parameters": (
        "arctic"
    ),
    "its Mamba has norms of B, C and dt": "plamo2",
    "its tokens choose adapters that stand inside it": "graniteswitch",
    "its model is a program in its folder: transformers has none that treadle can be checked by": (
        "llama-embed maincoder neo-bert openelm plamo plamo3 qwen"
    ),
    "its scores are divided by the size of a head, and no key of its files says so": "jais",
    "llama.cpp writes its vocabulary without the scores by which pieces are joined": "xverse",
    "llama.cpp lists its name, and has no model behind it": "gptj",
    "it drafts from the states and keys of a Gemma 4, and is no model alone": (
        "gemma4-assistant gemma4_assistant"
    ),
    "it drafts from the states of another model, and is no model alone": "eagle3 dflash",
    "its decoder attends to an encoder, and distances add learned numbers to scores": (
        "t5 mt5 umt5"
    ),
    "distances add learned numbers to its scores (T5)": "t5encoder",
    "it has adapters of its own, one for each task": "jina-bert-v3",
    "what it writes is read off pictures, which treadle does not read": "paddleocr paddleocr_vl",
    "its layers have further matrices for the tokens of pictures": "cogvlm",
    "its experts are in two groups, one for text and one for pictures": "ernie4_5_vl_moe",
    "its model of text is one of several in a folder; GGUF files of it run": (
        "qwen2_5_omni qwen3_omni_moe"
    ),
    "it reads pictures of text": "deepseek2-ocr deepseek_ocr2 deepseek_ocr2_text",
    "it reads and writes pictures, whose tokens stand among those of text": "chameleon",
    "it makes speech, not text": (
        "qwen3tts qwen3_tts pockettts pocket_tts wavtokenizer-dec wavtokenizer"
    ),
    "it writes down speech: its decoder attends to an encoder of sound": "whisper",
    "it writes by unmasking many tokens at once (diffusion), not one after the other": (
        "llada llada-moe llada_moe dream Dream rnd1"
    ),
    "several experts share one more, small one, which counts once a token (Grove)": (
        "grovemoe grove_moe"
    ),
    "its router reads the states before attention": "smallthinker",
    "it is what makes states of pictures or sound for another model": (
        "clip clip_vision_model siglip siglip_vision_model"
    ),
}
LEFT_OUT: dict[str, str] = {name: why for why, names in _REASONS.items() for name in names.split()}
