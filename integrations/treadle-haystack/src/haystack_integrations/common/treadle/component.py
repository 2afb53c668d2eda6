"""A component's model, and its serialisation."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import treadle

ModelSource = treadle.Model | str | os.PathLike[str] | None


class TreadleComponent:
    """Base of components that use a model: a path, a name as ``treadle.load`` takes it, None for
    the small model inside treadle, or a ``treadle.Model``. A path is opened by ``warm_up``, or at
    the first run, once for all components with the same ``load_options`` (settings of
    ``treadle.load``).
    """

    def __init__(
        self, model: ModelSource = None, load_options: dict[str, Any] | None = None
    ) -> None:
        self.model = model
        self.load_options = load_options or {}
        self._completions: treadle.ChatCompletions | None = None

    @property
    def completions(self) -> treadle.ChatCompletions:
        """The loaded model. Raises the errors of ``treadle.load``."""
        if self._completions is None:
            options = {} if isinstance(self.model, treadle.Model) else self.load_options
            self._completions = treadle.ChatCompletions(treadle.load_shared(self.model, **options))
        return self._completions

    def warm_up(self) -> None:
        """Load the model."""
        self.completions  # noqa: B018  # loads it

    async def warm_up_async(self) -> None:
        """Load the model in a thread."""
        await asyncio.to_thread(self.warm_up)

    def own_parameters(self) -> dict[str, Any]:
        """Return what ``to_dict`` keeps of this class: a loaded model is kept as its path."""
        path = self.model.path if isinstance(self.model, treadle.Model) else self.model
        return {
            "model": None if path is None else os.fspath(path),
            "load_options": self.load_options,
        }
