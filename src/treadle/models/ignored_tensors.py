"""Architectures that are not supported, with the reason, by ``general.architecture`` or
``model_type``.
"""

from __future__ import annotations

# Reason -> names of both kinds; if GGUF's and transformers' names differ, both are listed.
_REASONS: dict[str, str] = {
    "its states follow the WKV recurrence instead of attention": ("rwkv rwkv6 rwkv6qwen2"),
    "its expert output has a norm of its own, and it has 519 billion parameters": "axk1",
    "its layers have two attentions each, and some of its experts compute nothing": "longcat_flash",
    "it has a trillion parameters, and its folder's tokenizer is custom code": (
        "kimi-k2 kimi_k2 kimi_k25"
    ),
    "its rotations and its scores have learned factors": ("mistral_large4 mistral_large4_text"),
    "most of its layers keep a state (lightning attention) instead of keys and values": (
        "minimax-01 minimax"
    ),
    "its layers carry several streams of states (hyper-connections)": ("hy_v4_vl hy_v4_vl_text"),
    "it runs the same layers several times": "dory",
    "its experts read the states from before attention, and it has 480 billion parameters": (
        "arctic"
    ),
    "its Mamba has norms of B, C and dt": "plamo2",
    "its model is custom code in its folder: transformers has no reference implementation": (
        "plamo plamo3 grok-1 rwkv_hybrid"
    ),
    "llama.cpp writes its vocabulary without the scores that merge tokens": "xverse",
    "its decoder attends to an encoder": (
        "bart mbart bigbird_pegasus blenderbot blenderbot-small marian mvp pegasus plbart "
        "prophetnet t5gemma2"
    ),
    "it reads text from images, which are not supported": (
        "paddleocr paddleocr_vl blip blip-2 instructblip instructblipvideo pix2struct kosmos-2 "
        "kosmos-2.5 udop pp_formulanet pp_chart2table florence2 vision-encoder-decoder trocr git "
        "unlimited_ocr granite_docling"
    ),
    "some of its layers attend to pictures": "mllama mllama_text_model idefics",
    "the tokens of its prompt all see each other": "paligemma",
    "its matrices have adapters for images and audio": "phi4_multimodal",
    "it classifies images as safe or unsafe": "shieldgemma2",
    "its layers have extra matrices for image tokens": "cogvlm",
    "its experts are in two groups, one for text and one for images": "ernie4_5_vl_moe",
    "its text model is one of several in a folder; GGUF files of it run": (
        "qwen2_5_omni qwen3_omni_moe qwen2_5_omni_thinker qwen3_omni_moe_thinker nemotron_h_omni"
    ),
    "it reads pictures of text": "deepseek2-ocr deepseek_ocr2 deepseek_ocr2_text",
    "it reads and generates images as tokens among the text": ("chameleon emu3 emu3_text_model"),
    "it generates speech, not text": (
        "qwen3tts qwen3_tts pockettts pocket_tts wavtokenizer-dec wavtokenizer"
    ),
    "it transcribes speech, which is not supported": (
        "glmasr fun_asr_nano vibevoice_asr nemo_speechlm omniasr kyutai_speech_to_text "
        "moss_transcribe_diarize voxtral_realtime"
    ),
    "it controls robots": "pi0",
    "it generates music, not text": "musicgen musicgen_melody",
    "it generates by unmasking many tokens at once (diffusion), not one by one": (
        "llada llada-moe llada_moe dream Dream rnd1 diffusion_gemma"
    ),
    "its experts are chosen before the sigmoid that weighs them": "kolibri1",
    "its attention is the difference of two": "diffllama",
    "its attention layers share their weights": "zamba zamba2",
    "its attention layers are experts": "jetmoe",
    "its layers have gates that states decay by (RG-LRU)": "recurrent_gemma",
    "its states are those of an xLSTM": "xlstm",
    "its output matrix covers only some of its tokens": "apertus1p5 apertus1p5_text",
    "it is an encoder that generates text: GGUF has no architecture for it": "modernbert-decoder",
    "its folder's tokenizer is custom code": "kimi_vl",
    "it reads bytes and merges them with a model of its own": "blt",
    "GGUF has no architecture for it": (
        "opt gpt_neox_japanese openai-gpt xglm biogpt ctrl persimmon fuyu xlnet "
        "xlm reformer cpmant beam evolla moshi aria aria_text "
        "doge flint inkling2 inkling2_text inkling2_loop "
        "inkling2_loop_text lara_mini zaya molmo2 muse_spark granite_docling_text cosmos3_edge "
        "cosmos3_omni"
    ),
    "GGUF has no architecture for this encoder": (
        "ernie megatron-bert rembert roberta-prelayernorm roc_bert roformer "
        "xlm-roberta-xl xmod data2vec-text big_bird bert-generation"
    ),
    "it encodes images or audio for another model": (
        "clip clip_vision_model siglip siglip_vision_model"
    ),
}
LEFT_OUT: dict[str, str] = {name: why for why, names in _REASONS.items() for name in names.split()}
SPEECH = ("whisper",)
"""Architectures that ``treadle.speech`` reads."""
IS_SPEECH = "a speech model: it transcribes sound, with treadle transcribe or treadle.load_speech"
