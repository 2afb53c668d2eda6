"""``TreadleRanker``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict

from haystack_integrations.common.treadle import ModelSource, TreadleComponent


@component
class TreadleRanker(TreadleComponent):
    """Sorts documents by how well they answer a query, with a cross-encoder of treadle.

    ``top_k``: how many are kept, None for all; ``truncate``: documents that are too long are cut.
    """

    def __init__(
        self,
        model: ModelSource = None,
        top_k: int | None = 10,
        truncate: bool = True,
        load_options: dict[str, Any] | None = None,
    ) -> None:
        # No super(): the decorator makes another class of this one.
        TreadleComponent.__init__(self, model, load_options)
        self.top_k = top_k
        self.truncate = truncate

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dict."""
        made: dict[str, Any] = default_to_dict(
            self, **self.own_parameters(), top_k=self.top_k, truncate=self.truncate
        )
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TreadleRanker:
        """Return the component of ``to_dict``."""
        made: TreadleRanker = default_from_dict(cls, data)
        return made

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Return the best documents, best first, each with its ``score``."""
        if not documents:
            return {"documents": []}
        texts = [document.content or "" for document in documents]
        scores = self.completions.model.rerank(query, texts, truncate=self.truncate).tolist()
        order = sorted(range(len(texts)), key=lambda i: -scores[i])
        kept = order[: self.top_k if top_k is None else top_k]
        return {"documents": [replace(documents[i], score=scores[i]) for i in kept]}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Do what ``run`` does, in a thread."""
        return await asyncio.to_thread(self.run, query, documents, top_k)
