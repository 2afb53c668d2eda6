"""How well a model predicts a text, and how far its predictions are from another's."""

from __future__ import annotations

from treadle.perplexity.measure import N_SEQUENCES, Beside, Measured, Reference, measure
from treadle.perplexity.saved import SavedLogits, is_saved, save_logits
from treadle.perplexity.score import Comparison, Estimate, Summary, summarize
from treadle.perplexity.windows import Windows, cut

__all__ = [
    "N_SEQUENCES",
    "Beside",
    "Comparison",
    "Estimate",
    "Measured",
    "Reference",
    "SavedLogits",
    "Summary",
    "Windows",
    "cut",
    "is_saved",
    "measure",
    "save_logits",
    "summarize",
]
