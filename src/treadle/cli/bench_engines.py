"""What ``treadle bench`` can time: this program, and llama.cpp, behind one small interface.

Each sequence reads from a stream of random tokens of its own (equal streams could share pages), so
what a test left behind is always the beginning of what the next one wants: ``hold`` goes back, or
reads on, and nothing is read twice.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from treadle.errors import TreadleError

BATCH = 512  # tokens that llama.cpp takes at once, its own bench's default
CELLS = 256  # llama.cpp rounds a sequence's room up to a multiple of this
# ggml's numbers of the types that keys and values may have.
GGML_KV = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
Streams = Sequence[Sequence[int]]


class Contender(Protocol):
    """What can be timed."""

    name: str

    def hold(self, n: int, n_sequences: int) -> None:
        """Make each of the first ``n_sequences`` hold the first ``n`` tokens of its stream."""

    def read(self, n: int) -> None:
        """The first sequence takes the next ``n`` tokens of its stream at once."""

    def write(self, n: int, n_sequences: int) -> None:
        """``n`` times, each of the first ``n_sequences`` takes the next token, all together."""

    def close(self) -> None:
        """Give memory and threads back."""


def streams(n_sequences: int, n_tokens: int, n_vocab: int) -> list[list[int]]:
    """Random tokens, ``[n_sequences][n_tokens]``: the same in every call."""
    return [
        [random_ids.randrange(n_vocab) for _ in range(n_tokens)]
        for random_ids in map(random.Random, range(n_sequences))
    ]


class Treadle:
    """This program."""

    name = "treadle"

    def __init__(self, model: Any, ids: Streams) -> None:
        self.model, self.ids = model, ids
        self.sessions = [model.session() for _ in ids]

    def hold(self, n: int, n_sequences: int) -> None:
        """Make each of the first ``n_sequences`` hold the first ``n`` tokens of its stream."""
        for session, ids in zip(self.sessions[:n_sequences], self.ids, strict=False):
            if session.n_past > n:
                session.truncate(n)
            elif session.n_past < n:
                session.feed(ids[session.n_past : n])

    def read(self, n: int) -> None:
        """The first sequence takes the next ``n`` tokens of its stream at once."""
        session = self.sessions[0]
        session.feed(self.ids[0][session.n_past : session.n_past + n])

    def write(self, n: int, n_sequences: int) -> None:
        """``n`` times, each of the first ``n_sequences`` takes the next token, all together."""
        from treadle.engine.batch import BatchItem

        taking = list(zip(self.sessions[:n_sequences], self.ids, strict=False))
        for _ in range(n):
            self.model.engine.run([BatchItem(s.seq, [ids[s.n_past]]) for s, ids in taking])

    def close(self) -> None:
        """Give the pages back."""
        for session in self.sessions:
            session.close()


class LlamaCpp:
    """llama.cpp, through llama-cpp-python's binding of its C interface: no Python of that library
    runs between two batches. Flash attention is as llama.cpp chooses.
    """

    name = "llama-cpp-python"

    def __init__(
        self, path: Path, ids: Streams, *, threads: int, context: int, kv: str | None
    ) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            hint = "pip install 'treadle[bench]'"
            raise TreadleError(f"llama-cpp-python is not installed: {hint}") from error
        if kv is not None and kv not in GGML_KV:
            raise TreadleError(f"llama.cpp has no keys and values as {kv}")
        self.api, self.ids, self.held = llama_cpp, ids, [0] * len(ids)
        logging.getLogger(self.name).setLevel(logging.ERROR)  # what it tells of a load is long
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise TreadleError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = -(-context // CELLS) * CELLS * len(ids)
        settings.n_batch = settings.n_ubatch = max(BATCH, len(ids))
        settings.n_seq_max = len(ids)
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = GGML_KV[kv or "f16"]
        self.ctx = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.ctx:
            llama_cpp.llama_model_free(self.model)
            raise TreadleError(f"llama.cpp has no context of {context} tokens for {path}")
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(max(BATCH, len(ids)), 0, 1)

    def hold(self, n: int, n_sequences: int) -> None:
        """Make each of the first ``n_sequences`` hold the first ``n`` tokens of its stream."""
        for which in range(n_sequences):
            if self.held[which] > n:
                # What cannot be cut (a window's keys may be gone) is read again.
                kept = self.api.llama_memory_seq_rm(self.memory, which, n, -1)
                if not kept:
                    self.api.llama_memory_seq_rm(self.memory, which, -1, -1)
                self.held[which] = n if kept else 0
            self._take(which, n - self.held[which])

    def read(self, n: int) -> None:
        """The first sequence takes the next ``n`` tokens of its stream at once."""
        self._take(0, n)

    def write(self, n: int, n_sequences: int) -> None:
        """``n`` times, each of the first ``n_sequences`` takes the next token, all together."""
        for _ in range(n):
            self._run([(which, 1) for which in range(n_sequences)])

    def _take(self, which: int, n: int) -> None:
        for done in range(0, n, BATCH):
            self._run([(which, min(BATCH, n - done))])

    def _run(self, parts: Sequence[tuple[int, int]]) -> None:
        """One batch: the next tokens of each sequence, and the logits of its last."""
        batch, row = self.batch, 0
        for which, n in parts:
            for _ in range(n):
                position = self.held[which]
                batch.token[row], batch.pos[row] = self.ids[which][position], position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, which
                batch.logits[row] = 0
                self.held[which] += 1
                row += 1
            batch.logits[row - 1] = 1
        batch.n_tokens = row
        code = self.api.llama_decode(self.ctx, batch)
        if code:
            raise TreadleError(f"llama.cpp failed to run a batch of {row} tokens ({code})")
        self.api.llama_synchronize(self.ctx)  # logits are read here, so nothing is left running

    def close(self) -> None:
        """Give memory and threads back."""
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.ctx)
        self.api.llama_model_free(self.model)
