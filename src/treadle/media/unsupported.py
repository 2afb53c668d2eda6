"""Projector types of llama.cpp that treadle does not support, and why.

The types are those of llama.cpp's ``tools/mtmd/clip-impl.h`` (September 2026), and ``gemma3n``'s.
"""

from __future__ import annotations

# Reason -> projector types.
_REASONS: dict[str, str] = {
    "its pictures go through MobileVLM's depthwise convolutions": "ldp ldpv2",
    "its pictures are read by learned queries (a resampler)": "resampler minicpmv4_6",
    "its pictures go through GLM-Edge's adapter": "adapter",
    "its pictures go through MobileNet convolutions": "gemma3nv",
    "its sound goes through a conformer": "gemma3na gemma4a lfm2a granite_speech parakeet",
    "its sound encoder is not supported yet": (
        "glma meralion musicflamingo mimo_audio dots3note_a"
    ),
    "its pictures and sound share a file in a layout of its own": "qwen2.5o",
    "its decoder has extra matrices for pictures": "cogvlm phi4",
    "its pictures go through a SAM encoder with convolutions": (
        "deepseekocr deepseekocr2 deepseek4v"
    ),
    "its pictures go through window Q-Formers": "granite4_vision",
    "it generates speech": "qwen3tts_spkenc qwen3tts_gen pockettts_spkenc pockettts_gen",
    "its picture tower is not supported yet": (
        "ling3vl step3vl kimivl kimik25 paddleocr lightonocr janus_pro dots_ocr dots3note_v "
        "youtuvl yasa2 nemotron_v2_vl exaone4_5 hunyuanvl hunyuanocr mimovl minimax_m3 "
        "muse-glimmer mlp_norm"
    ),
}
UNSUPPORTED_PROJECTORS: dict[str, str] = {
    name: why for why, names in _REASONS.items() for name in names.split()
}
