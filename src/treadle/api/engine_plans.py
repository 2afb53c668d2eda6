"""The plans that a model's requests need, so that they can be compiled before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from treadle.engine.engine import CHUNK, OUTPUTS
from treadle.engine.prepared_plan import PlanKey
from treadle.jit.kernel import compile_processes_held

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.engine.engine import Engine
    from treadle.plan.plan import Plan


class EnginePlan(NamedTuple):
    """A plan that an engine may run, by its key."""

    engine: Engine
    key: PlanKey

    def lower(self) -> Plan:
        """Return the plan, lowered but not compiled."""
        return self.engine.lower(self.key)

    def make(self) -> None:
        """Lower and compile the plan, and wait for it."""
        self.engine.plan_for(*self.key)

    def compile_ahead(self, *, later: bool = False) -> bool:
        """Begin to compile the plan in other processes; ``later``: after all other plans. Return
        whether this has begun; if not, it need not or cannot be compiled there.
        """
        return self.engine.compile_ahead(self.key, later=later)


def text_plans(model: Model) -> Iterator[EnginePlan]:
    """Yield the plans for texts in every batch size, first those that a single text needs: the
    model's, then its draft model's.
    """
    drafting = model.stepper.scheduler.drafting
    engines = [(model.engine, drafting.observer.output)]
    if (drafter := drafting.drafter) is not None:
        engines += [(drafter.engine, output) for output in drafter.outputs]
    for engine, output in engines:
        has_adapters = engine.has_adapters  # if deterministic, only these plans are run
        for adapted in {has_adapters, has_adapters and engine.deterministic}:
            for steered in {False, bool(engine.control_vectors)}:
                for n_tokens, n_outputs in _sizes(engine):
                    if engine.config.main_output != "logits":
                        output = "embedding"
                    sizes = n_tokens, n_outputs
                    key = PlanKey(*sizes, output, adapted, steered=steered)
                    yield EnginePlan(engine, key)


def _sizes(engine: Engine) -> Iterator[tuple[int, int]]:
    few = engine.few
    if engine.config.main_output != "logits":
        for n_tokens in (*few, min(engine.max_tokens, CHUNK)):  # longer inputs are rare
            yield n_tokens, 1
        return
    for n_tokens in (*few, engine.max_tokens):
        for n_outputs in (*few, OUTPUTS):
            if n_tokens == engine.max_tokens or n_outputs <= n_tokens:
                yield n_tokens, n_outputs


def probe_plans(model: Model) -> tuple[EnginePlan, EnginePlan]:
    """Return two plans to test whether everything has been compiled before: that of a single text's
    decoding, and the largest for few tokens, which only several texts need.
    """
    first, *others = (plan for plan in text_plans(model) if plan.engine is model.engine)
    few = [plan for plan in others if plan.key.n_tokens < plan.engine.max_tokens]
    return first, max(few, key=lambda plan: (plan.key.n_tokens, -plan.key.n_outputs), default=first)


def compile_plans(model: Model) -> None:
    """Compile every plan that completions, chats and a server need, and wait: several processes
    work, on the slowest kernels first.
    """
    plans = [*text_plans(model)]
    with compile_processes_held():
        for plan in plans:
            plan.compile_ahead()
        for plan in plans:
            plan.make()
        if model.engine.encoder is not None:
            model.engine.encoder.warm()
        if model.media is not None:
            model.media.warm()
            for plan in media_plans(model):
                plan.make()


def media_plans(model: Model) -> Iterator[EnginePlan]:
    """Yield the plans for prompts that contain rows of pictures or sounds."""
    engine = model.engine
    output = model.stepper.scheduler.drafting.observer.output
    for n_tokens in (*engine.few, CHUNK, engine.max_tokens):
        if n_tokens <= engine.max_tokens:
            adapted, steered = engine.has_adapters, bool(engine.control_vectors)
            yield EnginePlan(engine, PlanKey(n_tokens, 1, output, adapted, True, steered))
