"""Selection of the tokens of a drafted block in DFlash 2. The candidates for each position are the
tokens with the largest logits there; the token before decides among them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.engine import EngineObserver
from treadle.models.drafters.dflash import SELECTOR_VECTORS
from treadle.models.drafters.target import PREDECESSOR, SUCCESSOR
from treadle.spec_decode.draft_model import TokenTable

if TYPE_CHECKING:
    from treadle.engine.batch import BatchItem
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.files.gguf import GGUF


class CandidateSelector(EngineObserver):
    """Selects a block's tokens one after the other. To the logit of each candidate it adds the sum
    of the elementwise product of three vectors: those of the token before, of the candidate, and of
    the position, which a run computes. ``rank``: the vectors' width.
    """

    output = SELECTOR_VECTORS

    def __init__(self, gguf: GGUF, rank: int) -> None:
        self._predecessors = TokenTable(gguf, PREDECESSOR)
        self._successors = TokenTable(gguf, SUCCESSOR)
        self._rank = rank
        self.vectors = np.zeros((0, rank), np.float32)  # of the last run's outputs

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Keep, as ``vectors``, the vectors of the run's output positions, f32 ``[n, rank]``."""
        n = int(ready.run["n_outputs"])
        self.vectors = ready.rows(ready.plan.outputs[SELECTOR_VECTORS], n, self._rank).copy()

    def choose(self, before: int, row: int, tokens: Seq[int], logits: np.ndarray) -> int:
        """Return the index of the best of the candidates ``tokens``, whose ``logits`` are given,
        after the token ``before``; the first of equal ones. ``row``: index of the position among
        the run's outputs.
        """
        weights = self._predecessors.rows([before])[0] * self.vectors[row]
        return int(np.argmax(logits + self._successors.rows(tokens) @ weights))
