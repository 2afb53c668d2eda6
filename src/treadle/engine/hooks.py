"""Hooks: code that reads or changes what a plan's steps write, between the steps of a run.

While hooks are in use, an engine's class is ``HookedEngine``: it runs plans of another lowering
(``plan/lowering/observed.py``) in pieces that end at hook points, and calls the hooks in between.
Afterwards its class is ``Engine`` again, so that ordinary runs do not test for hooks.

A hook may change keys and values, so those computed while hooks are in use are not shared with
other sequences. A hook sees only tokens that are run, so a text that begins while hooks are in use
takes no cached prefix. ``HookedCache`` keeps such sequences private.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property
from treadle.base.interrupts import interrupts_held
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.engine.prepared_plan import PlanKey, PreparedPlan
from treadle.errors import UnsupportedError
from treadle.kvcache.cache import KVCache, Sequence
from treadle.plan.hook_rows import HookPoint, StepRows, hook_points
from treadle.plan.lowering.observed import ObservedOps, UnfusedOps

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import Lora, PageStoreLike
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.plan import Plan

Ints = npt.NDArray[np.intp]
Call = Callable[["HookedRun"], None]
# Prefixes of a plan's output in its key, by lowering.
OBSERVED = "observed "
UNFUSED = "unfused "
SHORT = 32  # steps times tokens: checking for signals takes as long as a shorter piece
FUSIBLE = ".gate_up"  # suffix of labels whose step may be fused with the next one


class HookedRun:
    """One run of an engine, as hooks see it.

    ready: the prepared plan, with its results in memory.
    parts: the batch.
    starts: the tokens that each part's sequence held before.
    numbers: the number of each part's sequence (``EngineHooks.number_of``).
    """

    def __init__(
        self,
        engine: HookedEngine,
        ready: PreparedPlan,
        parts: Seq[BatchItem],
        starts: Seq[int],
        numbers: Seq[int],
    ) -> None:
        self.engine = engine
        self.ready = ready
        self.parts = parts
        self.starts = starts
        self.numbers = numbers

    @cached_property
    def tokens(self) -> Ints:
        """The token id of each row, ``[n_tokens]``."""
        return np.array([id for part in self.parts for id in part.ids], np.intp)

    @cached_property
    def positions(self) -> Ints:
        """The index of each row's token in its sequence, ``[n_tokens]``."""
        each = zip(self.parts, self.starts, strict=True)
        return np.concatenate([np.arange(at, at + len(part.ids)) for part, at in each])

    @cached_property
    def sequences(self) -> Ints:
        """The number of each row's sequence, ``[n_tokens]``."""
        return np.repeat(np.array(self.numbers, np.intp), [len(part.ids) for part in self.parts])

    def rows_of(self, count: str) -> Ints | slice:
        """Return the token rows that belong to the rows counted by the field ``count`` of
        RUN_STATE: all tokens, those with outputs, or the last token of each sequence.
        """
        if count == "n_tokens":
            return slice(None)
        ends = np.cumsum([len(part.ids) for part in self.parts])
        if count == "n_parts":
            return ends - 1
        each = zip(self.parts, ends, strict=True)
        return np.concatenate([np.arange(end - part.n_outputs, end) for part, end in each])

    def count(self, count: str) -> int:
        """Return the value of the field ``count`` of RUN_STATE: a number of rows."""
        return self.ready.run[count]

    def read(self, rows: StepRows) -> npt.NDArray[np.float32]:
        """Return the rows that a step wrote, f32, as a copy."""
        ready = self.ready
        return rows.read(ready.arena, ready.plan.offsets, self.count(rows.count))

    def write(self, rows: StepRows, values: npt.NDArray[np.float32]) -> None:
        """Replace the rows that a step wrote by ``values``, f32, which take the step's own type."""
        rows.write(self.ready.arena, self.ready.plan.offsets, values)


