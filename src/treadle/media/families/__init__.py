"""Projector families by ``clip.projector_type``, and tensor names of Hugging Face folders by
``model_type``.

::

    qwen_vl.py         Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: blocks of 2 x 2 patches
    glm4v.py           GLM-4.1V to GLM-4.6V, GLM-OCR
    gemma3.py          Gemma 3: squares, 256 rows each
    gemma4.py          Gemma 4: pictures of any shape, means of 3 x 3 patches
    gemma4_unified.py  Gemma 4 12B: pictures and sound without a tower
    idefics3.py        SmolVLM, Idefics 3, Granite-Docling: tiles
    internvl.py        InternVL 2.5 to 3.5: tiles
    lfm2.py            LFM2-VL: pictures of any shape, or tiles
    llama4.py          Llama 4: tiles
    llava.py           LLaVA 1.5 and 1.6: a square, or tiles
    pixtral.py         Pixtral, Mistral Small 3.x, Ministral 3: pictures of any shape
    qwen2_audio.py     Qwen2-Audio: Whisper's encoder, sounds of at most 30 s
    qwen3_asr.py       Qwen3-ASR: convolutions and windows of 8 s
    ultravox.py        Ultravox: Whisper's encoder, eight states a row
    voxtral.py         Voxtral: Whisper's encoder, four states a row
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.media.unsupported import UNSUPPORTED_PROJECTORS
from treadle.models.structure import LazyConstants

if TYPE_CHECKING:
    from treadle.media.family import MediaFamily
    from treadle.media.hf_projector import HfNames

FAMILIES: LazyConstants[type[MediaFamily]] = LazyConstants(
    __name__,
    {},
    lazy={
        "qwen2vl_merger": "qwen_vl.Qwen2Vl",
        "qwen2.5vl_merger": "qwen_vl.Qwen25Vl",
        "qwen3vl_merger": "qwen_vl.Qwen3Vl",
        "glm4v": "glm4v.Glm4v",
        "gemma3": "gemma3.Gemma3Vision",
        "gemma4v": "gemma4.Gemma4Vision",
        "gemma4uv": "gemma4_unified.Gemma4UnifiedVision",
        "gemma4ua": "gemma4_unified.Gemma4UnifiedAudio",
        "idefics3": "idefics3.Idefics3",
        "mlp": "llava.Llava",
        "pixtral": "pixtral.Pixtral",
        "internvl": "internvl.InternVl",
        "lfm2": "lfm2.Lfm2",
        "llama4": "llama4.Llama4Vision",
        "qwen2a": "qwen2_audio.Qwen2Audio",
        "qwen3a": "qwen3_asr.Qwen3Asr",
        "voxtral": "voxtral.Voxtral",
        "ultravox": "ultravox.Ultravox",
    },
)

# The tables of names of Hugging Face folders, by ``model_type``.
HF_NAMES: LazyConstants[HfNames] = LazyConstants(
    __name__,
    {},
    lazy={
        "qwen2_vl": "qwen_vl.QWEN2_VL",
        "qwen2_5_vl": "qwen_vl.QWEN25_VL",
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen_vl.QWEN3_VL"),
        **dict.fromkeys(("glm4v", "glm4v_moe"), "glm4v.GLM4V"),
        "gemma3": "gemma3.GEMMA3",
        "gemma4": "gemma4.GEMMA4",
        "gemma4_unified": "gemma4_unified.GEMMA4_UNIFIED",
        **dict.fromkeys(("idefics3", "smolvlm"), "idefics3.IDEFICS3"),
        **dict.fromkeys(("llava", "llava_next"), "llava.LLAVA"),
        "mistral3": "pixtral.MISTRAL3",
        "internvl": "internvl.INTERNVL",
        "internvl_chat": "internvl.INTERNVL_CHAT",
        "lfm2_vl": "lfm2.LFM2_VL",
        "llama4": "llama4.LLAMA4",
        "qwen2_audio": "qwen2_audio.QWEN2_AUDIO",
        "qwen3_asr": "qwen3_asr.QWEN3_ASR",
        "voxtral": "voxtral.VOXTRAL",
        "ultravox": "ultravox.ULTRAVOX",
    },
)


def hf_names_of(model_type: str, where: str) -> HfNames:
    """Return the table of tensor names for Hugging Face folders of a ``model_type``; ``where``: the
    file, for messages. Raises UnsupportedError for a type without a table.
    """
    if model_type not in HF_NAMES.names():
        have = ", ".join(sorted(HF_NAMES.names()))
        what = f"{where}: pictures and sound of model_type {model_type!r:.60} are not supported"
        raise UnsupportedError(f"{what} (supported: {have})")
    return HF_NAMES[model_type]


def family_of(projector_type: str, where: str) -> type[MediaFamily]:
    """Return the family of a projector type; ``where``: the file, for messages.

    Raises UnsupportedError, with the reason, for a type that treadle does not support.
    """
    if projector_type in FAMILIES.names():
        return FAMILIES[projector_type]
    raise unsupported_type(projector_type, where)


def unsupported_type(projector_type: str, where: str) -> UnsupportedError:
    """Return the error for a projector type that treadle does not support, with the reason;
    ``where``: the file, for the message.
    """
    why = UNSUPPORTED_PROJECTORS.get(projector_type, "treadle does not know it")
    have = ", ".join(sorted(FAMILIES.names()))
    what = f"{where}: projector type {projector_type!r:.60} is not supported: {why}"
    return UnsupportedError(f"{what} (supported: {have})")
