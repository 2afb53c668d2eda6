"""``TreadleTextEmbedder`` for queries, ``TreadleDocumentEmbedder`` for documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict

from haystack_integrations.common.treadle import ModelSource, TreadleComponent


class _Embedder(TreadleComponent):
    """The common part of both embedders."""

    def __init__(
        self,
        model: ModelSource,
        load_options: dict[str, Any] | None,
        *,
        prefix: str,
        suffix: str,
        dimensions: int | None,
        normalize: bool,
        truncate: bool,
    ) -> None:
        super().__init__(model, load_options)
        self.prefix = prefix
        self.suffix = suffix
        self.dimensions = dimensions
        self.normalize = normalize
        self.truncate = truncate

    def own_parameters(self) -> dict[str, Any]:
        """Return what ``to_dict`` keeps."""
        return {
            **super().own_parameters(),
            "prefix": self.prefix,
            "suffix": self.suffix,
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "truncate": self.truncate,
        }

    def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text, between prefix and suffix."""
        if not texts:
            return []
        found: list[list[float]] = self.completions.model.embed(
            [f"{self.prefix}{text}{self.suffix}" for text in texts],
            normalize=self.normalize,
            dimensions=self.dimensions,
            truncate=self.truncate,
        ).tolist()
        return found

    def meta(self) -> dict[str, Any]:
        """Return what a run tells about its model."""
        return {"model": self.completions.name}


@component
class TreadleTextEmbedder(_Embedder):
    """Embeds one text, such as a query.

    ``prefix`` and ``suffix`` stand around it; ``dimensions``: how many values are kept
    (Matryoshka); ``normalize``: vectors have length 1; ``truncate``: a text that is too long is
    cut, else it is a ContextFullError.
    """

    def __init__(
        self,
        model: ModelSource = None,
        prefix: str = "",
        suffix: str = "",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        load_options: dict[str, Any] | None = None,
    ) -> None:
        # No super(): the decorator makes another class of this one.
        _Embedder.__init__(
            self,
            model,
            load_options,
            prefix=prefix,
            suffix=suffix,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dict."""
        made: dict[str, Any] = default_to_dict(self, **self.own_parameters())
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TreadleTextEmbedder:
        """Return the component of ``to_dict``."""
        made: TreadleTextEmbedder = default_from_dict(cls, data)
        return made

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        """Return the ``embedding`` of a text."""
        if not isinstance(text, str):
            found = type(text).__name__
            raise TypeError(f"text is {found}: use TreadleDocumentEmbedder for documents")
        return {"embedding": self.vectors([text])[0], "meta": self.meta()}

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    async def run_async(self, text: str) -> dict[str, Any]:
        """Do what ``run`` does, in a thread."""
        return await asyncio.to_thread(self.run, text)


@component
class TreadleDocumentEmbedder(_Embedder):
    """Embeds documents; see ``TreadleTextEmbedder`` for its settings.

    ``meta_fields_to_embed``: metadata that stand before a document's text, with
    ``embedding_separator`` between them.
    """

    def __init__(
        self,
        model: ModelSource = None,
        prefix: str = "",
        suffix: str = "",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        load_options: dict[str, Any] | None = None,
    ) -> None:
        # No super(): the decorator makes another class of this one.
        _Embedder.__init__(
            self,
            model,
            load_options,
            prefix=prefix,
            suffix=suffix,
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
        )
        self.meta_fields_to_embed = meta_fields_to_embed or []
        self.embedding_separator = embedding_separator

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dict."""
        made: dict[str, Any] = default_to_dict(
            self,
            **self.own_parameters(),
            meta_fields_to_embed=self.meta_fields_to_embed,
            embedding_separator=self.embedding_separator,
        )
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TreadleDocumentEmbedder:
        """Return the component of ``to_dict``."""
        made: TreadleDocumentEmbedder = default_from_dict(cls, data)
        return made

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return copies of the documents, with their embeddings."""
        if isinstance(documents, str) or not all(isinstance(each, Document) for each in documents):
            raise TypeError("documents: expected Documents; use TreadleTextEmbedder for a text")
        vectors = self.vectors([self._text(document) for document in documents])
        made = [
            replace(document, embedding=vector)
            for document, vector in zip(documents, vectors, strict=True)
        ]
        return {"documents": made, "meta": self.meta()}

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        """Do what ``run`` does, in a thread."""
        return await asyncio.to_thread(self.run, documents)

    def _text(self, document: Document) -> str:
        values = [document.meta.get(name) for name in self.meta_fields_to_embed]
        told = [str(value) for value in values if value is not None]
        return self.embedding_separator.join([*told, document.content or ""])