class Hook(ABC):
    """An observer of runs between their steps. All methods are called under the engine's lock.

    changes: whether it changes values; such hooks are called before those that only read.
    stops_early: whether the steps after its last call need not run.
    """

    changes: bool = False
    stops_early: bool = False

    @abstractmethod
    def calls(self, plan: Plan, points: Seq[HookPoint]) -> Iterable[tuple[int, Call]]:
        """Return the hook's calls in runs of ``plan``, each as (number of steps after which it
        comes, function of the run). ``points``: the plan's hook points.
        """

    def is_hooked(self, label: str) -> bool:
        """Return whether the hook reads or changes the values of this label."""
        return False

    def begin(self, run: HookedRun) -> None:  # noqa: B027
        """Called before a run; again if a signal stopped the run and it is repeated."""

    def end(self, run: HookedRun) -> None:  # noqa: B027
        """Called after a run that was not stopped by a signal."""

    def truncated(self, number: int, n: int) -> None:  # noqa: B027
        """Called before a sequence that hooks have met is cut to its first ``n`` tokens, such as
        after a rejected draft. ``number``: ``EngineHooks.number_of`` the sequence.
        """


class HookedCache(KVCache):
    """A cache with *private* sequences, which neither use others' pages nor share their own.

    A sequence is private if it began while hooks were in use, or if tokens of it ran under a hook
    that changes values.
    """

    hooks: EngineHooks
    private: WeakSet[Sequence]

    @property
    def store(self) -> PageStoreLike | None:
        """The page files; None while hooks are in use."""
        kept: PageStoreLike | None = self.__dict__["store"]
        return None if self.hooks.active else kept

    @store.setter
    def store(self, store: PageStoreLike | None) -> None:
        self.__dict__["store"] = store

    def make_private(self, seq: Sequence) -> None:
        """Detach a sequence from the prefix tree; it keeps its tokens and pages."""
        if seq not in self.private:
            seq.is_unshared = True
            seq.nodes.clear()
            self.private.add(seq)

    def sequence(self, ids: Seq[int] = (), lora: Lora | None = None) -> Sequence:
        made = super().sequence(() if self.hooks.active else ids, lora)
        if self.hooks.active:
            self.make_private(made)
        return made

    def revive(self, lora: Lora | None = None) -> Sequence:
        if self.hooks.active and lora is not None:
            self.abandoned.close()
            return self.sequence((), lora)
        return super().revive(lora)

    def match(self, seq: Sequence, ids: Seq[int]) -> int:
        if self.hooks.changes:
            self.make_private(seq)
        return super().match(seq, ids)

    def fork(self, seq: Sequence) -> Sequence:
        made = super().fork(seq)
        if seq in self.private:
            self.make_private(made)
        return made

    def release_reservation(self, seq: Sequence) -> None:
        if seq in self.private:
            self.reserve(seq, 0)
        else:
            super().release_reservation(seq)

    def retire(self, seq: Sequence) -> None:
        if seq in self.private:
            seq.close()
        else:
            super().retire(seq)

    def truncate(self, seq: Sequence, n: int) -> None:
        if self.hooks.active and (number := self.hooks.numbers.get(seq)) is not None:
            for hook in self.hooks.active:
                hook.truncated(number, n)
        super().truncate(seq, n)


