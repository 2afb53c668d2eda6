"""The engine: token ids in, logits out. It handles plans, pages and a device, not text."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from treadle.base.fast_classes import cached_property
from treadle.base.fork_safety import UseLock
from treadle.base.interrupts import interrupts_held
from treadle.engine.batch import (
    NEVER,
    BatchItem,
    RopeTable,
    RunInputs,
    group_texts,
    merge_pooled_runs,
)
from treadle.engine.logits import LogitsBatch
from treadle.engine.prepared_plan import PlanKey, PreparedPlan, plan_sizes
from treadle.errors import ContextFullError, TreadleError, UnsupportedError
from treadle.kernels.run_state import GEMV_TOKENS, RESULT
from treadle.kvcache.cache import KVCache, Sequence
from treadle.models.config import N_BATCH
from treadle.plan.plan import Plan
from treadle.plan.weights import Weights

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.engine.text_encoder import TextEncoder
    from treadle.files.gguf import GGUF
    from treadle.kvcache.media import MediaEntry, MediaRegistry
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.config import Config
    from treadle.models.control_vector import ControlVector
    from treadle.models.lora import Adapter, LowRank
    from treadle.models.ops import TensorName
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.lowering.steps import Steps


CHUNK = N_BATCH  # tokens of short texts per run
OUTPUTS = 128  # maximum logits rows per run
# Outputs with a row for each requested token; others have one per part.
OF_ROWS = "logits", "ahead", "tapped", "markov", "selector_vectors"
T = TypeVar("T")


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


class Engine:
    """Runs batches of sequences through one model.

    ``run([BatchItem(seq, ids)])`` appends ids to each sequence and returns logits, float32
    ``[n_outputs, n_vocab]``, in the order of the parts; ``sample`` does so for the scheduler, and
    returns the largest logits of each output. Both raise ContextFullError if a part does not fit,
    FileError if the model's file shrank or was written to; then no sequence has changed.
    Thread-safe: threads take turns.

    ``deterministic``: results are bit-identical whatever else is in a batch. The arguments from
    ``n_ctx`` to ``n_encoded`` that are not named here are those of ``KVCache``.
    """

    cache_type: ClassVar[type[KVCache]] = KVCache
    has_states: ClassVar[bool] = True  # whether the hidden states of a run's tokens can be read
    lender: Engine | None = None  # of a drafter without own keys and values: the engine it reads

    def __init__(
        self,
        gguf: GGUF,
        config: Config,
        device: Device,
        *,
        n_ctx: int,
        kv: str = "f16",
        n_sequences: int = 1,
        kv_bytes: int | None = None,
        kv_tokens: int | None = None,
        deterministic: bool = False,
        n_encoded: int | None = None,
    ) -> None:
        if config.n_positions and n_ctx > config.n_positions:
            have = f"the model has only {config.n_positions} learned positions"
            raise TreadleError(f"context={n_ctx}: {have}")
        self.config = config
        self.device = device
        self.n_ctx = n_ctx
        self.deterministic = deterministic
        self.kernels = device.kernels
        n_batch = config.n_batch
        limits = n_sequences, kv_bytes, n_batch, kv_tokens
        n_vocab = config.n_vocab
        self.cache = self.make_cache(config.pools, device, n_ctx, kv, *limits, n_vocab, n_encoded)
        self.gguf = gguf
        self._weights = Weights(gguf, device)
        self.check_files = gguf.check
        self.adapters: tuple[Adapter, ...] = ()
        self._within: list[dict[TensorName, LowRank]] = []  # adapters that control tokens choose
        self._adapted: Weights | None = None  # with adapters
        if config.switch is not None:
            from treadle.models.switch import ControlTokens, embedded_adapters

            self._within = embedded_adapters(gguf, config)
            self.cache.control_tokens = ControlTokens(config.switch)
            self._adapted = self._with_adapters(())
        self.control_vectors: tuple[ControlVector, ...] = ()
        self._ready: dict[tuple[int, int, str, bool, bool, bool], PreparedPlan] = {}
        self._lowered: dict[PlanKey, Plan] = {}  # not prepared yet
        self._arena = device.memory(0)
        self._arena_bytes = 0
        self._rows: weakref.ref[LogitsBatch] | None = None  # of the last run, for samplers
        self._closed = False
        self.encoder: TextEncoder | None = None  # of an encoder-decoder model
        self.lock = UseLock()  # held while the cache must not change
        self._ropes = [RopeTable(*of.frequencies(n_ctx), n_ctx, of.gains) for of in config.ropes]
        room = max(n_ctx, n_sequences, GEMV_TOKENS[-1] + 1)
        # Encoders read a whole text in one run. A drafter of blocks is not causal either, but reads
        # the states of a text in any number of runs.
        in_parts = config.causal or config.draft is not None
        self.max_tokens = min(n_batch, room) if in_parts else room
        sizes = device.batch_sizes(floats=self._weights.are_floats)
        self.few = [size for size in sizes if size < self.max_tokens]
        self._sizes = *self.few, *(CHUNK << i for i in range(16))

    def make_cache(self, *given: Any, **named: Any) -> KVCache:
        """Return a new cache of type ``cache_type``; the arguments are those of ``KVCache``."""
        return self.cache_type(*given, **named)

    def attend(self, seq: Sequence, source: Seq[int]) -> None:
        """Make an empty sequence attend to the rows of the prompt ``source``. The model's encoder
        reads it now, unless the cache has its keys and values.

        Raises UnsupportedError if the model has no encoder, ContextFullError for a source that is
        too long, NoRoomError if there are no pages for its rows.
        """
        with self.lock:
            self.check_ids(source)
            self.cache.check_context(len(source))
            if self.encoder is None:
                raise UnsupportedError(f"source: {self.config.arch.name} has no encoder")
            with interrupts_held():
                keys = self.cache.inputs.hold(tuple(source))
                seq.attend_to(keys)
            self.encoder.finish(tuple(source), keys)

    # -- plans ----------------------------------------------------------------------------------

    def plan(self, n_tokens: int = 1, n_outputs: int = 1, output: str = "") -> Plan:
        """Return the plan for batches of up to ``n_tokens`` tokens with ``n_outputs`` rows of
        ``output``, by default the graph's main output, and with the default adapters.
        """
        made = output or self.config.main_output
        adapted, steered = self._adapter_kinds(self.cache.lora)
        return self.plan_for(n_tokens, n_outputs, made, adapted, steered=steered).plan

    def adapt(self, adapters: Seq[Adapter]) -> None:
        """Load adapters, which sequences then choose (``Sequence.lora``). Call before any run.
        Batches without adapters keep their plans, except on a ``deterministic`` engine.

        Raises UnsupportedError for an adapter of a matrix that no plain matrix product of the graph
        uses.
        """
        self.adapters = tuple(adapters)
        self._adapted = self._with_adapters(adapters)
        self.cache.tree.marks = tuple(adapter.mark for adapter in adapters)
        made = self.config.main_output
        self.device.plan(self.config, self._adapted, self.cache, 1, 1, output=made)
        for adapter in adapters:
            adapter.check(self._adapted.adapted_matrices)

    def _with_adapters(self, adapters: Seq[Adapter]) -> Weights:
        """Return the weights with these adapters, after the adapters within the model."""
        loaded: list[dict[TensorName, LowRank]] = [dict(one.ranks.items()) for one in adapters]
        ranks = [*self._within, *loaded]
        return replace(self._weights, adapters=ranks, n_scales=len(ranks))

    def steer(self, vectors: Seq[ControlVector]) -> None:
        """Load control vectors, which sequences then choose: in ``Sequence.lora`` their numbers
        follow those of the adapters. Call after ``adapt`` and before any run. Batches without
        control vectors keep their plans.

        Raises FileError for a vector that does not fit the model.
        """
        for vector in vectors:
            vector.check(self.config)
        self.control_vectors = tuple(vectors)
        self.cache.tree.marks += tuple(vector.mark for vector in vectors)
        if self._adapted is not None:
            self._adapted = replace(self._adapted, n_scales=self._n_scales)

    @property
    def has_adapters(self) -> bool:
        """Whether sequences may have adapters: loaded ones, or some within the model."""
        return self._adapted is not None

    def _adapts(self, ids: Seq[int]) -> bool:
        """Return whether a text of ``ids`` that chooses no loaded adapter still needs a plan with
        adapters: on a deterministic engine with adapters, or because of its control tokens.
        """
        tokens = self.cache.control_tokens
        always = self.deterministic and self.has_adapters  # so that results are bit-identical
        return always or (tokens is not None and tokens.any_in(ids))

    def needs_of(self, seq: Sequence, ids: Seq[int]) -> tuple[bool, bool]:
        """Return whether a run of ``ids`` in ``seq`` needs a plan with adapters, and whether one
        with control vectors.
        """
        has_adapters, has_vectors = self._adapter_kinds(seq.lora)
        return has_adapters or bool(seq.marks) or self._adapts(ids), has_vectors

    @cached_property
    def _with_media(self) -> Config:
        """The config of plans for batches with rows of pictures and sound."""
        return replace(self.config, with_media=True)

    @property
    def _n_scales(self) -> int:
        """Number of scales of a row: one for each adapter within the model, loaded adapter and
        control vector.
        """
        return len(self._within) + len(self.cache.tree.marks)

    def tap(self, layers: Seq[int]) -> None:
        """Make the output "tapped" have the states before these layers (``Config.taps``). Call it
        before any run with that output.
        """
        self.config = replace(self.config, taps=tuple(layers))
        self.__dict__.pop("_with_media", None)

    def _adapter_kinds(self, lora: Lora) -> tuple[bool, bool]:
        """Return whether ``lora`` (adapters and control vectors of a sequence, by number) has
        loaded adapters, and whether it has control vectors.
        """
        n = len(self.adapters)
        return bool(lora) and lora[0][0] < n, bool(lora) and lora[-1][0] >= n

    def _weights_of(self, key: PlanKey) -> Weights:
        """Return the weights for a plan: with adapters and control vectors as its key says."""
        weights = self._adapted if key.adapted and self._adapted else self._weights
        if not key.steered:
            return weights
        directions = [vector.directions for vector in self.control_vectors]
        return replace(weights, directions=directions, n_scales=self._n_scales)

    def plan_for(
        self,
        n_tokens: int,
        n_outputs: int,
        output: str,
        adapted: bool = False,
        media: bool = False,
        steered: bool = False,
    ) -> PreparedPlan:
        """Return the prepared plan for batches of up to ``n_tokens`` tokens with ``n_outputs`` rows
        of ``output``; it is compiled if it is new. ``adapted``, ``media``, ``steered``: as in
        ``PlanKey``.
        """
        asked = n_tokens, n_outputs, output, adapted, media, steered
        ready = self._ready.get(asked)
        if ready is None:
            key = self._key(PlanKey(*asked))
            ready = self._ready.get(key) or self._make(key)
            self._ready[asked] = ready
        return ready

    def _key(self, asked: PlanKey) -> PlanKey:
        """Return the key of the plan that serves batches of the kind ``asked``: its sizes rounded
        up to plan sizes.
        """
        limits = self.max_tokens, OUTPUTS
        sizes = plan_sizes(asked.n_tokens, asked.n_outputs, self._sizes, limits, CHUNK)
        return PlanKey(*sizes, asked.output, asked.adapted, asked.media, asked.steered)

    def compile_ahead(self, asked: PlanKey, *, later: bool = False) -> bool:
        """Begin to compile the kernels of the plan ``asked`` in other processes, before
        ``plan_for`` needs it; ``later``: after all other plans. Return whether this has begun:
        False if no kernels are missing, or if the device cannot.
        """
        key = self._key(asked)
        if key in self._ready:
            return False
        if key not in self._lowered:
            self._lowered[key] = self.lower(key)
        return self.device.compile_ahead(self._lowered[key], later=later)

    def lower(self, key: PlanKey, lowering: Callable[[Steps], PlanOps] | None = None) -> Plan:
        """Return the plan of ``key``, not compiled yet. ``lowering``: a function from steps to the
        plan's operations in place of the usual one, for hooks (``Device.plan``).
        """
        return self.device.plan(
            self._with_media if key.media else self.config,
            self._weights_of(key),
            self.cache,
            key.n_tokens,
            key.n_outputs,
            deterministic=self.deterministic,
            output=key.output,
            lowering=lowering,
        )

    def _make(self, key: PlanKey) -> PreparedPlan:
        """Lower a new plan, give its buffers memory, and compile its kernels; keep and return the
        result. For a model that generates text, other processes begin to compile the plan that will
        follow.
        """
        began = time.perf_counter()
        device = self.device
        config = self._with_media if key.media else self.config
        plan = self._lowered.pop(key, None)
        if plan is None:
            plan = self.lower(key)
            if device.compile_ahead(plan) and config.main_output == "logits":
                n_next = CHUNK if key.n_tokens == 1 else 1  # a text follows a prompt
                following = PlanKey(n_next, 1, key.output, key.adapted, steered=key.steered)
                self.compile_ahead(following, later=True)
        # One arena serves all plans; if a plan needs more, all are placed in a new one.
        if self._arena_bytes < plan.arena_bytes:
            self._arena = device.memory(plan.arena_bytes)
            self._arena_bytes = plan.arena_bytes
            for other in set(self._ready.values()):
                other.place(self._arena, device)
        run = RunInputs(
            plan, self.cache, self._ropes, device, config.media, self.cache.control_tokens
        )
        ready = PreparedPlan(plan, run)
        ready.place(self._arena, device)
        self._ready[key] = ready
        self.kernels.seconds += time.perf_counter() - began
        return ready

    # -- runs -----------------------------------------------------------------------------------

    def run(self, parts: Seq[BatchItem]) -> np.ndarray:
        """Run one batch of at most ``max_tokens`` tokens. Return its logits and raise errors as the
        class says.
        """
        return self._run(parts, lambda ready: self._logits(ready)().copy())

    def sample(
        self,
        parts: Seq[BatchItem],
        observer: EngineObserver = NO_OBSERVER,
        meanwhile: Callable[[], object] | None = None,
    ) -> LogitsBatch:
        """Run a batch for samplers. Return the logits of its outputs, with the largest ones found
        by each part's queries. ``observer`` is called before and after the run; ``meanwhile`` just
        before the device starts: it may wake other threads, whose work then overlaps with the run.
        """

        def begin(ready: PreparedPlan) -> None:
            observer.before_run(ready)
            if meanwhile is not None:
                meanwhile()

        def read(ready: PreparedPlan) -> LogitsBatch:
            observer.after_run(parts, ready)
            return self._read_rows(parts, ready)

        return self._run(parts, read, None, observer.output, begin)

    def observe(self, parts: Seq[BatchItem], observer: EngineObserver) -> None:
        """Run a batch of which only ``observer`` reads the result (``EngineObserver.output``)."""
        read = partial(observer.after_run, parts)
        self._run(parts, read, None, observer.output, observer.before_run)

    def run_timed(self, parts: Seq[BatchItem]) -> list[tuple[str, float]]:
        """Run a batch's main output. Return the label of each step, and its seconds."""
        times: list[float] = []
        plan = self._run(parts, lambda ready: ready.plan, times, self.config.main_output)
        return list(zip([step.label for step in plan], times, strict=True))

    def run_reference(
        self, parts: Seq[BatchItem], until: str | None = None
    ) -> tuple[Plan, np.ndarray]:
        """Run a batch by the kernels' numpy references, up to and including the step labelled
        ``until`` (None: all steps).

        Return the plan and its arena (uint8), for a comparison of each step's result.
        """
        with self.lock:
            ready = self._plan_of(parts)
            self._prepare(ready, parts)
            ready.run.write_late()
            arena = np.zeros(ready.plan.arena_bytes, np.uint8)
            ready.plan.run_reference(arena, ready.run, until)
            return ready.plan, arena

    def batches(self, texts: Iterable[Seq[int]]) -> Iterator[list[Seq[int]]]:
        """Group ``texts``, in order, into lists that ``embed`` can take in one run."""
        return group_texts(texts, min(CHUNK, self.max_tokens), OUTPUTS)

    def embed(
        self,
        texts: Seq[Seq[int]],
        seconds: Seq[int] | None = None,
        *,
        unit: bool = True,
        lora: Lora | None = None,
    ) -> np.ndarray:
        """Return a vector for each text, float32 ``[n_texts, n_embd]``: its last states after the
        output norm, pooled by ``config.pool``, and scaled to length 1 if ``unit``.

        ``texts``: several that fit one run (see ``batches``), or a single one. ``seconds``:
        ``BatchItem.second`` of each; ``lora``: the adapters to run with, None for the default.

        Raises ContextFullError if a text does not fit, TreadleError for one without tokens.
        """
        with (
            self.lock,
            closing(self.embed_runs(texts, seconds, unit=unit, lora=lora)) as runs,
        ):
            *_, made = runs
        assert made is not None
        return made

    def embed_runs(
        self,
        texts: Seq[Seq[int]],
        seconds: Seq[int] | None = None,
        *,
        unit: bool = True,
        lora: Lora | None = None,
    ) -> Generator[np.ndarray | None, None, None]:
        """Yield None after each run but the last, then the vectors that ``embed`` returns for these
        arguments. Only a text longer than ``max_tokens`` takes several runs; other threads may use
        the engine in between. Close the generator: it holds pages.
        """
        if not all(len(ids) for ids in texts):
            raise TreadleError("no tokens")
        if len(texts) == 1 and len(texts[0]) > self.max_tokens:
            yield from self._embed_long(texts[0], unit, lora)
        else:
            yield self._embed_together(texts, seconds or [NEVER] * len(texts), unit, lora)

    def _embed_together(
        self, texts: Seq[Seq[int]], seconds: Seq[int], unit: bool, lora: Lora | None
    ) -> np.ndarray:
        """Return the vectors of texts that fit one run; arguments as in ``embed``. Texts for which
        there are too few pages are run one by one.
        """

        def run(seqs: Seq[Sequence]) -> np.ndarray:
            each = zip(seqs, texts, seconds, strict=True)
            parts = [BatchItem(seq, ids, 0, (), second) for seq, ids, second in each]
            read = partial(self._read, "embedding" if unit else "pooled", "n_parts")
            return self._run(parts, read, None, "embedding")

        with self.lock:
            try:
                return self._with_new_sequences(len(texts), lora, run)
            except ContextFullError:
                if len(texts) == 1:
                    raise
            alone = zip(texts, seconds, strict=True)  # too many at once
            rows = [self.embed([ids], [at], unit=unit, lora=lora) for ids, at in alone]
            return np.concatenate(rows)

    def states(self, ids: Seq[int]) -> np.ndarray:
        """Return the last layer's states after the output norm, float32 ``[n_tokens, n_embd]``.
        Raises ContextFullError if the text does not fit, TreadleError if it has no tokens.
        """
        with self.lock, closing(self.states_runs(ids)) as runs:
            return np.concatenate([*runs])

    def states_runs(
        self, ids: Seq[int], lora: Lora | None = None
    ) -> Generator[np.ndarray, None, None]:
        """Yield what ``states`` returns, in parts of one run each. Other threads may use the engine
        between runs. Close the generator: it holds pages.
        """
        if not len(ids):
            raise TreadleError("no tokens")
        yield from self._run_in_parts(
            ids, partial(self._read, "states", "n_tokens"), "states", lora
        )

    def _embed_long(
        self, ids: Seq[int], unit: bool, lora: Lora | None
    ) -> Generator[np.ndarray | None, None, None]:
        """Yield None after each run of a text but the last, then its vector ``[1, n_embd]``, of
        length 1 if ``unit``.
        """
        read = partial(self._read, "pooled", "n_parts")
        step = self.max_tokens
        pooled: list[np.ndarray] = []
        with closing(self._run_in_parts(ids, read, "embedding", lora)) as runs:
            for made in runs:
                pooled.append(made)
                if len(pooled) * step < len(ids):
                    yield None
        yield merge_pooled_runs(pooled, len(ids), step, self.config.pool, unit)

    def _run_in_parts(
        self,
        ids: Seq[int],
        read: Callable[[PreparedPlan], np.ndarray],
        output: str,
        lora: Lora | None = None,
    ) -> Generator[np.ndarray, None, None]:
        """Run a text in a new sequence, whose pages are reserved first, in as many runs as it
        needs. Yield what ``read`` returns after each run. ``output``: the graph's output to
        compute; ``lora``: as in ``embed``.
        """
        with interrupts_held() as held:  # around all, as in ``_with_new_sequences``
            with self.lock:
                seq = self.cache.sequence(lora=lora)
            try:
                with self.lock:
                    self.cache.check_context(len(ids))
                    self.cache.reserve(seq, len(ids))
                with held.allow():
                    for chunk in self.cache.chunks(ids, self.max_tokens):
                        yield self._run([BatchItem(seq, chunk, 0)], read, None, output)
            finally:
                with self.lock:
                    seq.close()

    def _with_new_sequences(
        self, n: int, lora: Lora | None, use: Callable[[Seq[Sequence]], T]
    ) -> T:
        """Return ``use(sequences)`` of ``n`` new sequences, which are closed afterwards."""
        with interrupts_held() as held:  # around all: a signal after ``use`` would leave them open
            seqs = [self.cache.sequence(lora=lora) for _ in range(n)]
            try:
                with held.allow():
                    return use(seqs)
            finally:
                for seq in seqs:
                    seq.close()

    def match(self, seq: Sequence, ids: Seq[int]) -> int:
        """Make ``seq`` hold the longest prefix of ``ids`` that the cache or page files have,
        without the last id. Return its length.
        """
        with self.lock:
            with interrupts_held():
                self.cache.match(seq, ids)
            store = self.cache.store
            n = 1
            while store is not None and n:
                with interrupts_held():
                    n = store.fetch(seq, ids)
            return len(seq.ids)

    def truncate(self, seq: Sequence, n: int) -> None:
        """Truncate ``seq`` to its first ``n`` tokens; if that would cut a picture, to the picture's
        beginning.

        Tokens whose state or window pages are gone are run again.
        """
        with self.lock:
            again: list[int] = []
            if self.cache.has_media(seq.ids):
                n = self.media.truncation_length(seq.ids, n)
            with interrupts_held():
                if self.cache.truncation_length(seq, n) < n:
                    again = seq.ids[:n]
                    n = self.cache.match(seq, [*again, -1])
                self.cache.truncate(seq, n)
            for ids in self.cache.chunks(again[n:], self.max_tokens):
                self.run([BatchItem(seq, ids, n_outputs=0)])

    def _run(
        self,
        parts: Seq[BatchItem],
        read: Callable[[PreparedPlan], T],
        times: list[float] | None = None,
        output: str = "logits",
        begin: Callable[[PreparedPlan], object] | None = None,
    ) -> T:
        """Run one batch by the prepared plan for its size and ``output``, and return what ``read``
        reads from the plan's memory. ``times`` gets each step's seconds; ``begin`` is called before
        the device starts, once more if a signal stopped the run and it is repeated. Sequences are
        unchanged if this raises an error.
        """
        with self.lock:
            ready = self._plan_of(parts, output)  # compiling takes seconds and is interruptible
            with interrupts_held() as held:
                starts = self._prepare(ready, parts)
                try:
                    if begin is not None:
                        begin(ready)
                    if not self._walk(ready, times, stoppable=True):
                        held.run_deferred()
                        # No handler raised, so the run is wanted. The repeat is not stoppable: a
                        # program with frequent signals would never finish.
                        if begin is not None:
                            begin(ready)
                        self._walk(ready, times)
                    self.check_files()
                # Ctrl-C, a file that shrank, or an error of the user's own signal handler.
                except BaseException:
                    for part, start in zip(parts, starts, strict=True):
                        self.cache.truncate(part.seq, start)
                    raise
                for part in parts:
                    self.cache.commit(part.seq)
            return read(ready)

    def _walk(
        self, ready: PreparedPlan, times: list[float] | None, *, stoppable: bool = False
    ) -> bool:
        """Run the steps of a plan; return False if a signal stopped it, which only happens if
        ``stoppable``. ``times`` gets each step's seconds. Masks still being computed are awaited
        just before the first step that reads them.
        """
        run = partial(self.device.run, ready.program, times=times, stoppable=stoppable)
        if ready.run.media is not None:
            ready.write_media()
        if not ready.run.late:
            return run()
        first = ready.first_masked
        end = len(ready.plan)
        if not run(range(first)):
            return False
        ready.run.write_late()
        return run(range(first, end))

    def steps(self, parts: Seq[BatchItem]) -> tuple[Plan, RunInputs]:
        """Write a batch's inputs; return its plan and these inputs, for running the plan step by
        step. The plan computes logits if a part needs any, else the main output.

        The caller holds ``lock``, and commits each sequence to the cache afterwards.
        """
        wanted = any(part.n_outputs for part in parts)
        ready = self._plan_of(parts, "logits" if wanted else self.config.main_output)
        self._prepare(ready, parts)
        ready.run.write_late()
        return ready.plan, ready.run

    def lay_out(self, key: PlanKey, parts: Seq[BatchItem]) -> tuple[PreparedPlan, list[int]]:
        """Write a batch's inputs for the plan ``key``, which must have room for it, to run it step
        by step. Return the plan, and the lengths that the sequences had before.

        The caller holds ``lock``, and afterwards truncates the sequences to these lengths, or
        commits them to the cache.
        """
        ready = self.plan_for(*key)
        starts = self._prepare(ready, parts)
        ready.run.write_late()
        return ready, starts

    def _plan_of(self, parts: Seq[BatchItem], output: str = "logits") -> PreparedPlan:
        """Check a batch's sizes, ids and media; return its prepared plan for the graph's
        ``output``. Raises TreadleError for an invalid batch, UnsupportedError for a decoder's
        without an encoded prompt.
        """
        if self._closed:
            raise TreadleError("the model is closed")
        n_tokens = 0
        n_outputs = 0
        seqs = set()
        media = False
        adapted = steered = False
        for seq, ids, n_wanted, *_ in parts:
            n = len(ids)
            if not n:
                raise TreadleError("batch item: no tokens")
            if not 0 <= n_wanted <= n:
                raise TreadleError(f"batch item: n_outputs={n_wanted}, more than its {n} tokens")
            if self.cache.cross and (seq.encoded is None or not seq.encoded.is_stored):
                raise self._no_prompt_error(output)
            self.check_ids(ids)
            if self.cache.has_media(ids):
                media = True
                self._check_rows(self.media.entries_in(ids))
            n_tokens = n_tokens + n
            n_outputs = n_outputs + n_wanted
            has_adapters, has_vectors = self.needs_of(seq, ids)
            adapted = adapted or has_adapters
            steered = steered or has_vectors
            seqs.add(id(seq))
        if len(seqs) < len(parts):
            raise TreadleError("batch: two items use the same sequence")
        if not 0 < n_tokens <= self.max_tokens or n_outputs > OUTPUTS:
            raise TreadleError(
                f"batch: {n_tokens} tokens and {n_outputs} outputs, "
                f"expected 1 to {self.max_tokens} tokens and at most {OUTPUTS} outputs"
            )
        n_outputs = n_outputs if output in OF_ROWS else len(parts)
        return self.plan_for(n_tokens, n_outputs, output, adapted, media, steered)

    def _no_prompt_error(self, output: str) -> UnsupportedError:
        """Return the error for a run of a decoder whose sequence has no encoded prompt; ``output``:
        the graph's output that was asked for.
        """
        name = self.config.arch.name
        if output not in OF_ROWS:
            return UnsupportedError(f"no {output}: {name} generates text, of a prompt's encoding")
        return UnsupportedError(
            f"{name}: its tokens attend to a prompt that its encoder has read, and there is none "
            "here: use generate, or give source= to session or logits"
        )

    def _check_rows(self, entries: Iterable[MediaEntry]) -> None:
        """Raise TreadleError for a picture or sound that is not encoded, or whose rows have the
        wrong width.
        """
        width = self.config.n_embd * (1 + self.config.media.n_deepstack)
        for entry in entries:
            shape = None if entry.rows is None else entry.rows.shape
            if shape != (entry.n_rows, width):
                found = "not encoded" if shape is None else f"rows of shape {list(shape)}"
                raise TreadleError(f"{entry}: {found}, expected [{entry.n_rows}, {width}]")

    @property
    def media(self) -> MediaRegistry:
        """The registry of pictures and sounds whose rows texts may have as tokens."""
        return self.cache.media

    def check_ids(self, ids: Seq[int]) -> None:
        """Raise TreadleError unless each id is a token of the vocabulary, or a row of a known
        picture or sound.
        """
        n_vocab = self.config.n_vocab
        if len(ids) and not (min(ids) >= 0 and max(ids) < n_vocab):
            media = self.media
            if not all(0 <= id < n_vocab or media.has(id) for id in ids):
                raise TreadleError(f"a token id outside 0..{n_vocab - 1}")

    def _prepare(self, ready: PreparedPlan, parts: Seq[BatchItem]) -> list[int]:
        """Append a batch to its sequences (all or none), with pages, and write the plan's inputs.
        Return the sequences' lengths before.
        """
        if self._rows is not None and (rows := self._rows()) is not None:
            rows.snapshot()  # the previous run's logits are still referenced
        starts = [len(part.seq) for part in parts]
        done: list[tuple[Sequence, int]] = []
        try:
            for part, start in zip(parts, starts, strict=True):
                self.cache.extend(part.seq, part.ids)
                done.append((part.seq, start))
            ready.run.lay_out(parts, starts)
        except BaseException:  # for example, ids that are not integers
            for seq, start in done:
                self.cache.truncate(seq, start)
            raise
        return starts

    def _logits(self, ready: PreparedPlan) -> Callable[[], np.ndarray]:
        """Return a function that reads the last run's logits, float32 ``[n_outputs, n_logits]``;
        ``Config.n_logits`` is ``n_vocab``, except in drafters with fewer logits.
        """
        return ready.reader(ready.plan.outputs["logits"], ready.run.n_outputs, self.config.n_logits)

    def _read_rows(self, parts: Seq[BatchItem], ready: PreparedPlan) -> LogitsBatch:
        """Return the logits of the last run, which computed ``parts``, for samplers."""
        at = ready.plan.offsets[ready.plan.outputs["top"]]
        n = ready.run["n_sampled"]
        data = ready.arena.read(at, n * RESULT.itemsize).tobytes()
        queries = [part.queries for part in parts for _ in range(part.n_outputs)]
        rows = LogitsBatch(self._logits(ready), data, queries, self.lock)
        self._rows = weakref.ref(rows)
        return rows

    def _read(self, name: str, count: str, ready: PreparedPlan) -> np.ndarray:
        """Return a copy of the plan's output ``name``, f32 ``[n, n_embd]``; ``n`` is the run's
        ``count``, a field of RUN_STATE.
        """
        return ready.rows(ready.plan.outputs[name], ready.run[count], self.config.n_embd).copy()

    def close(self) -> None:
        """Save cached pages to files if there are any, stop the device's threads, and release the
        weights. The engine cannot run again.
        """
        with self.lock:
            if not self._closed and self.cache.store is not None:
                self.cache.store.save()
                self.cache.store.close()
            self._closed = True
            if self.encoder is not None:
                self.encoder.close()
            self.device.close()
            self._ready.clear()
            self._lowered.clear()
            self._weights.consts.clear()
