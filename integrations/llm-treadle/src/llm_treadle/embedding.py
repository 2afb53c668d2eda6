"""llm's embedding models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import llm
from llm.models import EmbeddingModel

from llm_treadle.loaded import loaded_model
from llm_treadle.registry import Entry
from treadle.errors import TreadleError


class TreadleEmbedding(EmbeddingModel):
    """An embedding model: one vector of length 1 a text."""

    supports_text = True
    supports_binary = False
    batch_size = 32  # texts whose vectors are kept before llm stores them

    def __init__(self, entry: Entry) -> None:
        self.model_id = entry.name
        self._entry = entry

    def embed_batch(
        self, items: Iterable[str | bytes], *, key: str | None = None
    ) -> Iterator[list[float]]:
        """Yield the vector of each text. Raises llm.ModelError."""
        texts = [item if isinstance(item, str) else item.decode() for item in items]
        try:
            model = loaded_model(self._entry.source, self._entry.options)
            yield from model.embed(texts).tolist()
        except TreadleError as error:
            raise llm.ModelError(str(error)) from error
