"""What treadle's components have in common."""

from haystack_integrations.common.treadle.component import ModelSource, TreadleComponent

__all__ = ["ModelSource", "TreadleComponent"]
