"""EngineObserver: code that the engine calls before and after a run of ``sample``."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.engine.batch import BatchItem
    from treadle.engine.prepared_plan import PreparedPlan


class EngineObserver:
    """Callbacks around a run of ``Engine.sample`` or ``Engine.observe``; this base class does
    nothing. Both methods are called under the engine's lock.

    output: the output of the graph that the run computes: "logits", or for ``sample`` another one
        that includes logits.
    """

    output: str = "logits"

    def before_run(self, ready: PreparedPlan) -> None:
        """Called when the run's inputs are written and the device has not started: further inputs
        may be written to the plan's memory. Called again if a signal stopped the run and it is
        repeated.
        """

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Called after the run of ``parts``, while its outputs are in the plan's memory."""


NO_OBSERVER = EngineObserver()
