"""``TreadleReranker``: sorts documents by how well they answer a query."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document

from langchain_treadle.settings import LoadedModel


class TreadleReranker(LoadedModel, BaseDocumentCompressor):
    """A cross-encoder of treadle, in this process, for ``ContextualCompressionRetriever``.

    Documents come back best first, with ``relevance_score`` in their metadata.
    """

    top_n: int | None = 3
    """Number of documents that are kept; None for all."""
    truncate: bool = True
    """Whether a document that is too long is cut; else it is an error."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> Sequence[Document]:
        """Return the best documents, best first."""
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        scores = self.loaded.rerank(query, texts, truncate=self.truncate).tolist()
        best = sorted(range(len(texts)), key=lambda i: -scores[i])[: self.top_n]
        return [
            documents[i].model_copy(
                update={"metadata": {**documents[i].metadata, "relevance_score": scores[i]}}
            )
            for i in best
        ]