class HookedEngine(Engine):
    """The class of an engine while hooks are in use: it calls them between steps."""

    hooks: EngineHooks
    cache: HookedCache
    _current: HookedRun

    def plan_for(
        self,
        n_tokens: int,
        n_outputs: int,
        output: str,
        adapted: bool = False,
        media: bool = False,
        steered: bool = False,
    ) -> PreparedPlan:
        marked = (OBSERVED if self.hooks.fused else UNFUSED) + output
        return super().plan_for(n_tokens, n_outputs, marked, adapted, media, steered)

    def lower(self, key: PlanKey, lowering: Callable[[Steps], PlanOps] | None = None) -> Plan:
        kinds = ((OBSERVED, ObservedOps), (UNFUSED, UnfusedOps))
        prefix, made = next(kind for kind in kinds if key.output.startswith(kind[0]))
        return super().lower(key._replace(output=key.output.removeprefix(prefix)), made)

    def labels(self, *, every: bool = False) -> list[str]:
        """Return the labels of the hook points in a decoding step with the default adapters and
        control vectors. ``every``: also those of control vectors that are off by default, and of
        pictures and sounds.
        """
        adapted, steered = self._adapter_kinds(self.cache.lora)
        media = False
        if every:
            steered = bool(self.control_vectors)
            media = self.config.causal and self.device.takes_media
        marked = OBSERVED + self.config.main_output
        key = self._key(PlanKey(1, 1, marked, adapted, media, steered))
        if (ready := self._ready.get(key)) is not None:
            plan = ready.plan
        else:
            plan = self._lowered.get(key) or self._lowered.setdefault(key, self.lower(key))
        points = self.hooks.points(plan)
        return list(dict.fromkeys(point.label for point in points))

    def read_text(
        self, ids: Seq[int], first: int | None = None, *, lora: Lora | None = None
    ) -> None:
        """Run a text in a new sequence, so that hooks see it. ``first``: the index from which on
        logits are computed, None for no logits. ``lora``: the adapters and control vectors to run
        with, None for the default.

        Raises ContextFullError if the text does not fit.
        """
        output = self.config.main_output if first is None else "logits"
        with interrupts_held() as held, self.lock:
            seq = self.cache.sequence(lora=lora)
            try:
                self.cache.check_context(len(ids))
                self.cache.reserve(seq, len(ids))
                with held.allow():
                    before = len(ids) if first is None else first
                    for chunk in self.cache.chunks(ids[:before], self.max_tokens):
                        self._run([BatchItem(seq, chunk, 0)], lambda ready: None, None, output)
                    for chunk in self.cache.chunks(ids[before:], min(self.max_tokens, OUTPUTS)):
                        part = BatchItem(seq, chunk, len(chunk))
                        self._run([part], lambda ready: None, None, output)
            finally:
                seq.close()

    def read_together(self, texts: Seq[Seq[int]], *, lora: Lora | None = None) -> None:
        """Run several texts in one run, each in a new sequence, so that hooks see them. ``lora``:
        as in ``read_text``.

        Raises ContextFullError if there are not enough pages for all.
        """

        def read(seqs: Seq[Sequence]) -> None:
            parts = [BatchItem(seq, ids, 0) for seq, ids in zip(seqs, texts, strict=True)]
            self._run(parts, lambda ready: None, None, self.config.main_output)

        with self.lock:
            self._with_new_sequences(len(texts), lora, read)

    def _prepare(self, ready: PreparedPlan, parts: Seq[BatchItem]) -> list[int]:
        starts = super()._prepare(ready, parts)
        if self.hooks.changes:
            for part in parts:
                self.cache.make_private(part.seq)
        numbers = [self.hooks.number_of(part.seq) for part in parts]
        self._current = HookedRun(self, ready, parts, starts, numbers)
        return starts

    def _walk(
        self, ready: PreparedPlan, times: list[float] | None, *, stoppable: bool = False
    ) -> bool:
        """Run the steps of a plan in pieces that end at hook points, and call the hooks in between.
        Return False if a signal stopped the run. Arguments as in ``Engine._walk``.
        """
        run = self._current
        hooks = self.hooks
        n_tokens = run.count("n_tokens")

        def walk(steps: range) -> bool:
            stops = stoppable and len(steps) * n_tokens > SHORT
            return self.device.run(ready.program, steps, times=times, stoppable=stops)

        if ready.run.media is not None:
            ready.write_media()
        for hook in hooks.active:
            hook.begin(run)
        stops = hooks.stops(ready)
        if ready.run.late:
            late = ready.first_masked, lambda _: ready.run.write_late()
            stops = sorted([*stops, late], key=lambda stop: stop[0])
        at = 0
        for end, call in stops:
            if end > at and not walk(range(at, end)):
                return False
            at = max(at, end)
            call(run)
        n_steps = len(ready.plan)
        early = times is None and all(hook.stops_early for hook in hooks.active)
        if at < n_steps and not early and not walk(range(at, n_steps)):
            return False
        for hook in hooks.active:
            hook.end(run)
        return True


