"""Hidden states tapped between a model's layers, and code shared by EAGLE 3 and DFlash, which read
them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.engine import EngineObserver
from treadle.errors import UnsupportedError
from treadle.models.drafters.target import bound
from treadle.models.graphs.decoder import TAPPED, tap_name
from treadle.spec_decode.draft_model import check_vocabularies
from treadle.spec_decode.mtp import ModelStates
from treadle.tokenizer.vocab import has_vocabulary

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.files.gguf import GGUF
    from treadle.kvcache.media import MediaRegistry
    from treadle.models.config import Config


class TappedStates(ModelStates):
    """Keeps the model's states before ``layers``, side by side, f32 ``[n, len(layers) * n_embd]``
    of each sequence's tokens. ``n_embd``: the width of one state.
    """

    output = TAPPED

    def __init__(self, layers: Seq[int], n_embd: int, media: MediaRegistry) -> None:
        super().__init__(n_embd, media)
        self._names = [tap_name(i) for i in layers]

    def rows_of(self, ready: PreparedPlan) -> np.ndarray:
        """Return the tapped states of a run's tokens, side by side, f32
        ``[n, len(layers) * n_embd]``.
        """
        n = ready.run["n_tokens"]
        outputs = ready.plan.outputs
        return np.concatenate(
            [ready.rows(outputs[name], n, self._n_embd) for name in self._names], 1
        )


class GivenRows(EngineObserver):
    """Writes the rows ``given``, f32 ``[n, width]``, into the input ``label`` of a run's plan,
    which computes the graph's output ``output``.
    """

    def __init__(self, output: str, label: str) -> None:
        self.output = output
        self.label = label
        self.given = np.zeros((0, 0), np.float32)

    def before_run(self, ready: PreparedPlan) -> None:
        """Write the rows ``given`` into the plan's input ``label``."""
        ready.write(self.label, self.given)


def bind_target(draft: GGUF, config: Config, engine: Engine) -> tuple[GGUF, Config]:
    """Return a drafter's file and config, completed with the embeddings and output of ``engine``'s
    model where the file has none. Make ``engine`` output the states that the drafter reads
    (``Engine.tap``).

    Raises UnsupportedError if ``draft`` was made for another model, or if the model's layers are in
    several processes.
    """
    if has_vocabulary(draft):
        check_vocabularies(engine.gguf, draft)
    elif config.n_vocab != engine.config.n_vocab:
        raise UnsupportedError(
            f"{draft.path}: cannot draft for {engine.gguf.path}: it drafts {config.n_vocab} "
            f"tokens, the model has {engine.config.n_vocab}"
        )
    if not engine.has_states:
        what = "drafts from the model's states, which are in another process"
        raise UnsupportedError(f"{draft.path}: {config.arch.name} {what}")
    gguf, made = bound(config, draft, engine.config, engine.gguf)
    assert made.draft is not None
    engine.tap(made.draft.layers)
    return gguf, made
