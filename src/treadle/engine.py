"""The engine: token ids in, logits out. It knows plans, pages and threads, and nothing of text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from treadle.batch import Part, RopeTable, Run
from treadle.errors import TreadleError
from treadle.jit.kernel import Tally, load_kernels
from treadle.kernels.choice import GEMV_TOKENS, batch_sizes
from treadle.kvcache import N_BATCH, KVCache, Sequence
from treadle.models.archs import rope_frequencies
from treadle.models.decoder import build_plan
from treadle.models.weights import Weights
from treadle.plan import Plan
from treadle.runtime.alarm import Alarm
from treadle.runtime.runner import STEP, Work
from treadle.runtime.threads import Memory, Team, interrupts_held, step_times
from treadle.runtime.tuned import tuned_row

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.isa.isa import Isa
    from treadle.models.config import Config

CHUNK = N_BATCH  # tokens of a prefill that one run takes
OUTPUTS = 128  # rows of logits that one run gives at most
Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class _Ready:
    """A plan that is compiled and has its memory, that of a run's inputs too."""

    def __init__(self, plan: Plan, kernels: dict[str, int], arena: Memory, run: Run) -> None:
        self.plan, self.arena, self.run = plan, arena, run
        self.records, self.args = plan.table(kernels, arena.address, STEP)
        self.address = int(self.records.ctypes.data)
        logits = plan.steps[-1].writes[0]
        at = plan.offsets[logits]
        self.logits = arena.bytes[at : at + logits.rows * logits.row_bytes].view(np.float32)
        self.logits = self.logits.reshape(logits.rows, -1)


