"""``TreadleEmbedding``: vectors by a model of treadle, in the same process."""

from llama_index.embeddings.treadle.base import TreadleEmbedding

__all__ = ["TreadleEmbedding"]
