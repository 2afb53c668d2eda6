"""Engines that ``treadle bench`` can time, behind one small interface: treadle and llama.cpp.

Each sequence has its own stream of random tokens, because equal streams could share pages. The
cache always holds a prefix of each stream, so ``set_depth`` only truncates it, or feeds the tokens
that are missing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from treadle.errors import TreadleError

BATCH = 512  # llama.cpp's batch size in tokens, its own bench's default
CELLS = 256  # llama.cpp rounds a sequence's KV cells up to a multiple of this
# ggml's type numbers of KV cache types.
GGML_KV = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
Streams = Sequence[Sequence[int]]


class BenchEngine(Protocol):
    """An engine that can be timed. ``name``: the engine's name in the results."""

    name: str

    def set_depth(self, n: int, n_sequences: int) -> None:
        """Make each of the first ``n_sequences`` hold the first ``n`` tokens of its stream."""

    def prefill(self, n: int) -> None:
        """Prefill the next ``n`` tokens of the first sequence's stream, in batches of the engine's
        own size.
        """

    def decode(self, n: int, n_sequences: int) -> None:
        """Decode ``n`` steps: each runs the next token of the first ``n_sequences`` in a batch."""

    def close(self) -> None:
        """Free memory and threads."""


def streams(n_sequences: int, n_tokens: int, n_vocab: int) -> list[list[int]]:
    """Return random token ids below ``n_vocab``, ``[n_sequences][n_tokens]``, the same in every
    call.
    """
    return [
        [random_ids.randrange(n_vocab) for _ in range(n_tokens)]
        for random_ids in map(random.Random, range(n_sequences))
    ]


class Treadle:
    """treadle itself as a ``BenchEngine``, with a session for each stream of ``ids`` (token ids,
    ``[n_sequences][n_tokens]``).
    """

    name = "treadle"

    def __init__(self, model: Any, ids: Streams) -> None:
        self.model = model
        self.ids = ids
        self.sessions = [model.session() for _ in ids]

    def set_depth(self, n: int, n_sequences: int) -> None:
        """Make each of the first ``n_sequences`` hold the first ``n`` tokens of its stream."""
        for session, ids in zip(self.sessions[:n_sequences], self.ids, strict=False):
            if session.n_past > n:
                session.truncate(n)
            elif session.n_past < n:
                session.feed(ids[session.n_past : n])

    def prefill(self, n: int) -> None:
        """Prefill the next ``n`` tokens of the first sequence's stream, in batches of the engine's
        own size.
        """
        session = self.sessions[0]
        session.feed(self.ids[0][session.n_past : session.n_past + n])

    def decode(self, n: int, n_sequences: int) -> None:
        """Decode ``n`` steps: each runs the next token of the first ``n_sequences`` in a batch."""
        from treadle.engine.batch import BatchItem

        taking = list(zip(self.sessions[:n_sequences], self.ids, strict=False))
        for _ in range(n):
            self.model.engine.run([BatchItem(s.seq, [ids[s.n_past]]) for s, ids in taking])

    def close(self) -> None:
        """Free the sessions' pages of the KV cache."""
        for session in self.sessions:
            session.close()


class TreadleEncoder(Treadle):
    """treadle with an encoder-decoder model. The encoder reads the prompt; the decoder generates
    tokens that attend to the encoded prompt, whose length is the test's depth, at least one token.
    """

    def __init__(self, model: Any, ids: Streams) -> None:
        self.model = model
        self.ids = ids
        self.sessions = []
        self.n_source = 0  # tokens of the sessions' prompts

    def set_depth(self, n: int, n_sequences: int) -> None:
        """Encode a prompt of ``n`` tokens, at least one, for each of the first ``n_sequences``; the
        decoder has no tokens then.
        """
        n = max(n, 1)
        if self.n_source != n or len(self.sessions) < n_sequences:
            self.close()
            self.n_source = n
            for ids in self.ids[:n_sequences]:
                self.sessions.append(self.model.session(source=ids[:n]))
        for session in self.sessions:
            session.reset()

    def prefill(self, n: int) -> None:
        """Encode the first ``n`` tokens of the first stream, and compute their keys and values for
        the decoder. The sessions of ``set_depth`` are closed first.
        """
        self.close()  # their prompts hold pages
        engine = self.model.engine
        source = tuple(self.ids[0][:n])
        with engine.lock:
            keys = engine.cache.inputs.hold(source, shared=False)
            engine.encoder.finish(source, keys)
            keys.drop()

    def close(self) -> None:
        """Free the sessions' pages of the KV cache."""
        super().close()
        self.sessions.clear()


class LlamaCpp:
    """llama.cpp, called through llama-cpp-python's binding of the C interface: no other Python code
    of that package runs between two batches. Flash attention has llama.cpp's default setting.
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
        keys, _, values = (kv or "f16").partition("-")
        if not {keys, values or keys} <= GGML_KV.keys():
            raise TreadleError(f"llama.cpp does not support a KV cache of type {kv}")
        self.api = llama_cpp
        self.ids = ids
        self.n_held = [0] * len(ids)
        logging.getLogger(self.name).setLevel(logging.ERROR)  # its load messages are long
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
        settings.type_k, settings.type_v = GGML_KV[keys], GGML_KV[values or keys]
        self.ctx = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.ctx:
            llama_cpp.llama_model_free(self.model)
            raise TreadleError(f"llama.cpp cannot make a context of {context} tokens for {path}")
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(max(BATCH, len(ids)), 0, 1)

    def set_depth(self, n: int, n_sequences: int) -> None:
        """Make each of the first ``n_sequences`` hold the first ``n`` tokens of its stream."""
        for which in range(n_sequences):
            if self.n_held[which] > n:
                # If it cannot be truncated (a window's keys may be gone), process it again.
                kept = self.api.llama_memory_seq_rm(self.memory, which, n, -1)
                if not kept:
                    self.api.llama_memory_seq_rm(self.memory, which, -1, -1)
                self.n_held[which] = n if kept else 0
            self._take(which, n - self.n_held[which])

    def prefill(self, n: int) -> None:
        """Prefill the next ``n`` tokens of the first sequence's stream, in batches of at most BATCH
        tokens.
        """
        self._take(0, n)

    def decode(self, n: int, n_sequences: int) -> None:
        """Decode ``n`` steps: each runs the next token of the first ``n_sequences`` in a batch."""
        for _ in range(n):
            self._run([(which, 1) for which in range(n_sequences)])

    def _take(self, which: int, n: int) -> None:
        for done in range(0, n, BATCH):
            self._run([(which, min(BATCH, n - done))])

    def _run(self, parts: Sequence[tuple[int, int]]) -> None:
        """Run one batch. ``parts``: (number of the sequence, number of its next tokens to run); the
        last token of each part gets logits. Raises TreadleError if llama.cpp fails.
        """
        batch = self.batch
        row = 0
        for which, n in parts:
            for _ in range(n):
                position = self.n_held[which]
                batch.token[row] = self.ids[which][position]
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = which
                batch.logits[row] = 0
                self.n_held[which] += 1
                row += 1
            batch.logits[row - 1] = 1
        batch.n_tokens = row
        code = self.api.llama_decode(self.ctx, batch)
        if code:
            raise TreadleError(f"llama.cpp failed to run a batch of {row} tokens ({code})")
        self.api.llama_synchronize(self.ctx)  # waits for the logits, so nothing is left running

    def close(self) -> None:
        """Free memory and threads."""
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.ctx)
        self.api.llama_model_free(self.model)
