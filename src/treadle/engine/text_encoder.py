"""The encoder of an encoder-decoder model: a prompt in, keys and values for the decoder out."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from treadle.engine.batch import BatchItem
from treadle.engine.cross_keys import CrossKeys
from treadle.engine.engine import CHUNK, Engine
from treadle.engine.prepared_plan import PlanKey
from treadle.engine.step_slices import StepSlices
from treadle.models.graphs.encoder_decoder import encoder_config, encoder_view, keys_config
from treadle.plan.weights import Weights

if TYPE_CHECKING:
    from treadle.engine.prepared_plan import PreparedPlan
    from treadle.kvcache.cache import EncodedKeys, Sequence
    from treadle.plan.plan import Plan

STATES = "states"
Prompt = tuple[Seq[int], "EncodedKeys"]  # its ids, and where its keys and values go


class TextEncoder:
    """Encodes prompts for the decoder ``engine``, on the same device. The caller holds that
    engine's lock during each call, and during each ``next`` of a generator.
    """

    def __init__(self, engine: Engine) -> None:
        device = engine.device
        gguf = engine.gguf
        self._engine = Engine(
            encoder_view(gguf),
            encoder_config(engine.config),
            device,
            n_ctx=engine.n_ctx,
            kv=engine.cache.kv,
            deterministic=engine.deterministic,
        )
        keys = keys_config(engine.config)
        weights = Weights(gguf, device)
        self._cross = CrossKeys(keys, weights, engine.cache, device, engine.n_ctx)
        self._slices: dict[PreparedPlan, StepSlices] = {}
        self._seqs: list[Sequence] = []  # of the only run; closed by the next one
        self._n_begun = 0  # runs; a run that finds another number begins again

    @property
    def engine(self) -> Engine:
        """The engine that runs the encoder's layers."""
        return self._engine

    def plans(self, n_tokens: int) -> tuple[Plan, Plan]:
        """Return the two plans for a prompt of ``n_tokens``: the encoder's layers, and the store of
        keys and values.
        """
        layers = self._engine.plan_for(n_tokens, 1, STATES).plan
        return layers, self._cross.plan_for(n_tokens).plan

    def warm(self) -> None:
        """Compile the plans for prompts of up to CHUNK tokens."""
        for n_tokens in (*self._engine.few, min(CHUNK, self._engine.max_tokens)):
            self.plans(n_tokens)

    @property
    def max_batched_tokens(self) -> int:
        """The most tokens of several prompts that are encoded in one run; a single prompt may be
        longer.
        """
        return min(CHUNK, self._engine.max_tokens)

    def encode(self, prompts: Seq[Prompt]) -> Generator[None, None, None]:
        """Store the keys and values of ``prompts``, (ids, destination) pairs that one run reads;
        yield between slices of the work. If other prompts were encoded in between, the work begins
        again. Raises FileError if the file changed.
        """
        engine = self._engine
        n_tokens = sum(len(ids) for ids, _ in prompts)
        key = PlanKey(n_tokens, 1, STATES)
        ready = engine.plan_for(*key)
        n_steps = len(ready.plan)
        at = n_steps, 0
        number = -1
        while number != self._n_begun or at[0] < n_steps:
            if number != self._n_begun:
                self._lay_out(key, prompts)
                self._n_begun += 1
                number = self._n_begun
                at = 0, 0
            at = self._slices_of(ready).run(n_tokens, *at)
            if at[0] < n_steps:
                yield
        engine.check_files()
        states = ready.rows(ready.plan.outputs[STATES], n_tokens, engine.config.n_embd)
        row = 0
        for ids, to in prompts:
            self._cross.store(states[row : row + len(ids)], to)
            row += len(ids)

    def _lay_out(self, key: PlanKey, prompts: Seq[Prompt]) -> None:
        """Write the inputs of a run of ``prompts`` for the plan ``key``, in place of the previous
        run's.
        """
        for seq in self._seqs:
            seq.close()
        self._seqs = [self._engine.cache.sequence() for _ in prompts]
        pairs = zip(self._seqs, prompts, strict=True)
        self._engine.lay_out(key, [BatchItem(seq, ids, 0) for seq, (ids, _) in pairs])

    def finish(self, ids: Seq[int], to: EncodedKeys) -> None:
        """Encode the prompt ``ids`` now, not in slices between other steps, and store its keys and
        values in ``to``, unless they are stored already.
        """
        for _ in () if to.is_stored else self.encode([(ids, to)]):
            pass

    def _slices_of(self, ready: PreparedPlan) -> StepSlices:
        """Return the ``StepSlices`` of a plan, which has the measured speeds of its kernels; a new
        one if the plan was moved in memory.
        """
        found = self._slices.get(ready)
        if found is None or found.program is not ready.program:
            found = self._slices[ready] = StepSlices(self._engine.device, ready.program)
        return found

    def close(self) -> None:
        """Release the plans and weights, and stop the device. The file stays open."""
        self._cross.close()
        self._engine.close()