class EngineHooks:
    """The hooks of one engine.

    active: the hooks in use, those that change values first.
    changes: whether any changes values.
    fused: whether plans may fuse gate, up and activation: no hook needs the label in between.
    numbers: the number of each sequence that hooks have met.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.active: list[Hook] = []
        self.changes = False
        self.fused = True
        # By the number of a plan, which is kept alive, so that the number is not used again.
        self._points: dict[int, tuple[Plan, list[HookPoint]]] = {}
        self._stops: dict[PreparedPlan, list[tuple[int, Call]]] = {}
        self.numbers: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._n_sequences = 0

    @contextmanager
    def using(self, hook: Hook) -> Generator[HookedEngine, None, None]:
        """Use a hook in all runs of the engine, those of other threads included, until the context
        ends.

        Raises UnsupportedError for an engine whose steps run in other processes.
        """
        engine = self._engine
        try:
            with engine.lock:
                hooked = self._install()
                self._change([*self.active, hook])
            yield hooked
        finally:
            with engine.lock:
                self._change([each for each in self.active if each is not hook])
                self._remove()

    def _install(self) -> HookedEngine:
        """Set the classes of the engine and its cache to HookedEngine and HookedCache. The cache
        keeps its class afterwards, because private sequences stay private.
        """
        engine: Any = self._engine
        kind: type = type(engine)
        if kind is Engine:
            if engine.cache.__class__ is not HookedCache:
                engine.cache.__class__ = HookedCache
                engine.cache.private = WeakSet()
                engine.cache.hooks = self
            engine.__class__ = HookedEngine
            engine.hooks = self
        if not isinstance(engine, HookedEngine):
            what = "the steps of a model on several machines run in other processes"
            raise UnsupportedError(f"hooks are not supported here: {what}")
        return engine

    def _remove(self) -> None:
        """Set the engine's class back to Engine, if no hook is in use."""
        engine: Any = self._engine
        kind: type = type(engine)
        if kind is HookedEngine and not self.active:
            engine.__class__ = Engine

    def _change(self, active: list[Hook]) -> None:
        self.active = sorted(active, key=lambda hook: not hook.changes)
        self.changes = any(hook.changes for hook in active)
        self._stops.clear()
        self.fused = True
        if self.active:
            engine = self._engine
            assert isinstance(engine, HookedEngine)
            fusible = [label for label in engine.labels() if label.endswith(FUSIBLE)]
            self.fused = not any(hook.is_hooked(label) for hook in active for label in fusible)

    def labels(self, *, every: bool = False) -> list[str]:
        """Return the labels that hooks can read or change, in the order of the steps. ``every``: as
        in ``HookedEngine.labels``.
        """
        engine = self._engine
        with engine.lock:
            if self.active:
                assert isinstance(engine, HookedEngine)
                return engine.labels(every=every)
            try:
                return self._install().labels(every=every)
            finally:
                self._remove()

    def number_of(self, seq: Sequence) -> int:
        """Return the number of a sequence: 0, 1, ... in the order in which hooks met them."""
        number = self.numbers.get(seq)
        if number is None:
            number = self.numbers[seq] = self._n_sequences
            self._n_sequences += 1
        return number

    def points(self, plan: Plan) -> list[HookPoint]:
        """Return the hook points of a plan, in the order of its steps."""
        found = self._points.get(id(plan))
        if found is None:
            found = plan, hook_points(plan, self._engine.config.n_embd)
            self._points[id(plan)] = found
        return found[1]

    def stops(self, ready: PreparedPlan) -> list[tuple[int, Call]]:
        """Return the calls of all hooks in runs of a plan, as (number of steps before the call,
        function), in the order of the steps.
        """
        found = self._stops.get(ready)
        if found is None:
            points = self.points(ready.plan)
            calls = [call for hook in self.active for call in hook.calls(ready.plan, points)]
            found = self._stops[ready] = sorted(calls, key=lambda call: call[0])
        return found
