"""The common part of treadle's components."""

from haystack_integrations.common.treadle.component import ModelSource, TreadleComponent

__all__ = ["ModelSource", "TreadleComponent"]