class Engine:
    """Runs batches of sequences through one model.

    ``run([Part(seq, ids)])`` puts ids behind what each sequence holds and gives logits float32
    ``[n_outputs, n_vocab]``, in the order of the parts. Raises ContextFullError when a part does
    not fit, FileError when the model's file shrank or was written to; then no sequence has changed.
    Several threads may call it: they take turns.
    """

    def __init__(
        self,
        gguf: GGUF,
        config: Config,
        isa: Isa,
        *,
        n_threads: int,
        n_ctx: int,
        kv: str = "f16",
        n_sequences: int = 1,
        deterministic: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.isa, self.n_threads, self.n_ctx = config, isa, n_threads, n_ctx
        self.deterministic, self.progress = deterministic, progress
        self.cache, self.kernels = KVCache(config, n_ctx, kv, n_sequences), Tally()
        self._table, self._batch_sizes = tuned_row(isa).table, batch_sizes(isa)
        self.gguf, self._weights, self.check_files = gguf, Weights(gguf), gguf.check
        self._ready: dict[tuple[int, int], _Ready] = {}
        self._arena = Memory(0)
        self._team: Team | None = None
        self._closed = False
        self.lock = threading.RLock()  # for whoever must find the cache as they left it
        self._ropes = [
            RopeTable(*rope_frequencies(config, bool(pool.window)), n_ctx)
            for pool in self.cache.pools
        ]
        self.max_tokens = min(CHUNK, max(n_ctx, GEMV_TOKENS[-1] + 1))

    # -- plans ----------------------------------------------------------------------------------

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> Plan:
        """The plan that serves batches of this size."""
        return self._plan_for(n_tokens, n_outputs).plan

    def _bucket(self, n: int, most: int) -> int:
        for size in self._batch_sizes:  # every token comes by here
            if n <= size < most:
                return size
        return most

    def _plan_for(self, n_tokens: int, n_outputs: int) -> _Ready:
        key = self._bucket(n_tokens, self.max_tokens), self._bucket(n_outputs, OUTPUTS)
        ready = self._ready.get(key)
        if ready is None:
            began = time.perf_counter()
            plan = build_plan(
                self.config,
                self._weights,
                self.cache,
                self.isa,
                *key,
                n_threads=self.n_threads,
                deterministic=self.deterministic,
                table=self._table,
            )
            kernels = load_kernels(plan.specs(), self.isa, self.progress, self.kernels)
            self._grow(plan)
            run = Run(plan, self.cache, self._ropes)
            ready = self._ready[key] = _Ready(plan, kernels, self._arena, run)
            self.kernels.seconds += time.perf_counter() - began
        return ready

    def _grow(self, plan: Plan) -> None:
        """One arena and one team serve all plans; a plan that needs more gets them anew, and the
        others are placed again.
        """
        if len(self._arena.bytes) < plan.arena_bytes:
            if self._team is not None:
                self._team.close()  # or a thread may still be reading the old tables
            self._arena = Memory(plan.arena_bytes)
            for key, ready in self._ready.items():
                kernels = load_kernels(ready.plan.specs(), self.isa)
                self._ready[key] = _Ready(ready.plan, kernels, self._arena, ready.run)
        if self._team is None or self._team.scratch < plan.scratch:
            if self._team is not None:
                self._team.close()
            load_kernels([Work()], self.isa, tally=self.kernels)  # the team's own
            self._team = Team(self.n_threads, self.isa, plan.scratch)

    # -- runs -----------------------------------------------------------------------------------

    def run(self, parts: Ids[Part]) -> np.ndarray:
        """One pass over at most ``max_tokens`` tokens; see the class."""
        return self._run(parts, self._read_logits)

    def run_timed(self, parts: Ids[Part]) -> list[tuple[str, float]]:
        """The same, giving each step's label and seconds instead of logits."""
        with self.lock:
            plan = self._plan_of(parts).plan
            times = np.zeros((len(plan) + 1, 2), np.int64)
            self._run(parts, lambda ready, run: None, int(times.ctypes.data))
        return list(zip([step.label for step in plan], step_times(times).tolist(), strict=True))

    def run_reference(self, parts: Ids[Part], until: str | None = None) -> tuple[Plan, np.ndarray]:
        """The same through the kernels' numpy twins, up to and with the step labelled ``until``.

        Gives the plan and its arena, to compare step by step.
        """
        with self.lock:
            ready = self._plan_of(parts)
            run = self._prepare(ready, parts)
            arena = np.zeros_like(ready.arena.bytes)
            ready.plan.run_reference(arena, run, until)
            return ready.plan, arena

    def embed(self, ids: Ids[int]) -> np.ndarray:
        """Mean over ``ids`` of the last layer's normed states, of length 1: float32 ``[n_embd]``.

        Raises ContextFullError when they do not fit.
        """
        if not len(ids):
            raise TreadleError("no tokens")
        with self.lock:
            seq = self.cache.sequence()
            try:
                self.cache.check_room(seq, len(ids))
                total = np.zeros(self.config.n_embd)
                for at in range(0, len(ids), self.max_tokens):
                    part = Part(seq, ids[at : at + self.max_tokens], n_outputs=0)
                    total += self._run([part], self._read_states).sum(0)
            finally:
                with interrupts_held():
                    seq.close()
        return (total / (np.linalg.norm(total) or 1.0)).astype(np.float32)

    def match(self, seq: Sequence, ids: Ids[int]) -> int:
        """Make ``seq`` hold the longest beginning of ``ids`` that the cache has; its length."""
        with self.lock, interrupts_held():
            return self.cache.match(seq, ids)

    def truncate(self, seq: Sequence, n: int) -> None:
        """Make ``seq`` forget all but its first ``n`` tokens.

        Where a layer's window no longer reaches back so far, they are read again.
        """
        with self.lock:
            again: list[int] = []
            with interrupts_held():
                if self.cache.visible(seq, n) < n:
                    again = seq.ids[:n]
                    n = self.cache.match(seq, [*again, -1])
                self.cache.truncate(seq, n)
            for at in range(n, len(again), self.max_tokens):
                self.run([Part(seq, again[at : at + self.max_tokens], n_outputs=0)])

    def _run(self, parts: Ids[Part], read: Callable[[_Ready, Run], T], times: int = 0) -> T:
        with self.lock:
            ready = self._plan_of(parts)  # compiling takes seconds, and may be interrupted
            starts = [len(part.seq) for part in parts]
            assert self._team is not None
            with interrupts_held() as held:
                run = self._prepare(ready, parts)
                job = ready.address, len(ready.records), run.address, times
                try:
                    with Alarm() as alarm:
                        self._team.run(*job, alarm.address)
                        stopped = alarm.rung
                    if stopped:
                        held.let()
                        # No handler raised: the run is wanted, and now nothing stops it, or a
                        # program with a signal every moment would never see its end.
                        self._team.run(*job)
                    self.check_files()
                # Ctrl-C, a file that shrank, a signal handler of the user's own.
                except BaseException:
                    for part, start in zip(parts, starts, strict=True):
                        self.cache.truncate(part.seq, start)
                    raise
                for part in parts:
                    self.cache.commit(part.seq)
            return read(ready, run)

    def steps(self, parts: Ids[Part]) -> tuple[Plan, Run, Team]:
        """The plan for a batch, its inputs laid out, and the team, for whoever runs a plan piece by
        piece: hold ``lock``, and let the cache commit each sequence afterwards.
        """
        ready = self._plan_of(parts)
        assert self._team is not None
        return ready.plan, self._prepare(ready, parts), self._team

    def _plan_of(self, parts: Ids[Part]) -> _Ready:
        """The plan for a batch, once its sizes and ids are known to be sound."""
        if self._closed:
            raise TreadleError("the model is closed")
        n_tokens = n_outputs = 0
        n_vocab, seqs = self.config.n_vocab, set()
        for part in parts:
            n = len(part.ids)
            if not 0 <= part.n_outputs <= n:
                raise TreadleError("a part of a batch that wants more logits than it has tokens")
            if n and not (min(part.ids) >= 0 and max(part.ids) < n_vocab):
                raise TreadleError(f"a token id outside 0..{n_vocab - 1}")
            n_tokens, n_outputs = n_tokens + n, n_outputs + part.n_outputs
            seqs.add(id(part.seq))
        if len(seqs) < len(parts):
            raise TreadleError("two parts of a batch for one sequence")
        if not 0 < n_tokens <= self.max_tokens or n_outputs > OUTPUTS:
            raise TreadleError(
                f"a batch of {n_tokens} tokens and {n_outputs} outputs; "
                f"at most {self.max_tokens} and {OUTPUTS}"
            )
        return self._plan_for(n_tokens, n_outputs)

    def _prepare(self, ready: _Ready, parts: Ids[Part]) -> Run:
        """Make room for a batch, all of it or nothing, and lay out what its steps read."""
        starts = [len(part.seq) for part in parts]
        done: list[tuple[Sequence, int]] = []
        try:
            for part, start in zip(parts, starts, strict=True):
                self.cache.extend(part.seq, part.ids)
                done.append((part.seq, start))
        except TreadleError:
            for seq, start in done:
                self.cache.truncate(seq, start)
            raise
        ready.run.lay_out(parts, starts)
        return ready.run

    def _read_logits(self, ready: _Ready, run: Run) -> np.ndarray:
        logits = ready.logits[: run["n_outputs"], : self.config.n_vocab].copy()
        cap = self.config.logit_softcap
        return np.tanh(logits / cap) * np.float32(cap) if cap else logits

    def _read_states(self, ready: _Ready, run: Run) -> np.ndarray:
        """What the output norm makes of each token, float64 ``[n_tokens, n_embd]``.

        A run without outputs leaves the residual stream where that step would have read it.
        """
        step = next(step for step in ready.plan if step.label == "output_norm")
        x, weight = step.reads[0], self._weights.floats("output_norm.weight").array
        at, n_embd = ready.plan.offsets[x], self.config.n_embd
        rows = ready.arena.bytes[at : at + x.rows * x.row_bytes].view(np.float32)
        states = rows.reshape(x.rows, -1)[: run["n_tokens"], :n_embd].astype(np.float64)
        scale = np.sqrt(np.mean(states**2, axis=-1, keepdims=True) + self.config.norm_eps)
        normed: np.ndarray = states / scale * weight[:n_embd]
        return normed

    def close(self) -> None:
        """Stop the threads and let go of the weights. The engine may not run again."""
        with self.lock:
            self._closed = True
            if self._team is not None:
                self._team.close()
                self._team = None
            self._ready.clear()
            self._weights.consts.clear()
