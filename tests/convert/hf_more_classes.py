"""transformers' classes of ``convert/hf/families/``, by ``model_type``."""

from __future__ import annotations

MORE_CLASSES = {
    "helium": "Helium",
    "ministral": "Ministral",
    "cwm": "Cwm",
    "iquestcoder": "IQuestCoder",
    "vaultgemma": "VaultGemma",
    "hyperclovax": "HyperCLOVAX",
    "gpt-sw3": "GPT2",
    "bamba": "Bamba",
    "flex_olmo": "FlexOlmo",
    "gemma4_unified_text": "Gemma4UnifiedText",
    "granite4_vision_text": "Granite4VisionText",
    "nanochat": "NanoChat",
    "muse_glimmer_text": "MuseGlimmerText",
    "muse_glimmer_assistant": "MuseGlimmerAssistant",  # a drafter
    "lfm3": "Lfm3",
    "bailing_hybrid": "BailingHybrid",
    "hy_v4": "HYV4",
    "hrm_text": "HrmText",
    "inkling_text": "InklingText",
    "axk2": "AXK2",
    "cohere_compass_text": "CohereCompassText",
    "dots3_note_text": "Dots3NoteText",
    "deepseek_v32": "DeepseekV32",
    "deepseek_v4": "DeepseekV4",
    "glm_moe_dsa": "GlmMoeDsa",
    "glm5_next_text": "Glm5NextText",
    "embedding_gemma2_text": "EmbeddingGemma2Text",
    "gpt_neo": "GPTNeo",
    "olmo_hybrid": "OlmoHybrid",
}
