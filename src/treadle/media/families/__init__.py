"""Projector families by ``clip.projector_type``, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.media.unsupported import UNSUPPORTED_PROJECTORS
from treadle.models.structure import LateConstants

if TYPE_CHECKING:
    from treadle.media.family import MediaFamily

FAMILIES: LateConstants[type[MediaFamily]] = LateConstants(
    __name__,
    {},
    late={
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
    },
)


def family_of(projector_type: str, where: str) -> type[MediaFamily]:
    """Return the family of a projector type; ``where``: the file, for messages.

    Raises UnsupportedError, with the reason, for a type that treadle does not support.
    """
    try:
        return FAMILIES[projector_type]
    except KeyError:
        pass
    why = UNSUPPORTED_PROJECTORS.get(projector_type, "treadle does not know it")
    have = ", ".join(sorted(FAMILIES.names()))
    what = f"{where}: projector type {projector_type!r:.60} is not supported: {why}"
    raise UnsupportedError(f"{what} (supported: {have})")
