"""Drafter with an EAGLE 3 model: one layer, which reads three states of the model for each token
that the model has run, and its own states for those that it has drafted.

Like an MTP layer it can draft for a request only from the first token that the model ran while it
was loaded; a cached prefix is context that it lacks. Drafts are checked, so the text is the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.models.drafters.eagle3 import AHEAD, STATES
from treadle.models.drafters.target import FEATURES, tokens_of
from treadle.spec_decode.draft_model import drafter_engine
from treadle.spec_decode.mtp import NextnDrafter
from treadle.spec_decode.tapped import GivenRows, TappedStates, bind_target

if TYPE_CHECKING:
    from treadle.engine.batch import BatchItem
    from treadle.engine.engine import Engine
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config


class DrafterStates(GivenRows):
    """Writes the states that the drafter's run reads: the model's (three per token, side by side)
    or the drafter's own. Keeps from the run the drafter's states of its tokens, ``rows``, f32 ``[n,
    n_embd]``.
    """

    def __init__(self, n_embd: int) -> None:
        super().__init__("logits", FEATURES)
        self.rows = np.zeros((0, n_embd), np.float32)
        self._n_embd = n_embd

    def set_inputs(self, given: np.ndarray, *, own: bool) -> None:
        """Set the rows of the next run; ``own``: they are the drafter's states."""
        self.output = AHEAD if own else "logits"
        self.label = STATES if own else FEATURES
        self.given = given

    def after_run(self, parts: Seq[BatchItem], ready: PreparedPlan) -> None:
        """Copy the drafter's states of the run's tokens from the plan's memory to ``rows``."""
        n = ready.run["n_tokens"]
        self.rows = ready.rows(ready.plan.outputs[AHEAD], n, self._n_embd).copy()


class Eagle3Drafter(NextnDrafter):
    """EAGLE 3 drafter for ``engine``, with the drafter's engine ``made``. Drafts as an MTP layer
    does, but from states that are tapped before three of the model's layers.
    """

    own_observer: DrafterStates  # type: ignore[assignment]

    def __init__(self, made: Engine, engine: Engine, **given: Any) -> None:
        config = made.config
        assert config.draft is not None
        observer = TappedStates(config.draft.layers, config.n_target, engine.media)
        super().__init__(made, engine, observer, **given)
        self.own_observer = DrafterStates(config.n_embd)
        self._tokens = tokens_of(made.gguf, self._n_vocab)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs that the drafter's plans compute: "logits" for runs that read
        the model's states, AHEAD for those that read the drafter's own.
        """
        return "logits", AHEAD

    def set_inputs(self, owners: Seq[Hashable], given: np.ndarray) -> None:
        """Set the states ``given`` of the next run: the drafter's own if ``owners`` have drafted
        tokens already, else the model's.
        """
        self.own_observer.set_inputs(given, own=bool(owners) and owners[0] in self._last)

    def close(self) -> None:
        """Close the drafter's engine and its file; the model's file stays open."""
        gguf = self.engine.gguf
        super().close()
        gguf.close()


def open_eagle3(draft: GGUF, config: Config, engine: Engine) -> Eagle3Drafter:
    """Return a drafter for ``engine``, on its device. Raises UnsupportedError if ``draft`` was made
    for another model, FileError if it names tokens that the model does not have.
    """
    gguf, config = bind_target(draft, config, engine)
    tokens_of(gguf, engine.config.n_vocab)
    return Eagle3Drafter(drafter_engine(engine, gguf, config, engine.n_ctx), engine)
