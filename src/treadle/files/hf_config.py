"""Layouts of ``config.json`` that differ between folders of one ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THINKER = "thinker_config"
WITH_THINKER = frozenset({"qwen3_asr"})  # their first folders have all parts in it


def without_thinker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the keys of ``thinker_config`` moved to the top, where newer folders
    have them (Qwen 3 ASR). Other configs are returned unchanged.
    """
    inner = config.get(THINKER)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in WITH_THINKER or not isinstance(inner, Mapping):
        return config
    return {**config, **inner, "model_type": kind}
