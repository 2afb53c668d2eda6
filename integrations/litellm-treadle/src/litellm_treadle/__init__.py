"""treadle as a provider of LiteLLM, in the same process.

::

    import litellm
    import litellm_treadle

    litellm_treadle.register()
    litellm.completion(model="treadle/model.gguf", messages=[...])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import litellm

import treadle
from litellm_treadle.handler import TreadleHandler

__all__ = ["TreadleHandler", "register"]


def register(
    models: Mapping[str, treadle.Model | str | os.PathLike[str]] | None = None,
    *,
    provider: str = "treadle",
    **load_options: Any,
) -> TreadleHandler:
    """Make ``provider/NAME`` a model of LiteLLM, in place of an earlier handler of the provider.

    ``models``: models by name, loaded ones or paths; any other name is a path or a name that
    ``treadle.load`` takes. ``load_options``: settings of ``treadle.load`` for these.
    """
    handler = TreadleHandler(models, **load_options)
    others = [row for row in litellm.custom_provider_map if row["provider"] != provider]
    litellm.custom_provider_map = [*others, {"provider": provider, "custom_handler": handler}]
    return handler
