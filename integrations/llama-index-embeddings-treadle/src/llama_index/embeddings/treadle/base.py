"""``TreadleEmbedding``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr

import treadle


class TreadleEmbedding(BaseEmbedding):
    """Vectors of texts. ``model``: a path, a name as ``treadle.load`` takes it, or a
    ``treadle.Model``; a path is opened at the first use, once for all objects with the same
    settings. ``load_options``: settings of ``treadle.load``, such as ``context``.
    """

    model: str | None = Field(default=None, description="A path or a name.")
    load_options: dict[str, Any] = Field(default_factory=dict)
    query_instruction: str = Field(default="", description="A text before each query.")
    text_instruction: str = Field(default="", description="A text before each document.")
    dimensions: int | None = Field(default=None, description="Values that are kept (Matryoshka).")
    normalize: bool = Field(default=True, description="Whether vectors have length 1.")
    truncate: bool = Field(default=False, description="Whether texts that are too long are cut.")

    _given: Any = PrivateAttr()

    def __init__(
        self, model: treadle.Model | str | os.PathLike[str] | None = None, **settings: Any
    ) -> None:
        path = None if model is None else str(getattr(model, "path", model))
        super().__init__(**{"model": path, "model_name": path or "treadle", **settings})
        self._given = model

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised objects."""
        return "TreadleEmbedding"

    @property
    def loaded(self) -> treadle.Model:
        """The model. Raises the errors of ``treadle.load``."""
        if not isinstance(self._given, treadle.Model):
            self._given = treadle.load_shared(self._given, **self.load_options)
        loaded: treadle.Model = self._given
        return loaded

    def _vectors(self, texts: list[str]) -> list[Embedding]:
        vectors: list[Embedding] = self.loaded.embed(
            texts,
            normalize=self.normalize,
            dimensions=self.dimensions,
            truncate=self.truncate,
        ).tolist()
        return vectors

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._vectors([self.query_instruction + query])[0]

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._vectors([self.text_instruction + text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return self._vectors([self.text_instruction + text for text in texts])

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
