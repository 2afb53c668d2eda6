"""A model without weights: what the command line sees of the engine, and nothing behind it.

``python -m tests.cli.fake ARGS`` is the real command line over it, for tests with real processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from treadle.errors import ContextFullError

BOS = 256  # after the 256 byte values


@dataclass
class FakeTimings:
    n_prompt: int = 0
    n_cached: int = 0
    prefill_s: float = 0.5
    n_generated: int = 0
    decode_s: float = 0.25
    load_s: float = 0.01


class FakeGeneration:
    """Pieces of a fixed text, a word each."""

    def __init__(self, pieces: Sequence[str], prompt_ids: list[int], n_ctx: int, pause_s: float):
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.timings = FakeTimings(n_prompt=len(prompt_ids), n_cached=1)
        self._pieces = iter(pieces)
        self._n_ctx = n_ctx
        self._pause_s = pause_s

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self.prompt_ids) + len(self.ids) >= self._n_ctx:
            self.finish_reason = "context"
            raise StopIteration
        piece = next(self._pieces, None)
        if piece is None:
            self.finish_reason = self.finish_reason or "stop"
            raise StopIteration
        time.sleep(self._pause_s)
        self.ids.append(len(self.ids))
        self.timings.n_generated = len(self.ids)
        self.text += piece
        return piece


class FakeSession:
    def __init__(self, calls: list[Any]):
        self.calls = calls
        self.n_past = 0

    def reset(self) -> None:
        self.n_past = 0

    def feed(self, ids: list[int]) -> None:
        self.n_past += len(ids)
        self.calls.append(("feed", len(ids), self.n_past))


@dataclass(frozen=True)
class FakeStep:
    label: str
    kernel: str
    shape: tuple[int, ...]
    n_bytes: int
    n_flops: int  # of one token, or output
    grid: Any = field(default_factory=lambda: SimpleNamespace(count="n_tokens"))


class FakePlan(list[FakeStep]):
    n_tokens = 512


@dataclass
class FakeModel:
    """Answers with ``text``, a word at a time, whatever it is asked; `calls` tells what it was."""

    path: Path = Path("fake.gguf")
    text: str = "the quick brown fox"
    n_ctx: int = 64
    n_threads: int = 2
    pause_s: float = 0.0
    interrupt_at: int | None = None  # the piece before which Ctrl-C is pressed
    calls: list[Any] = field(default_factory=list)
    config: Any = field(default_factory=lambda: SimpleNamespace(n_vocab=257))

    def tokenize(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        self.calls.append(("tokenize", text, bos, special))
        return ([] if bos is False else [BOS]) + list(text.encode())

    def pieces(self) -> Iterator[str]:
        for i, word in enumerate(self.text.split(" ")):
            if i == self.interrupt_at:
                raise KeyboardInterrupt
            yield word if i == 0 else " " + word

    def generate(self, prompt: list[int], **settings: Any) -> FakeGeneration:
        self.calls.append(("generate", prompt, settings))
        return self.answer(prompt, settings)

    def chat(self, messages: list[dict[str, str]], **settings: Any) -> FakeGeneration:
        self.calls.append(("chat", [dict(message) for message in messages], settings))
        return self.answer([BOS] * sum(len(m["content"]) for m in messages), settings)

    def answer(self, ids: list[int], settings: dict[str, Any]) -> FakeGeneration:
        if len(ids) >= self.n_ctx:
            raise ContextFullError(f"{len(ids)} tokens do not fit in a context of {self.n_ctx}")
        generation = FakeGeneration((), ids, self.n_ctx, self.pause_s)
        limit = settings.get("max_tokens")
        generation._pieces = self.pieces()
        if limit is not None:
            generation._pieces = islice(self.pieces(), limit)
            generation.finish_reason = "length"
        return generation

    def session(self) -> FakeSession:
        return FakeSession(self.calls)

    def plan(self, n_tokens: int = 1) -> FakePlan:
        outputs = SimpleNamespace(count="n_outputs")
        return FakePlan(
            [
                FakeStep("token_embd", "embed_F32", (n_tokens, 8), 32, 0),
                FakeStep("L0.attn.qkv", "gemv_Q8_0_q8_k8", (24, 8), 216, 384),
                FakeStep("L5.ffn.gate", "gemv_Q8_0_q8_k8", (16, 8), 144, 256),
                FakeStep("output", "gemv_F32_f32_k8", (9, 8), 288, 144, outputs),
            ]
        )

    def profile(self, n_tokens: int) -> list[tuple[str, float]]:
        return [(step.label, 1e-6 * n_tokens) for step in self.plan(n_tokens)]

    def close(self) -> None:
        self.calls.append(("close",))


def install(model: FakeModel) -> None:
    """Make `treadle.load` give ``model``, in this process, for good."""
    import treadle

    def load(path: Path, **settings: Any) -> FakeModel:
        model.path = path
        return model

    vars(treadle)["load"] = load


if __name__ == "__main__":
    from treadle.cli import main

    words = " ".join(f"word{i}" for i in range(100_000))
    install(FakeModel(text=words, n_ctx=1_000_000, pause_s=0.001))
    sys.exit(main())
