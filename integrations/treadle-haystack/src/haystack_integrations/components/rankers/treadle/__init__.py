"""``TreadleRanker``: sorts documents by a cross-encoder, in the same process."""

from haystack_integrations.components.rankers.treadle.ranker import TreadleRanker

__all__ = ["TreadleRanker"]
