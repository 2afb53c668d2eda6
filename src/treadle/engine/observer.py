"""Code that takes part in the engine's runs for samplers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.engine.batch import BatchItem
    from treadle.engine.prepared_plan import PreparedPlan


class EngineObserver:
    """Takes part in a run of ``Engine.sample``; this base class does nothing.

    ``output``: the output of the graph that the run computes, "logits", or one that has logits
    among others. Both methods are called under the engine's lock.
    """

    output: str = "logits"

    def before_run(self, ready: PreparedPlan) -> None:
        """Called when the inputs of the run are written, before the device starts: further inputs
        may be written to the plan's memory. Called again if a signal stopped the run and it is
        repeated.
        """

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Called after the run of ``parts``, while its outputs are in the plan's memory."""


NO_OBSERVER = EngineObserver()
