"""The engine: token ids in, logits out. It knows plans, pages and threads, and nothing of text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

import numpy as np

from treadle.batch import Part, Run
from treadle.errors import ContextFullError, TreadleError
from treadle.jit.kernel import load_kernels
from treadle.kernels.choice import GEMV_TOKENS
from treadle.kvcache import KVCache, Sequence
from treadle.models.archs import rope_frequencies
from treadle.models.decoder import TILE_ROWS, Weights, build_plan
from treadle.plan import Plan
from treadle.runtime.runner import STEP
from treadle.runtime.threads import Memory, Team, step_times

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.isa.isa import Isa
    from treadle.models.config import Config

CHUNK = 512  # tokens of a prefill that one run takes
OUTPUTS = 128  # rows of logits that one run gives at most
Progress = Callable[[str, int, int], None]


class _Ready:
    """A plan that is compiled and has its memory."""

    def __init__(self, plan: Plan, kernels: dict[str, int], arena: Memory) -> None:
        self.plan, self.arena = plan, arena
        self.records, self.args = plan.table(kernels, arena.address, STEP)
        logits = plan.steps[-1].writes[0]
        at = plan.offsets[logits]
        self.logits = arena.bytes[at : at + logits.rows * logits.row_bytes].view(np.float32)
        self.logits = self.logits.reshape(logits.rows, -1)


class Engine:
    """Runs batches of sequences through one model.

    ``run([Part(seq, ids)])`` puts ids behind what each sequence holds and gives logits float32 ``[n_outputs, n_vocab]``, in the
    order of the parts. Raises ContextFullError when a part does not fit; then nothing has changed.
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
        self.cache = KVCache(config, n_ctx, kv, n_sequences)
        self._weights = Weights(gguf)
        self._ready: dict[tuple[int, int], _Ready] = {}
        self._arena = Memory(0)
        self._team: Team | None = None
        self._inverse = [rope_frequencies(config, local) for local in (False, True)]
        self.max_tokens = min(CHUNK, max(n_ctx, GEMV_TOKENS[-1] + 1))

    # -- plans ----------------------------------------------------------------------------------

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> Plan:
        """The plan that serves batches of this size."""
        return self._plan_for(n_tokens, n_outputs).plan

    def _bucket(self, n: int, most: int) -> int:
        return next((size for size in GEMV_TOKENS if n <= size), most)

    def _plan_for(self, n_tokens: int, n_outputs: int) -> _Ready:
        key = self._bucket(n_tokens, self.max_tokens), self._bucket(n_outputs, OUTPUTS)
        if key not in self._ready:
            plan = build_plan(
                self.config,
                self._weights,
                self.cache,
                self.isa,
                *key,
                n_threads=self.n_threads,
                deterministic=self.deterministic,
            )
            kernels = load_kernels(plan.specs(), self.isa, self.progress)
            self._grow(plan)
            self._ready[key] = _Ready(plan, kernels, self._arena)
        return self._ready[key]

    def _grow(self, plan: Plan) -> None:
        """One arena and one team serve all plans; a plan that needs more gets them anew, and the others are placed again."""
        if len(self._arena.bytes) < plan.arena_bytes:
            self._arena = Memory(plan.arena_bytes)
            for key, ready in self._ready.items():
                kernels = load_kernels(ready.plan.specs(), self.isa)
                self._ready[key] = _Ready(ready.plan, kernels, self._arena)
        if self._team is None or self._team.scratch < plan.scratch:
            if self._team is not None:
                self._team.close()
            self._team = Team(self.n_threads, self.isa, plan.scratch)

    # -- runs -----------------------------------------------------------------------------------

    def run(self, parts: Ids[Part]) -> np.ndarray:
        """One pass over at most ``max_tokens`` tokens; see the class."""
        ready, run = self._prepare(parts)
        assert self._team is not None
        records = ready.records
        self._team.run(int(records.ctypes.data), len(records), int(run.state.ctypes.data))
        for part in parts:
            self.cache.commit(part.seq)
        return self._read_logits(ready, run)

    def run_timed(self, parts: Ids[Part]) -> list[tuple[str, float]]:
        """The same, giving each step's label and seconds instead of logits."""
        ready, run = self._prepare(parts)
        assert self._team is not None
        times = np.zeros((len(ready.records) + 1, 2), np.int64)
        records = ready.records
        self._team.run(
            int(records.ctypes.data), len(records), int(run.state.ctypes.data), int(times.ctypes.data)
        )
        for part in parts:
            self.cache.commit(part.seq)
        labels = [step.label for step in ready.plan]
        return list(zip(labels, step_times(times).tolist(), strict=True))

    def run_reference(self, parts: Ids[Part], until: str | None = None) -> tuple[Plan, np.ndarray]:
        """The same through the kernels' numpy twins; gives the plan and its arena, to compare step by step."""
        ready, run = self._prepare(parts)
        arena = np.zeros_like(ready.arena.bytes)
        ready.plan.run_reference(arena, run, until)
        return ready.plan, arena

    def _prepare(self, parts: Ids[Part]) -> tuple[_Ready, Run]:
        n_tokens = sum(len(part.ids) for part in parts)
        n_outputs = sum(part.n_outputs for part in parts)
        if not 0 < n_tokens <= self.max_tokens or n_outputs > OUTPUTS:
            raise TreadleError(f"a batch of {n_tokens} tokens and {n_outputs} outputs; at most {self.max_tokens} and {OUTPUTS}")
        tokens = np.array([t for part in parts for t in part.ids], np.int32)
        if tokens.min() < 0 or tokens.max() >= self.config.n_vocab:
            raise TreadleError(f"a token id outside 0..{self.config.n_vocab - 1}")
        ready = self._plan_for(n_tokens, n_outputs)
        starts = [len(part.seq) for part in parts]
        done: list[tuple[Sequence, int]] = []
        try:
            for part, start in zip(parts, starts, strict=True):
                self.cache.extend(part.seq, part.ids)
                done.append((part.seq, start))
        except ContextFullError:
            for seq, start in done:
                self.cache.truncate(seq, start)
            raise
        positions = np.concatenate([np.arange(s, s + len(p.ids)) for p, s in zip(parts, starts, strict=True)])
        ropes = [self._rope(positions, which) for which in range(len(self.cache.pools))]
        run = Run(parts, starts, ropes, tokens)
        small = ready.plan.n_tokens in GEMV_TOKENS and not self.deterministic
        shared = self.config.n_head // self.config.n_head_kv
        run.lay_out(self.cache, parts, starts, 1 if small else max(1, TILE_ROWS // shared), small)
        return ready, run

    def _rope(self, positions: np.ndarray, which: int) -> np.ndarray:
        """Cosines and sines, f32 ``[n_tokens, 2, rope_dims / 2]``, exact to f32."""
        inverse, factor = self._inverse[which]
        angles = positions[:, None] * inverse
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32) * np.float32(factor)

    def _read_logits(self, ready: _Ready, run: Run) -> np.ndarray:
        logits = ready.logits[: run["n_outputs"], : self.config.n_vocab].copy()
        cap = self.config.logit_softcap
        return np.tanh(logits / cap) * np.float32(cap) if cap else logits

    def close(self) -> None:
        """Stop the threads. The engine may not run again."""
        if self._team is not None:
            self._team.close()
            self._team = None


class Session:
    """One conversation's tokens: a sequence of the engine's cache, fed and rewound."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seq = engine.cache.sequence()

    @property
    def n_past(self) -> int:
        """Tokens held."""
        return len(self.seq)

    @property
    def ids(self) -> list[int]:
        return list(self.seq.ids)

    def feed(self, ids: Ids[int]) -> np.ndarray:
        """Run ``ids`` behind what is held; logits of the last one, float32 ``[n_vocab]``.

        Raises ContextFullError, before anything is run, when they do not fit.
        """
        if len(self.seq) + len(ids) > self.engine.n_ctx:
            raise ContextFullError(
                f"{len(self.seq) + len(ids)} tokens do not fit the context of {self.engine.n_ctx}: "
                "raise it with context= (-c), or shorten the prompt"
            )
        step = self.engine.max_tokens
        for at in range(0, len(ids), step):
            chunk = ids[at : at + step]
            logits = self.engine.run([Part(self.seq, chunk, n_outputs=int(at + step >= len(ids)))])
        return logits[0]

    def prefill(self, ids: Ids[int]) -> np.ndarray:
        """Make the session hold exactly ``ids``, keeping the longest prefix it has; logits of the last one."""
        kept = self.engine.cache.match(self.seq, ids)
        return self.feed(ids[kept:])

    def logits(self, ids: Ids[int]) -> np.ndarray:
        """Run ``ids`` behind what is held; logits after each, float32 ``[len(ids), n_vocab]``."""
        rows = []
        for at in range(0, len(ids), OUTPUTS):
            chunk = ids[at : at + OUTPUTS]
            rows.append(self.engine.run([Part(self.seq, chunk, n_outputs=len(chunk))]))
        return np.concatenate(rows)

    def truncate(self, n: int) -> None:
        """Forget all but the first ``n`` tokens."""
        self.engine.cache.truncate(self.seq, n)

    def reset(self) -> None:
        self.truncate(0)

    def close(self) -> None:
        self.seq.close()

