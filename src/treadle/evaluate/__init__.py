"""Evaluation: perplexity of a text, and divergence of a model's predictions from a reference's."""

from __future__ import annotations

from treadle.evaluate.measure import N_SEQUENCES, Reference, ReferenceModel, Scores, measure
from treadle.evaluate.saved import SavedLogits, is_saved, save_logits
from treadle.evaluate.score import Comparison, Estimate, Summary, summarize
from treadle.evaluate.windows import TokenWindows, cut

__all__ = [
    "N_SEQUENCES",
    "Comparison",
    "Estimate",
    "Reference",
    "ReferenceModel",
    "SavedLogits",
    "Scores",
    "Summary",
    "TokenWindows",
    "cut",
    "is_saved",
    "measure",
    "save_logits",
    "summarize",
]
