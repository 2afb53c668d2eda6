"""``TreadleTextEmbedder`` and ``TreadleDocumentEmbedder``: vectors, in the same process."""

from haystack_integrations.components.embedders.treadle.embedders import (
    TreadleDocumentEmbedder,
    TreadleTextEmbedder,
)

__all__ = ["TreadleDocumentEmbedder", "TreadleTextEmbedder"]
