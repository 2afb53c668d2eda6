"""``TreadleEmbeddings``: vectors of texts."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_treadle.settings import LoadedModel


class TreadleEmbeddings(LoadedModel, Embeddings):
    """Vectors by a model of treadle, in this process: ``TreadleEmbeddings(model="minilm.gguf")``.

    ``load_options`` are settings of ``treadle.load``. The event loop stays free in ``aembed_...``.
    """

    query_prompt: str = ""
    """A text before each query, for models that were trained with one."""
    document_prompt: str = ""
    dimensions: int | None = None
    """Number of values of a vector that are kept (Matryoshka)."""
    normalize: bool = True
    """Whether vectors have length 1."""
    truncate: bool = False
    """Whether a text that is too long is cut; else it is an error."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a vector for each text."""
        return self._vectors([self.document_prompt + text for text in texts])

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return self._vectors([self.query_prompt + text])[0]

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        vectors: Any = self.loaded.embed(
            texts,
            normalize=self.normalize,
            dimensions=self.dimensions,
            truncate=self.truncate,
        )
        found: list[list[float]] = vectors.tolist()
        return found
